"""The alpha-beta cost model of a message: a fixed time, and a time for each byte."""

import torch


def fit_cost_model(seconds):
    """The line that fits the times of messages best: ``(alpha, beta)``, with ``seconds = alpha + beta * bytes``.

    seconds: dict from bytes to seconds, two sizes or more. Each time counts by its relative error, so that large
    messages do not decide alone. Source of the model: Hockney, The communication challenge for MPP, 1994.
    """
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    sizes = torch.tensor([int(size) for size in seconds], dtype=torch.float64)
    # alpha / time + beta * size / time should be 1 for each; in megabytes, so that both unknowns are alike in size.
    rows = torch.stack([1 / times, sizes / 1e6 / times], dim=1)
    alpha, beta = torch.linalg.lstsq(rows, torch.ones(len(times), 1, dtype=torch.float64)).solution.flatten().tolist()
    return alpha, beta / 1e6

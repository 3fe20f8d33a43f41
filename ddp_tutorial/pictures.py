"""Pictures for the notebooks: one look for all, readable in greyscale and by colour-blind readers.

Each function returns a Matplotlib Figure, which Jupyter shows when it is the last value of a cell.
A report is what a script writes with ``--json``.
"""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

# The colours of Okabe and Ito, which colour-blind people can tell apart; hatches do the same in greyscale.
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
RANK_HATCHES = ("", "//", "..", "xx")
# Runs are not ranks, so they have colours of their own, and line styles for greyscale.
RUN_LINES = (("#000000", "-"), ("#D55E00", "--"), ("#56B4E9", "-."), ("#666666", ":"))
WRONG = "#D55E00"
QUIET = "#BBBBBB"

STYLE = {
    "figure.dpi": 90,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
}
REPEATED = {"fill": False, "linewidth": 2, "zorder": 3}
UNSEEN = {"fill": False, "linewidth": 0.5, "linestyle": ":"}
COMPUTED = {"facecolor": "#DDDDDD", "edgecolor": "white"}
LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}


def _subplots(*shape, **options):
    """``plt.subplots``, forgotten by pyplot at once: else Jupyter would show the figure a second time."""
    figure, axes = plt.subplots(*shape, **options)
    plt.close(figure)
    return figure, axes


def _rank_look(rank):
    """Colour and hatch of a rank, for bars and boxes; from rank 4 on they come round again."""
    kind = rank % len(RANK_COLOURS)
    return {"facecolor": RANK_COLOURS[kind], "hatch": RANK_HATCHES[kind], "edgecolor": "white"}


def _rank_legend(figure, ranks, *more):
    handles = [Patch(label=f"rank {rank}", **_rank_look(rank)) for rank in range(ranks)]
    figure.legend(handles=[*handles, *more], loc="outside lower left", ncols=ranks + len(more), handleheight=1.2)


def _running_mean(values, reach):
    """Mean of each value and its ``reach`` neighbours on either side (fewer at the ends)."""
    parts = [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _short(number):
    return f"{number:,.0f}" if 1000 <= number < 1e6 else f"{number:.3g}"


def _images_seen(report):
    """How many images a training had seen after each step."""
    return [report["global_batch_size"] * step for step in range(1, len(report["step_loss"]) + 1)]


def _loss_by_images_seen(axes):
    axes.set(xlabel="images seen", ylabel="loss (cross-entropy)", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)


@plt.rc_context(STYLE)
def loss_curves(runs, title=None):
    """Loss against images seen, every step (pale) and its running mean (strong).

    runs: dict from a label to the report of that run.
    """
    figure, axes = _subplots(figsize=(8, 3.4))
    for (label, report), (colour, line) in zip(runs.items(), RUN_LINES * len(runs), strict=False):
        seen, losses = _images_seen(report), report["step_loss"]
        smooth = _running_mean(losses, reach=len(losses) // 60)
        axes.plot(seen, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(seen, smooth, line, color=colour, linewidth=2, label=f"{label}: {smooth[-1]:.3f} at the end")
    _loss_by_images_seen(axes)
    axes.set_title(title or "The loss, as the model sees more and more images")
    axes.legend(title="running mean (pale: every step)", alignment="left")
    return figure


@plt.rc_context(STYLE)
def killed_and_resumed(whole, killed, kills, title=None):
    """The loss of an undisturbed training, and on top of it that of one which was killed, by images seen.

    whole, killed: reports. kills: pairs of a step after which the training was killed, and the step after which it
    was resumed: what lies between had to be done twice.
    """
    figure, axes = _subplots(figsize=(8, 3.6))
    size = whole["global_batch_size"]
    for label, report, look in [
        ("undisturbed", whole, {"color": "#56B4E9", "linewidth": 5, "alpha": 0.6}),
        ("killed and resumed", killed, {"color": "black", "linewidth": 1}),
    ]:
        axes.plot(_images_seen(report), report["step_loss"], label=label, **look)
    for number, (killed_at, resumed_at) in enumerate(kills):
        axes.axvline(size * killed_at, color=WRONG, linestyle="--", label="killed" if not number else None)
        axes.axvspan(size * resumed_at, size * killed_at, facecolor="none", edgecolor=WRONG, hatch="///", alpha=0.4,
                     label="done twice" if not number else None)
    _loss_by_images_seen(axes)
    axes.legend()
    axes.set_title(title or "Killed and resumed lies on never killed")
    return figure


def _picture_grid(images, captions, title, columns):
    """Square pictures with a caption above each. images: [n, 28, 28] of any range."""
    rows = math.ceil(len(captions) / columns)
    figure, axes = _subplots(rows, columns, figsize=(8, rows * (7 / columns + 0.25) + 0.4), squeeze=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    for place, cell in enumerate(axes.flat):
        cell.axis("off")
        if place < len(images):
            cell.imshow(images[place].numpy(force=True), cmap="gray_r")
            cell.set_title(captions[place], loc="center", fontsize=10)
    return figure


@plt.rc_context(STYLE)
def samples(image_set, count=20, title=None):
    """The first ``count`` images of an image set (``.images`` [n, 28, 28], ``.labels`` [n]) with their labels."""
    images, labels = image_set.images[:count], image_set.labels[:count].tolist()
    title = title or f"The first {len(labels)} of {len(image_set):,} images, each with its label"
    return _picture_grid(images, labels, title, columns=10)


@plt.rc_context(STYLE)
def prediction_grid(images, labels, predictions, count=12, title=None):
    """The first ``count`` images with what they are and what the model said, wrong answers in bold orange.

    images: [n, 28, 28] or [n, 1, 28, 28]; labels, predictions: n numbers or tensors [n]. Always ``count`` places,
    so that the figure has the same size however many images there are.
    """
    labels, predictions = torch.as_tensor(labels), torch.as_tensor(predictions)
    pairs = list(zip(labels.tolist(), predictions.tolist(), strict=True))[:count]
    captions = [f"true {true}, said {said}" for true, said in pairs]
    wrong = int((labels != predictions).sum())
    if wrong == len(labels):
        title = title or f"{wrong:,} digits that the model read wrongly (the first {len(pairs)})"
    title = title or f"Of these {len(labels):,} digits the model read {wrong:,} wrongly"
    shown = images[:count].reshape(-1, *images.shape[-2:])
    figure = _picture_grid(shown, captions + [""] * (count - len(captions)), title, columns=6)
    for cell, (true, said) in zip(figure.axes, pairs, strict=False):
        if true != said:
            cell.title.set(color=WRONG, fontweight="bold")
    return figure


@plt.rc_context(STYLE)
def sampler_stripes(orders, title=None, most=48):
    """Which rank got which sample: one row an epoch, one cell a sample, in the colour of the rank that drew it.

    orders: ``orders[epoch][rank]`` is the list of sample numbers in the order drawn. Up to 24 samples have their
    number written in; of more than ``most`` samples the first ``most`` are shown. A sample drawn more than once
    (padding) is split between its ranks and framed; one that nobody drew stays empty.
    """
    ranks = max(len(epoch) for epoch in orders)
    total = 1 + max(sample for epoch in orders for drawn in epoch for sample in drawn)
    shown = min(total, most)
    figure, axes = _subplots(figsize=(9, 0.62 * len(orders) + 1.5))
    for row, epoch in enumerate(orders):
        for sample in range(shown):
            owners = [rank for rank, drawn in enumerate(epoch) for number in drawn if number == sample]
            for part, rank in enumerate(owners):
                height = 0.8 / len(owners)
                corner = (sample, row - 0.4 + part * height)
                axes.add_patch(Rectangle(corner, 1, height, linewidth=0.5, **_rank_look(rank)))
            if len(owners) != 1:
                axes.add_patch(Rectangle((sample, row - 0.4), 1, 0.8, **(REPEATED if owners else UNSEEN)))
            if shown <= 24:
                axes.text(sample + 0.5, row, sample, ha="center", va="center", fontsize=9, bbox=LABEL_BOX, zorder=4)
    axes.set_xlim(-0.1, shown + 0.1)
    axes.set_ylim(len(orders) - 0.5, -0.5)
    axes.set_yticks(range(len(orders)), [f"epoch {row}" for row in range(len(orders))])
    axes.set_xticks([])
    if shown > 24:
        axes.set_xticks([place + 0.5 for place in range(0, shown, 8)], range(0, shown, 8))
    axes.set_xlabel("sample number" + (f" (the first {shown} of {total:,})" if shown < total else ""))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title or _stripes_title(orders))
    times = [sum(shard.count(number) for shard in epoch) for epoch in orders for number in range(shown)]
    extras = [Patch(label="drawn more than once", **REPEATED)] if max(times) > 1 else []
    extras += [Patch(label="drawn by nobody", **UNSEEN)] if min(times) < 1 else []
    _rank_legend(figure, ranks, *extras)
    return figure


def _stripes_title(orders):
    if len(orders) == 1:
        return "Which rank gets which sample"
    if all(epoch == orders[0] for epoch in orders):
        return "Every epoch deals the samples alike"
    return "Each epoch deals the samples anew"


@plt.rc_context(STYLE)
def throughput_bars(runs, title=None):
    """Images per second of each run, as bars, with the ratio to the first.

    runs: dict from a label to the report of that run.
    """
    rates = [report["images_per_second"] for report in runs.values()]
    figure, axes = _subplots(figsize=(8, 0.45 * len(runs) + 1.1))
    colours = ["#666666"] + ["#56B4E9"] * (len(runs) - 1)
    bars = axes.barh(range(len(runs)), rates, height=0.7, color=colours, edgecolor="white")
    notes = [f"{rate:,.0f}  ({rate / rates[0]:.2f} ×)" for rate in rates]
    axes.bar_label(bars, notes, padding=4)
    axes.set_yticks(range(len(runs)), runs)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set(xlabel="images per second (longer is faster)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(title or "Training speed" + (f", against “{next(iter(runs))}”" if len(runs) > 1 else ""))
    return figure


@plt.rc_context(STYLE)
def per_rank_bars(rows, title=None, ylabel="value"):
    """Bars grouped by label, one a rank; says under each label whether all ranks hold exactly the same value.

    rows: dict from a label to the list of values, one a rank (floats).
    """
    ranks = max(len(values) for values in rows.values())
    figure, axes = _subplots(figsize=(8, 3.2))
    width = 0.8 / ranks
    for rank in range(ranks):
        places = [group - 0.4 + (rank + 0.5) * width for group in range(len(rows))]
        bars = axes.bar(places, [values[rank] for values in rows.values()], width, **_rank_look(rank))
        if ranks * len(rows) <= 12:
            axes.bar_label(bars, fmt="%.4g", padding=2, fontsize=9)
    verdicts = ["same on every rank" if len(set(values)) == 1 else "ranks differ" for values in rows.values()]
    names = [f"{label}\n({verdict})" for label, verdict in zip(rows, verdicts, strict=True)]
    axes.set_xticks(range(len(rows)), names)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.margins(y=0.15)
    axes.set(ylabel=ylabel)
    axes.set_title(title or "What each rank holds")
    _rank_legend(figure, ranks)
    return figure


@plt.rc_context(STYLE)
def collective(title, rows):
    """Every rank's numbers before and after a collective. A number in a rank's colour came from that rank.

    rows: ``(before, after)`` for each rank, lists of numbers. A number that no rank had before is drawn in grey: it
    was computed on the way.
    """
    came_from = {number: rank for rank, (before, _) in reversed(list(enumerate(rows))) for number in before}
    widest = [max([1, *(len(row[side]) for row in rows)]) for side in (0, 1)]
    second = widest[0] + 1.6  # where the right half begins
    figure, axes = _subplots(figsize=(min(9, 0.55 * (second + widest[1]) + 1.4), 0.42 * len(rows) + 1.1))
    for row, (before, after) in enumerate(rows):
        for start, numbers in ((0, before), (second, after)):
            for place, number in enumerate(numbers):
                rank = came_from.get(number)
                look = COMPUTED if rank is None else _rank_look(rank)
                axes.add_patch(Rectangle((start + place, row - 0.4), 1, 0.8, **look))
                axes.text(start + place + 0.5, row, _short(number), ha="center", va="center", fontsize=9,
                          bbox=LABEL_BOX, zorder=4)
            if not numbers:
                axes.text(start + 0.1, row, "nothing", va="center", fontsize=9, color="#666666")
    middle = (len(rows) - 1) / 2
    axes.annotate("", (second - 0.3, middle), (widest[0] + 0.3, middle), arrowprops={"arrowstyle": "-|>", "lw": 1.5})
    axes.text(0, -0.55, "before", va="bottom")
    axes.text(second, -0.55, "after", va="bottom")
    axes.set(xlim=(-0.1, second + widest[1] + 0.1), ylim=(len(rows) - 0.5, -1))
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title)
    return figure


@plt.rc_context(STYLE)
def message_times(seconds, title=None):
    """Time and bandwidth of a message, by its size.

    seconds: dict from bytes to seconds, one way.
    """
    sizes = [int(size) for size in seconds]
    times = list(seconds.values())
    figure, (left, right) = _subplots(1, 2, figsize=(9, 3.2))
    left.loglog(sizes, [1e6 * time for time in times], "o-", color=RUN_LINES[0][0])
    left.set(xlabel="bytes in a message", ylabel="microseconds, one way")
    left.set_title("Small messages: latency decides")
    right.semilogx(sizes, [size / time / 1e9 for size, time in zip(sizes, times, strict=True)], "s--",
                   color=RUN_LINES[1][0])
    right.set(xlabel="bytes in a message", ylabel="gigabytes per second")
    right.set_title("Large messages: bandwidth decides")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0 if axes is right else None)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


COMPUTE_LOOKS = {
    "forward": {"facecolor": "#F0E442", "edgecolor": "black"},
    "backward": {"facecolor": "#56B4E9", "hatch": "//", "edgecolor": "white"},
    "finish": {"facecolor": "#DDDDDD", "edgecolor": "black"},
    "optimizer": {"facecolor": "#666666", "hatch": "..", "edgecolor": "white"},
}
MESSAGE_LOOK = {"facecolor": WRONG, "edgecolor": "black", "alpha": 0.7}


@plt.rc_context(STYLE)
def timeline(stages, title=None):
    """The last step of each stage: what every rank computed, and when its messages were on their way.

    stages: dict from a label to a list, for each rank what ``ddp_tutorial.timeline.lanes_of`` returns.
    """
    ranks = max(len(lanes) for lanes in stages.values())
    figure, rows = _subplots(len(stages), 1, figsize=(9, len(stages) * (0.45 * ranks + 0.75) + 0.6), sharex=True,
                             squeeze=False)
    for axes, (label, lanes) in zip(rows[:, 0], stages.items(), strict=True):
        begin = min(start for lane in lanes for _, start, _ in lane["compute"])
        for rank, lane in enumerate(lanes):
            for name, start, end in lane["compute"]:
                axes.broken_barh([(start - begin, end - start)], (2 * rank, 0.9), **COMPUTE_LOOKS[name], linewidth=0.5)
            for _, start, end in lane["messages"]:
                axes.broken_barh([(start - begin, end - start)], (2 * rank + 1.05, 0.6), **MESSAGE_LOOK, linewidth=0.5)
        counts = {len(lane["messages"]) for lane in lanes}
        axes.set_title(f"{label}: {' or '.join(map(str, sorted(counts)))} messages")
        names = [name for rank in range(len(lanes)) for name in (f"rank {rank} computes", "its messages")]
        axes.set_yticks([place + 0.4 for place in range(2 * len(lanes))], names, fontsize=9)
        axes.set_ylim(2 * len(lanes), -0.2)
    rows[-1, 0].set_xlabel("milliseconds since the step began")
    handles = [Patch(label=name, **look) for name, look in {**COMPUTE_LOOKS, "messages": MESSAGE_LOOK}.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


@plt.rc_context(STYLE)
def ring_steps(ranks=4, title=None):
    """Who sends which chunk to whom in a ring all-reduce, and whose numbers are summed in it by then.

    The picture is computed by playing the algorithm with sets of ranks in place of sums.
    """
    state = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # state[rank][chunk]
    moments = [([row[:] for row in state], [])]
    for step in range(2 * (ranks - 1)):
        adding = step < ranks - 1
        # So the second half, in which the sums go round, begins with chunk r + 1 on rank r, which has completed it.
        sends = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        parcels = [(rank, chunk, state[rank][chunk]) for rank, chunk in sends]
        for rank, chunk, parcel in parcels:
            right = (rank + 1) % ranks
            state[right][chunk] = state[right][chunk] | parcel if adding else parcel
        moments.append(([row[:] for row in state], sends))
    columns = ranks
    rows = -(-len(moments) // columns)
    figure, grid = _subplots(rows, columns, figsize=(9.2, 2.5 * rows + 0.4), squeeze=False)
    for moment, axes in enumerate(grid.flat):
        axes.axis("off")
        if moment >= len(moments):
            continue
        held, sends = moments[moment]
        arrived = {((rank + 1) % ranks, chunk) for rank, chunk in sends}
        for rank in range(ranks):
            for chunk in range(ranks):
                parts = sorted(held[rank][chunk])
                for place, origin in enumerate(parts):
                    axes.add_patch(Rectangle((chunk + 0.9 * place / len(parts), rank), 0.9 / len(parts), 0.8,
                                             linewidth=0.3, **_rank_look(origin)))
                if (rank, chunk) in arrived:
                    axes.add_patch(Rectangle((chunk, rank), 0.9, 0.8, **REPEATED))
            axes.text(-0.15, rank + 0.4, f"rank {rank}", ha="right", va="center", fontsize=9)
        what = "before" if not moment else f"{moment}. " + ("add" if moment < ranks else "copy")
        axes.set_title(what, fontsize=10)
        axes.set(xlim=(-1.4, ranks), ylim=(ranks, -0.1))
    _rank_legend(figure, ranks, Patch(label="has just come from the left neighbour", **REPEATED))
    figure.suptitle(title or "A ring all-reduce: each column is a chunk; a box shows whose numbers are in the sum",
                    x=0.01, ha="left", fontsize=11)
    return figure


@plt.rc_context(STYLE)
def prediction(measured, predicted, others=None, ranges=None, title=None):
    """Measured times of an all-reduce by its size, against those that a cost model predicts.

    measured: dict from bytes to seconds. predicted: dict from a label to such a dict. others: further measurements.
    ranges: dict from bytes to the shortest and the longest of the measured times, drawn as vertical lines.
    """
    figure, axes = _subplots(figsize=(8, 3.6))
    for (label, times), marker in zip({"measured": measured, **(others or {})}.items(), "os^"):
        axes.loglog([int(size) for size in times], [1000 * time for time in times.values()], marker, label=label,
                    color="black", markerfacecolor="black" if marker == "o" else "white")
    for size, (shortest, longest) in (ranges or {}).items():
        axes.plot([int(size)] * 2, [1000 * shortest, 1000 * longest], color="black", linewidth=0.8)
    for (label, times), (colour, line) in zip(predicted.items(), RUN_LINES[1:]):
        axes.loglog([int(size) for size in times], [1000 * time for time in times.values()], line, color=colour,
                    label=label, linewidth=2)
    axes.set(xlabel="bytes", ylabel="milliseconds")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title or "An all-reduce: prediction against measurement")
    return figure


@plt.rc_context(STYLE)
def scaling_to(panels, title=None):
    """The efficiency that a cost model gives for each number of GPUs: a panel for each training, a line for each way.

    panels: dict from a panel's heading to a dict from a line's label to a curve, what ``ddp_tutorial.cost.scaling``
    returns. The same label has the same line in every panel; a dot marks the first number of GPUs below one half.
    """
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    looks = dict(zip(labels, (*RUN_LINES, ("#009E73", (0, (7, 1.5, 1, 1.5, 1, 1.5)))), strict=False))
    if len(looks) < len(labels):
        raise ValueError(f"{len(labels)} labels are more than the {len(looks)} lines that can be told apart")
    figure, grid = _subplots(1, len(panels), figsize=(9, 3.3), sharey=True, squeeze=False)
    for axes, (heading, curves) in zip(grid[0], panels.items(), strict=True):
        axes.axhline(50, color=QUIET, linewidth=1)
        crossings = []
        for label, curve in curves.items():
            colour, line = looks[label]
            percent = {gpus: 100 * share for gpus, share in curve.items()}
            axes.plot(percent.keys(), percent.values(), linestyle=line, color=colour, linewidth=2)
            below = next((gpus for gpus, value in percent.items() if value < 50), None)
            if below:
                axes.plot(below, percent[below], "o", color=colour)
                crossings.append((below, percent[below]))
        for place, (gpus, value) in enumerate(sorted(crossings)):  # the first on the left, so that they stay apart
            shift, side = ((-5, -3), ("right", "top")) if not place else ((5, 3), ("left", "bottom"))
            axes.annotate(f"{gpus:,}", (gpus, value), shift, textcoords="offset points", ha=side[0], va=side[1],
                          fontsize=9, bbox=LABEL_BOX, zorder=1.5)
        axes.set_xscale("log", base=2)
        ticks = [gpus for gpus in (1, 8, 64, 512, 4096) if gpus <= max(map(max, curves.values()))]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set(xlabel="GPUs", ylim=(0, 104))
        axes.set_title(heading, fontsize=10)
    grid[0, 0].set_ylabel("efficiency (computing)")
    grid[0, 0].yaxis.set_major_formatter("{x:.0f} %")
    handles = [Line2D([], [], color=looks[label][0], linestyle=looks[label][1], linewidth=2, label=label)
               for label in labels]
    handles.append(Line2D([], [], color="black", marker="o", linestyle="", label="the first below one half"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), handlelength=3)
    figure.suptitle(title or "A cost model, not a measurement: where more GPUs no longer help", x=0.01, ha="left",
                    fontsize=11)
    return figure


@plt.rc_context(STYLE)
def confusion(counts, title=None):
    """Which digit was taken for which: a table of counts, mistakes shaded by how many they are.

    counts: [10][10], of the images of digit i that were taken for digit j.
    """
    figure, axes = _subplots(figsize=(6, 4.2))
    most = max([count for i, row in enumerate(counts) for j, count in enumerate(row) if i != j] + [1])
    shades = [[0 if i == j else count for j, count in enumerate(row)] for i, row in enumerate(counts)]
    axes.imshow(shades, cmap="Oranges", vmin=0, vmax=1.4 * most, aspect="auto")
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count:
                axes.text(j, i, f"{count:,}", ha="center", va="center", fontsize=9,
                          fontweight="normal" if i != j else "bold")
    axes.set_xticks(range(len(counts)))
    axes.set_yticks(range(len(counts)))
    axes.set(xlabel="what the model said", ylabel="what it is")
    wrong = sum(map(sum, shades))
    axes.set_title(title or f"{sum(map(sum, counts)):,} images, {wrong:,} of them taken for another digit (shaded)")
    return figure


@plt.rc_context(STYLE)
def small_batches(curves, title=None):
    """Accuracy by the number of images in each process, every training a dot, their mean a line.

    curves: dict from a label to a dict from images per process to the accuracies of the trainings, 0 to 1.
    """
    figure, axes = _subplots(figsize=(8, 3.6))
    for (label, curve), (colour, line) in zip(curves.items(), RUN_LINES):
        for size, accuracies in curve.items():
            axes.plot([size] * len(accuracies), [100 * a for a in accuracies], "o", color=colour, alpha=0.4)
        means = [100 * sum(accuracies) / len(accuracies) for accuracies in curve.values()]
        axes.plot(list(curve), means, line, color=colour, linewidth=2, label=label)
    sizes = sorted({size for curve in curves.values() for size in curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    axes.set(xlabel="images in each process (the global batch is the same)", ylabel="accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title or "Batch norm of each process: accuracy, by the images that share a mean and a variance")
    return figure


def format_facts(dtype):
    """Layout and limits of a floating-point dtype, from ``torch.finfo``.

    Returns a dict: sign, exponent, mantissa (bits), max, smallest_normal, smallest_subnormal (None where the
    format has none), eps.
    """
    info = torch.finfo(dtype)
    mantissa = round(-math.log2(info.eps))
    # The smallest subnormal has only the last bit of its mantissa set. Converting shows whether it exists.
    tiniest = torch.tensor(info.smallest_normal * info.eps, dtype=torch.float64).to(dtype).double().item()
    return {
        "sign": 1,
        "exponent": info.bits - 1 - mantissa,
        "mantissa": mantissa,
        "max": info.max,
        "smallest_normal": info.smallest_normal,
        "smallest_subnormal": tiniest or None,
        "eps": info.eps,
    }


@plt.rc_context(STYLE)
def float_formats(gradients=None, title=None):
    """float32, float16 and bfloat16: their bits, their limits, and the range of sizes that each can hold.

    gradients: tensor of any shape (optional). Their sizes are drawn above the ranges, and those that become 0 or
    infinite in float16 are counted.
    """
    facts = {name: format_facts(getattr(torch, name)) for name in ("float32", "float16", "bfloat16")}
    heights = [2.6, 1.6] if gradients is None else [2.6, 1.8, 1.6]
    figure, axes = _subplots(len(heights), 1, figsize=(9, sum(heights) + 0.8), height_ratios=heights)
    _draw_bits(axes[0], facts)
    axes[0].set_title(title or "Bits decide: the exponent's give range, the mantissa's give precision")
    lowest, highest = 1e-47, 1e42
    if gradients is not None:
        sizes = gradients.detach().flatten().float().abs()
        sizes = sizes[sizes > 0]
        lowest, highest = 2.0**-44, 2.0**24
        _draw_gradients(axes[1], sizes, lowest, highest)
    _draw_ranges(axes[-1], facts, lowest, highest)
    return figure


BIT_LOOKS = {
    "sign": {"facecolor": "white", "edgecolor": "black"},
    "exponent": {"facecolor": "#F0E442", "hatch": "//", "edgecolor": "black"},
    "mantissa": {"facecolor": "#56B4E9", "edgecolor": "white"},
}


def _draw_bits(axes, facts):
    for row, (name, fact) in enumerate(facts.items()):
        start = 0
        for part, look in BIT_LOOKS.items():
            for place in range(start, start + fact[part]):
                axes.add_patch(Rectangle((place, row), 1, 0.42, linewidth=0.8, **look))
            start += fact[part]
        smallest = fact["smallest_subnormal"]
        limits = (
            f"max {_short(fact['max'])}   smallest normal {_short(fact['smallest_normal'])}   "
            + (f"smallest of all {_short(smallest)}   " if smallest else "no subnormals   ")
            + f"eps (step at 1) {_short(fact['eps'])}"
        )
        axes.text(0, row - 0.1, f"{name}: ", fontweight="bold", va="bottom")
        axes.text(4, row - 0.1, limits, va="bottom")
    axes.set(xlim=(-0.2, 32.2), ylim=(len(facts) - 0.5, -0.5))
    axes.axis("off")
    handles = [Patch(label=part, **look) for part, look in BIT_LOOKS.items()]
    beside_float16 = {"bbox_to_anchor": (32, 1.21), "bbox_transform": axes.transData}
    axes.legend(handles=handles, loc="center right", ncols=3, **beside_float16)


def _draw_ranges(axes, facts, lowest, highest):
    for row, fact in enumerate(facts.values()):
        normal, smallest = fact["smallest_normal"], fact["smallest_subnormal"]
        axes.barh(row, fact["max"] - normal, left=normal, height=0.55, color="#555555")
        if smallest:
            axes.barh(row, normal - smallest, left=smallest, height=0.55, color=QUIET, hatch="//", edgecolor="white")
    axes.set(xscale="log", xlim=(lowest, highest), xlabel="size of a number (logarithmic)")
    axes.set_yticks(range(len(facts)), facts)
    axes.invert_yaxis()
    on = "" if highest > fact["max"] else "; what touches the edge runs on"
    axes.set_title(f"What each can hold (hatched: with fewer and fewer digits{on})")


def _draw_gradients(axes, sizes, lowest, highest):
    half = sizes.to(torch.float16)
    groups = {
        "become 0 in float16": (sizes[half == 0], {"color": WRONG, "hatch": "xx"}),
        "survive": (sizes[(half > 0) & half.isfinite()], {"color": "#56B4E9"}),
        "become infinite": (sizes[half.isinf()], {"color": "black"}),
    }
    # Powers of two, because float16 rounds to 0 from 2**-25 down: no bin mixes what is lost with what is kept.
    bins = [2.0**power for power in range(round(math.log2(lowest)), round(math.log2(highest)) + 1)]
    for label, (group, look) in groups.items():
        if len(group):
            inside = group.clamp(lowest, highest).tolist()
            label = f"{len(group):,} ({len(group) / len(sizes):.1%}) {label}"
            axes.hist(inside, bins, label=label, edgecolor="white", **look)
    axes.set(xscale="log", xlim=(lowest, highest), ylabel="gradients")
    axes.set_title("Sizes of the gradients that are not 0")
    if len(sizes):
        axes.legend(loc="upper right")

"""What the pictures show: bar lengths, colours by rank, texts; not only that they draw."""

import io
import subprocess
import sys
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from torch.utils.data import DistributedSampler

matplotlib.use("Agg")
from ddp_tutorial import pictures  # noqa: E402


class Images(SimpleNamespace):
    def __len__(self):
        return len(self.images)


def deal(count, ranks, epochs, set_epoch, drop_last=False):
    """What DistributedSampler gives each rank in each epoch."""
    orders = []
    for epoch in range(epochs):
        samplers = [DistributedSampler(range(count), ranks, rank, drop_last=drop_last) for rank in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(epoch if set_epoch else 0)
        orders.append([list(sampler) for sampler in samplers])
    return orders


def stripes(figure):
    """{(row, sample): ranks} as drawn, told by colour *and* hatch."""
    looks = list(zip(map(str.lower, pictures.RANK_COLOURS), pictures.RANK_HATCHES, strict=True))
    cells = {}
    for patch in figure.axes[0].patches:
        if patch.get_fill():
            row, sample = round(patch.get_y() + patch.get_height() / 2), round(patch.get_x())
            rank = looks.index((to_hex(patch.get_facecolor()), patch.get_hatch() or ""))
            cells.setdefault((row, sample), []).append(rank)
    return cells


def legend(figure):
    return [text.get_text() for text in (figure.legends or [figure.axes[0].get_legend()])[0].get_texts()]


def hollow(figure, look):
    """Cells that carry only a frame of the given look."""
    patches = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    return [
        (round(patch.get_y() + 0.4), round(patch.get_x()))
        for patch in patches
        if patch.get_linewidth() == look["linewidth"]
    ]


def test_stripes_show_who_got_what():
    figure = pictures.sampler_stripes([[[3, 0], [1, 2]]])
    assert stripes(figure) == {(0, 0): [0], (0, 1): [1], (0, 2): [1], (0, 3): [0]}
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1", "2", "3"]
    assert legend(figure) == ["rank 0", "rank 1"]


@pytest.mark.parametrize("set_epoch", [False, True])
def test_stripes_repeat_without_set_epoch_only(set_epoch):
    figure = pictures.sampler_stripes(deal(12, 3, 2, set_epoch))
    cells = stripes(figure)
    epochs = [[cells[row, sample] for sample in range(12)] for row in range(2)]
    assert (epochs[0] != epochs[1]) == set_epoch
    assert figure.axes[0].get_title("left") == (
        "Each epoch deals the samples anew" if set_epoch else "Every epoch deals the samples alike"
    )


def test_stripes_frame_padding_and_leave_dropped_samples_empty():
    padded = pictures.sampler_stripes(orders := deal(11, 4, 1, True))
    twice = {sample for sample in range(11) if sum(shard.count(sample) for shard in orders[0]) == 2}
    assert twice and {sample for row, sample in hollow(padded, pictures.REPEATED)} == twice
    assert {sample for (row, sample), ranks in stripes(padded).items() if len(ranks) == 2} == twice
    assert legend(padded)[4:] == ["drawn more than once"]
    dropped = pictures.sampler_stripes([[[0, 3], [4, 2]]])
    assert hollow(dropped, pictures.UNSEEN) == [(0, 1)] and (0, 1) not in stripes(dropped)
    assert legend(dropped)[2:] == ["drawn by nobody"]


def test_stripes_of_many_samples_say_how_many_are_shown():
    figure = pictures.sampler_stripes(deal(1000, 2, 1, True))
    assert len(stripes(figure)) == 48
    assert figure.axes[0].get_xlabel() == "sample number (the first 48 of 1,000)"
    assert not figure.axes[0].texts


def test_loss_curves_are_over_images_and_differ_without_colour():
    runs = {
        "one": {"step_loss": [4.0, 2.0, 0.0], "global_batch_size": 100},
        "two": {"step_loss": [1.0] * 80, "global_batch_size": 50},
    }
    figure = pictures.loss_curves(runs)
    raw, smooth, other_raw, other_smooth = figure.axes[0].lines
    assert list(raw.get_xdata()) == [100, 200, 300] and list(raw.get_ydata()) == [4, 2, 0]
    assert other_raw.get_xdata()[-1] == 4000
    assert smooth.get_linestyle() != other_smooth.get_linestyle()
    assert legend(figure) == ["one: 0.000 at the end", "two: 1.000 at the end"]


def test_running_mean_is_over_neighbours():
    assert pictures._running_mean([1, 2, 6, 10], reach=1) == [1.5, 3, 6, 8]


def test_samples_carry_their_labels():
    images = Images(images=torch.arange(30 * 784).reshape(30, 28, 28), labels=torch.arange(30) % 10)
    figure = pictures.samples(images, count=20)
    assert [cell.get_title() for cell in figure.axes] == [str(number % 10) for number in range(20)]
    assert (figure.axes[7].images[0].get_array() == images.images[7].numpy()).all()
    assert figure.get_suptitle() == "The first 20 of 30 images, each with its label"


def test_prediction_grid_says_true_and_said_and_marks_the_wrong():
    images = torch.rand(3, 1, 28, 28)
    figure = pictures.prediction_grid(images, torch.tensor([4, 5, 6]), torch.tensor([9, 5, 0]))
    titles = [cell.get_title() for cell in figure.axes]
    assert titles == ["true 4, said 9", "true 5, said 5", "true 6, said 0", *[""] * 9]
    bold = [cell.title.get_fontweight() == "bold" for cell in figure.axes]
    assert bold == [True, False, True, *[False] * 9]
    assert figure.get_suptitle() == "Of these 3 digits the model read 2 wrongly"
    assert len(pictures.prediction_grid(images[:0], [], []).axes) == 12
    all_wrong = pictures.prediction_grid(images, [4, 5, 6], [9, 9, 9], count=2)
    assert all_wrong.get_suptitle() == "3 digits that the model read wrongly (the first 2)"


def test_throughput_bars_have_lengths_and_ratios():
    figure = pictures.throughput_bars({"one": {"images_per_second": 2000.0}, "two": {"images_per_second": 3900.0}})
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [2000, 3900]
    assert [text.get_text() for text in axes.texts] == ["2,000  (1.00 ×)", "3,900  (1.95 ×)"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["one", "two"]
    assert axes.get_title("left") == "Training speed, against “one”"
    alone = pictures.throughput_bars({"one": {"images_per_second": 2000.0}}).axes[0]
    assert alone.get_title("left") == "Training speed"


def test_rank_bars_notice_a_difference_in_the_last_bit():
    figure = pictures.per_rank_bars({"same": [0.5, 0.5], "off": [0.5, 0.5000000001]})
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.5, 0.5, 0.5000000001]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == ["#0072b2"] * 2 + ["#e69f00"] * 2
    assert [bar.get_hatch() for bar in axes.patches][2:] == ["//"] * 2
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks == ["same\n(same on every rank)", "off\n(ranks differ)"]


# From IEEE 754 (binary16, binary32) and the definition of bfloat16.
@pytest.mark.parametrize(
    "name, exponent, mantissa, largest, smallest",
    [
        ("float32", 8, 23, (2 - 2**-23) * 2**127, 2**-149),
        ("float16", 5, 10, 65504, 2**-24),
        ("bfloat16", 8, 7, (2 - 2**-7) * 2**127, 2**-133),
    ],
)
def test_format_facts(name, exponent, mantissa, largest, smallest):
    facts = pictures.format_facts(getattr(torch, name))
    assert (facts["sign"], facts["exponent"], facts["mantissa"]) == (1, exponent, mantissa)
    assert (facts["max"], facts["smallest_subnormal"]) == (largest, smallest)


def test_float_formats_draw_every_bit_and_range():
    bits, ranges = pictures.float_formats().axes
    rows = [patch.get_y() for patch in bits.patches if isinstance(patch, Rectangle)]
    assert [rows.count(row) for row in range(3)] == [32, 16, 16]
    assert "max 65,504" in bits.texts[3].get_text()
    normal, subnormal = ranges.patches[2:4]
    assert (normal.get_x(), normal.get_x() + normal.get_width()) == (2**-14, 65504)
    assert subnormal.get_x() == 2**-24


def test_gradients_below_float16_are_counted():
    # 1.5 * 2**-25 is below float16's smallest number, 2**-24, but rounds up to it.
    gradients = torch.tensor([[0.0, 2.0**-26, -(2.0**-30)], [-1.5 * 2.0**-25, 1e-3, 1e6]])
    figure = pictures.float_formats(gradients)
    histogram = figure.axes[1]
    texts = [text.get_text() for text in histogram.get_legend().get_texts()]
    assert texts == ["2 (40.0%) become 0 in float16", "2 (40.0%) survive", "1 (20.0%) become infinite"]
    lost = [bar for bar in histogram.patches if to_hex(bar.get_facecolor()) == pictures.WRONG.lower()]
    assert sum(bar.get_height() for bar in lost) == 2
    assert max(bar.get_x() + bar.get_width() for bar in lost if bar.get_height()) <= 2.0**-25
    assert pictures.float_formats(torch.zeros(3)).axes[1].get_legend() is None


def test_figures_are_closed_small_and_quiet(recwarn):
    figure = pictures.sampler_stripes(deal(11, 4, 3, True))
    png = io.BytesIO()
    figure.savefig(png, bbox_inches="tight")
    assert len(png.getvalue()) < 100_000
    assert repr(figure) == "<Figure size 810x302.4 with 1 Axes>"
    assert pictures.plt.get_fignums() == []
    assert [str(warning.message) for warning in recwarn] == []
    sizes = [text.get_fontsize() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    assert min(sizes) >= 9


def test_the_package_imports_without_its_heavy_friends():
    heavy = "import sys, ddp_tutorial, ddp_tutorial.checks, ddp_tutorial.preflight\n"
    heavy += "print(sorted({'torch', 'torchvision', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", heavy], text=True) == "[]\n"


def rank_of(patch):
    """The rank in whose colour and hatch a box is drawn, "computed" for grey."""
    looks = list(zip(map(str.lower, pictures.RANK_COLOURS), pictures.RANK_HATCHES, strict=True))
    look = (to_hex(patch.get_facecolor()), patch.get_hatch() or "")
    return looks.index(look) if look in looks else "computed"


def test_collective_shows_where_numbers_came_from():
    figure = pictures.collective("x", [([10, 11], [10, 20, 30]), ([20, 21], []), ([30], [11])])
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    rows = {row: [rank_of(box) for box in boxes if round(box.get_y() + 0.4) == row] for row in range(3)}
    assert rows == {0: [0, 0, 0, 1, 2], 1: [1, 1], 2: [2, 0]}
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count("nothing") == 1 and {"before", "after", "30"} <= set(texts)


def test_collective_shows_what_was_computed():
    figure = pictures.collective("x", [([1.0], [3.0]), ([2.0], [3.0])])
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert [rank_of(box) for box in boxes] == [0, "computed", 1, "computed"]


def test_message_times_draw_latency_and_bandwidth():
    left, right = pictures.message_times({"8": 1e-4, "1000000": 1e-3}).axes
    assert left.lines[0].get_xydata().tolist() == [[8, 100], [1e6, pytest.approx(1000)]]
    assert right.lines[0].get_xydata().tolist() == [[8, pytest.approx(8e-5)], [1e6, pytest.approx(1)]]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_steps_end_with_everything_everywhere(ranks):
    figure = pictures.ring_steps(ranks)
    moments = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert len(moments) == 1 + 2 * (ranks - 1)
    assert [axes.get_title(loc="left").split(". ")[-1] for axes in moments[1:]] == (
        ["add"] * (ranks - 1) + ["copy"] * (ranks - 1))
    filled = [[patch for patch in axes.patches if patch.get_fill()] for axes in moments]
    assert len(filled[0]) == ranks * ranks, "at first each box holds its own rank's numbers"
    assert len(filled[-1]) == ranks**3, "in the end every box holds everybody's"
    # After the adding, each chunk is complete on one rank only.
    complete = {}
    for patch in filled[ranks - 1]:
        place = (int(patch.get_y()), int(patch.get_x() + 1e-6))
        complete.setdefault(place, set()).add(rank_of(patch))
    whole = [place for place, origins in complete.items() if len(origins) == ranks]
    assert sorted(chunk for _, chunk in whole) == list(range(ranks)) == sorted(rank for rank, _ in whole)
    assert all((rank + 1) % ranks == chunk for rank, chunk in whole), "as the script's comment says"
    framed = [[patch for patch in axes.patches if not patch.get_fill()] for axes in moments]
    assert [len(frames) for frames in framed] == [0] + [ranks] * 2 * (ranks - 1)


def test_timeline_draws_each_stage_from_its_own_begin():
    lane = {"compute": [["forward", 5, 7], ["backward", 7, 11]], "messages": [["gloo:all_reduce", 8, 9]]}
    late = {"compute": [["forward", 6, 7]], "messages": []}
    figure = pictures.timeline({"one": [lane, late], "two": [lane]})
    first, second = figure.axes
    assert first.get_title(loc="left") == "one: 0 or 1 messages" and second.get_title(loc="left") == "two: 1 messages"
    begins = [path.get_extents().x0 for bars in first.collections for path in bars.get_paths()]
    assert begins == [0, 2, 3, 1]
    rows = [path.get_extents().y0 for bars in first.collections for path in bars.get_paths()]
    assert rows == [0, 0, 1.05, 2]


def test_prediction_draws_measured_and_predicted():
    figure = pictures.prediction({"8": 1e-3}, {"model": {"8": 2e-3}}, {"ring": {"8": 3e-3}}, {"8": [5e-4, 4e-3]})
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    assert (lines["measured"], lines["ring"], lines["model"]) == ([1.0], [3.0], [2.0])
    assert [0.5, 4.0] in [list(data) for data in lines.values()]


def test_scaling_has_a_line_a_way_and_marks_where_half_is_lost():
    curves = {"ring": {1: 1.0, 8: 0.6, 64: 0.4, 512: 0.1}, "tree": {1: 1.0, 8: 0.9, 64: 0.8}}
    figure = pictures.scaling_to({"small": curves, "large": {"tree": {1: 1.0, 8: 0.3}}})
    small, large = figure.axes
    assert (small.get_title("left"), large.get_title("left")) == ("small", "large")
    half, ring, dot, tree = small.lines
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([1, 8, 64, 512], [100, 60, 40, 10])
    assert list(half.get_ydata()) == [50, 50] and (dot.get_xdata(), dot.get_ydata()) == ([64], [40])
    assert [text.get_text() for text in small.texts] == ["64"] and [text.get_text() for text in large.texts] == ["8"]
    assert ring.get_linestyle() != tree.get_linestyle() == large.lines[1].get_linestyle()
    assert [tick.get_text() for tick in small.get_xticklabels()] == ["1", "8", "64", "512"]
    assert legend(figure) == ["ring", "tree", "the first below one half"]
    assert "model, not a measurement" in figure.get_suptitle()


def test_scaling_to_draws_no_two_ways_alike():
    ways = {str(number): {1: 1.0, 8: 0.9} for number in range(5)}
    lines = pictures.scaling_to({"all": ways}).axes[0].lines[1:]
    assert len({line.get_color() for line in lines}) == 5
    assert len({str(line._unscaled_dash_pattern) for line in lines}) == 5
    with pytest.raises(ValueError, match="6 labels are more than the 5 lines"):
        pictures.scaling_to({"all": ways | {"5": {1: 1.0}}})


def test_confusion_counts_and_shades_the_mistakes_only():
    counts = [[0] * 10 for _ in range(10)]
    counts[3][3], counts[3][5], counts[9][4] = 900, 2, 5
    axes = pictures.confusion(counts).axes[0]
    assert {text.get_position(): text.get_text() for text in axes.texts} == {(3, 3): "900", (5, 3): "2", (4, 9): "5"}
    shades = axes.images[0].get_array()
    assert (shades[3][3], shades[3][5], shades[9][4]) == (0, 2, 5)
    assert axes.get_title(loc="left").startswith("907 images, 7 of them taken for another digit")


def test_small_batches_draw_every_training_and_their_mean():
    axes = pictures.small_batches({"dense": {2: [0.5, 0.7], 32: [0.9, 0.9]}}).axes[0]
    dots = [(line.get_xdata()[0], list(line.get_ydata())) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [(2, [50.0, 70.0]), (32, [90.0, 90.0])]
    (mean,) = (line for line in axes.lines if line.get_label() == "dense")
    assert list(mean.get_ydata()) == pytest.approx([60, 90]) and list(mean.get_xdata()) == [2, 32]


def test_killed_and_resumed_marks_what_was_done_twice():
    whole = {"step_loss": [3.0, 2.0, 1.0], "global_batch_size": 50}
    axes = pictures.killed_and_resumed(whole, whole, kills=[(2, 1)]).axes[0]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines["undisturbed"] == lines["killed and resumed"] == ([50, 100, 150], [3.0, 2.0, 1.0])
    assert lines["killed"][0] == [100, 100]
    (twice,) = axes.patches
    assert (twice.get_x(), twice.get_width()) == (50, 50)

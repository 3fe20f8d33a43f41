"""Draw docs/one_step.png, the picture in README.md: `python tools/readme_picture.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ddp_tutorial.pictures import RANK_COLOURS, RANK_HATCHES


def box(axes, x, y, width, text, colour, hatch="", height=0.62):
    axes.add_patch(plt.Rectangle((x, y - height / 2), width, height, facecolor=colour, alpha=0.25, edgecolor="none"))
    axes.add_patch(plt.Rectangle((x, y - height / 2), width, height, fill=False, edgecolor=colour, linewidth=1.8))
    axes.add_patch(plt.Rectangle((x, y - height / 2), 0.12, height, facecolor=colour, hatch=hatch, edgecolor="white"))
    axes.text(x + 0.06 + width / 2, y, text, ha="center", va="center", fontsize=10.5)


def arrow(axes, start, end):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#444444", "linewidth": 1.3})


def main():
    figure, axes = plt.subplots(figsize=(9.6, 2.7), dpi=110)
    axes.set_xlim(0, 12.3)
    axes.set_ylim(-0.35, 3.05)
    axes.axis("off")
    for x, text in ((0.9, "a global batch of 100"), (4.35, "forward, backward"), (7.35, "all-reduce"),
                    (10.75, "step")):
        axes.text(x, 2.85, text, ha="center", fontsize=10.5, color="#444444")
    axes.add_patch(plt.Rectangle((0.15, 0.35), 1.5, 1.9, facecolor="#eeeeee", edgecolor="#444444", linewidth=1.2))
    axes.text(0.9, 1.3, "100\nimages", ha="center", va="center", fontsize=10.5)
    for rank, y in ((0, 2.0), (1, 0.6)):
        colour, hatch = RANK_COLOURS[rank], RANK_HATCHES[rank]
        box(axes, 2.5, y, 3.7, f"rank {rank}: same weights,\n50 images, own gradients", colour, hatch, 0.95)
        box(axes, 9.3, y, 2.9, f"rank {rank}: same step,\nsame weights", colour, hatch, 0.95)
        arrow(axes, (1.7, 1.3), (2.45, y))
        arrow(axes, (6.25, y), (6.62, 1.3 + (y - 1.3) * 0.3))
        arrow(axes, (8.2, 1.3 + (y - 1.3) * 0.3), (9.25, y))
    axes.text(7.37, 1.3, "mean of the\ngradients", ha="center", va="center", fontsize=10.5)
    proof = "as one process with all 100 images would have done, but for batch norm: notebook 02 proves it"
    axes.text(6.15, -0.2, proof, ha="center", fontsize=10)
    folder = Path(__file__).parents[1] / "docs"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / "one_step.png", bbox_inches="tight")


if __name__ == "__main__":
    main()

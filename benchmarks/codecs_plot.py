"""The picture of benchmarks/codecs.py: what every codec sends, and how fast it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {"cold": "#4c4c4c", "LR 1e-4": "#c44e52", "LR 1e-5": "#dd8452", "unchanged": "#4c72b0"}


def draw(rates: Sequence[Mapping[str, Any]], title: str, goal_percent: float, path: str) -> None:
    """Three bar charts side by side, a row for each codec and rival, a bar for each state. Writes `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    wholes = [rate for rate in rates if rate["group"] != "stage"]
    names = list(dict.fromkeys(rate["name"] for rate in wholes))
    figure, axes = plt.subplots(1, 3, figsize=(13, 0.62 * len(names) + 1.8), sharey=True, layout="constrained")
    panels = (("encode", "bits", "bits a value (of 16)"), ("encode", "share", "encode, % of memcpy"),
              ("decode", "share", "decode, % of memcpy"))  # fmt: skip
    for axis, (direction, field, heading) in zip(axes, panels, strict=True):
        for row, name in enumerate(names):
            bars = [rate for rate in wholes if rate["name"] == name and rate["direction"] == direction]
            for number, rate in enumerate(bars):
                height = 0.8 / max(len(bars), 1) if len(bars) > 1 else 0.3
                position = row - 0.4 + (number + 0.5) * height if len(bars) > 1 else row
                value = max(rate[field], 0.02)
                axis.barh(position, value, height=0.92 * height, color=COLOURS[rate["state"]])
                text = f"{rate[field]:.2f}" if field == "bits" else f"{rate[field]:.0f}"
                axis.text(value * 1.06 if field == "share" else value + 0.2, position, text, va="center", fontsize=7)
        axis.set_title(heading, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if field == "share":
            axis.set_xscale("log")
            axis.set_xlim(1, 250)
            axis.set_xticks([1, 4, 10, 100], ["1", "4", "10", "100"])
            axis.minorticks_off()
            axis.axvline(goal_percent, color="#55a868", linewidth=1.2, linestyle="--")
        else:
            axis.set_xlim(0, 18)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    marks = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    marks.append(plt.Line2D([0], [0], color="#55a868", linewidth=1.2, linestyle="--"))
    figure.legend(
        marks, [*COLOURS, f"goal, {goal_percent:.0f} %"], loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)

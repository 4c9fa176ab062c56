"""The picture of `ciera bench gather`: where a gather of ours is faster than a plain one, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_ciera.bench.gather_cells import Cell
from fsdp_ciera.units import format_bytes, format_host_rate

_MOST_RATIO = 16.0
"""Ratio at which colours end; numbers go on."""


def draw(cells: Sequence[Cell], setting: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG with a row of panels for each link speed and a panel for each codec.

    Raises `ImportError` without matplotlib, and `OSError` if `path` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    rates = list(dict.fromkeys(cell.rate for cell in cells))
    codecs = list(dict.fromkeys(cell.codec for cell in cells))
    sizes = sorted({cell.size_bytes for cell in cells})
    percents = sorted({cell.changed_percent for cell in cells})
    width, height = 1.4 + max(2.4, 0.52 * len(sizes)) * len(codecs), 1.9 + max(1.5, 0.36 * len(percents)) * len(rates)
    figure, panels = plt.subplots(
        len(rates), len(codecs), figsize=(max(6.0, width), height), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    largest_log = math.log2(min(_MOST_RATIO, max(2.0, *(max(cell.ratio, 1 / cell.ratio) for cell in cells))))
    norm = TwoSlopeNorm(vmin=-largest_log, vcenter=0, vmax=largest_log)
    image = None
    for row, rate in zip(panels, rates, strict=True):
        for axes, codec in zip(row, codecs, strict=True):
            panel_cells = {
                (cell.size_bytes, cell.changed_percent): cell
                for cell in cells
                if (cell.rate, cell.codec) == (rate, codec)
            }
            image = _draw_panel(axes, panel_cells, sizes, percents, norm)
            if rate == rates[0]:
                axes.set_title(codec, fontsize=11)
        row[0].set_ylabel(f"{format_host_rate(rate)}\n% of values changed", fontsize=9)
    bar = figure.colorbar(image, ax=panels, shrink=0.8, pad=0.01)
    ticks = range(-math.floor(largest_log), math.floor(largest_log) + 1)
    bar.set_ticks(list(ticks), labels=[f"{2**tick}x" if tick >= 0 else f"1/{2**-tick}x" for tick in ticks])
    bar.set_label("seconds of plain / ours", fontsize=9)
    figure.supxlabel(
        "gathered total in bf16; above 1 (blue) ours is faster, on the black line both take equally long", fontsize=9
    )
    ranks_per_host = setting["ranks_per_host"]
    ranks = f"{setting['hosts']} hosts" if ranks_per_host == 1 else f"{setting['hosts']} hosts x {ranks_per_host} ranks"
    where = "on one machine's loopback" if setting["mode"] == "loopback" else f"on {setting['num_cores']} cores"
    figure.suptitle(f"One all-gather, {ranks} {where}: how many times faster is ours?", fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_panel(
    axes: Any, cells: Mapping[tuple[int, float], Cell], sizes: Sequence[int], percents: Sequence[float], norm: Any
) -> Any:
    ratios = [[cells[size, percent].ratio for size in sizes] for percent in percents]
    logs = [[math.log2(ratio) for ratio in row] for row in ratios]
    image = axes.imshow(logs, cmap="RdBu", norm=norm, origin="lower", aspect="auto")
    if len(sizes) > 1 and len(percents) > 1:
        axes.contour(logs, levels=[0.0], colors="black", linewidths=1.6)
    for row, percent_ratios in enumerate(ratios):
        for column, ratio in enumerate(percent_ratios):
            is_dark = abs(norm(math.log2(ratio)) - 0.5) > 0.32
            text = f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if ratio >= 0.995 else f"{ratio:.2f}".lstrip("0")
            # A box in the cell's own colour, so that the line does not cross the number.
            box = {"facecolor": image.to_rgba(math.log2(ratio)), "edgecolor": "none", "pad": 1.0}
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if is_dark else "black",
                      bbox=box)  # fmt: skip
    axes.set_xticks(range(len(sizes)), [format_bytes(size) for size in sizes], rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(percents)), [f"{percent:g}" for percent in percents], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image

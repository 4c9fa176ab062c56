"""The picture of `ciera plan`: bytes and seconds of each contender, and bytes of each category."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_ciera.cli.figures.demo import CIERA_COLOR, STOCK_COLOR
from fsdp_ciera.planning.forecast import Forecast


def draw_plan(model: str, projection: Forecast, path: Path) -> None:
    """Writes a PNG. Raises `ImportError` where matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (sent, seconds, categories) = plt.subplots(1, 3, figsize=(16, 4.6), width_ratios=(5, 4, 6))
    _draw_bytes(sent, projection)
    _draw_seconds(seconds, projection)
    _draw_categories(categories, projection)
    for axes in (sent, seconds, categories):
        axes.spines[["top", "right"]].set_visible(False)
    cluster = projection.cluster
    figure.suptitle(
        f"{model}, {cluster.world_size} ranks, {cluster.local_size} a node, {cluster.between_nodes} between nodes, "
        f"{cluster.in_node} inside: a projection",
        fontsize=12,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bytes(axes: Any, projection: Forecast) -> None:
    contenders = list(reversed(projection.contenders))
    axes.barh(
        range(len(contenders)), [contender.slow_bytes / 1e9 for contender in contenders], color=_colors(projection)
    )
    most_gigabytes = max(contender.slow_bytes for contender in contenders) / 1e9
    for y, contender in enumerate(contenders):
        inside = contender.gather_bytes - contender.slow_bytes
        text = f"{contender.slow_bytes / 1e9:,.3g}" + (f"  (+{inside / 1e9:,.3g} inside)" if inside else "")
        axes.text(contender.slow_bytes / 1e9 + most_gigabytes / 60, y, text, va="center", fontsize=9)
    axes.set_xlim(0, 1.5 * most_gigabytes)
    axes.set_yticks(range(len(contenders)), [contender.name for contender in contenders])
    axes.set_xlabel(f"GB that a rank sends {_where(projection)} in a step")
    axes.set_title("bytes of parameter gathers", fontsize=11)


def _draw_seconds(axes: Any, projection: Forecast) -> None:
    contenders = list(reversed(projection.contenders))
    axes.barh(range(len(contenders)), [contender.gather_seconds for contender in contenders], color=_colors(projection))
    most_seconds = max(contender.gather_seconds for contender in contenders)
    for y, contender in enumerate(contenders):
        extra = f"  (+{contender.extra_memory_bytes / 2**30:,.1f} GiB)" if contender.extra_memory_bytes else ""
        text = f"{contender.gather_seconds:,.3g} s{extra}"
        axes.text(contender.gather_seconds + most_seconds / 60, y, text, va="center", fontsize=9)
    axes.set_xlim(0, 1.6 * most_seconds)
    axes.set_yticks(range(len(contenders)), [""] * len(contenders))
    axes.set_xlabel("seconds of gathers in a step (+ memory of a rank)")
    axes.set_title("seconds", fontsize=11)


def _colors(projection: Forecast) -> list[str]:
    return [CIERA_COLOR, *[STOCK_COLOR] * (len(projection.contenders) - 1)]


def _draw_categories(axes: Any, projection: Forecast) -> None:
    rows = list(reversed(projection.plan.rows))
    stock_bytes_of_rows = [row.raw_bytes / projection.cluster.ring_share for row in rows]
    share = projection.cluster.ring_share if projection.topology == "flat" else 1
    our_bytes_of_rows = [(row.wire_bytes - row.in_node_bytes) / share for row in rows]
    positions = range(len(rows))
    axes.barh([y + 0.2 for y in positions], stock_bytes_of_rows, height=0.38, color=STOCK_COLOR, label="FSDP2")
    axes.barh([y - 0.2 for y in positions], our_bytes_of_rows, height=0.38, color=CIERA_COLOR, label="fsdp_ciera")
    for y, stock_bytes, our_bytes in zip(positions, stock_bytes_of_rows, our_bytes_of_rows, strict=True):
        text = f" {stock_bytes / our_bytes:,.1f}x fewer" if our_bytes < stock_bytes else " as many"
        axes.text(our_bytes, y - 0.2, text, va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(min(our_bytes_of_rows) / 3, 12 * max(stock_bytes_of_rows))
    axes.set_yticks(list(positions), [f"{row.category.replace('_', ' ')}\n{row.codec}" for row in rows], fontsize=9)
    axes.set_xlabel(f"bytes that a rank sends {_where(projection)} in a step (logarithmic)")
    axes.set_title("gathers by category and codec", fontsize=11)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9)


def _where(projection: Forecast) -> str:
    return "inside the node" if projection.cluster.num_nodes == 1 else "across nodes"

"""The picture of `ciera plan`: bytes and seconds by contender, and bytes by category."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_ciera.cli.figures.demo import CIERA_COLOR, STOCK_COLOR
from fsdp_ciera.planning.forecast import Forecast


def draw_plan(model: str, found: Forecast, path: Path) -> None:
    """Writes a PNG. Raises `ImportError` where matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (sent, seconds, categories) = plt.subplots(1, 3, figsize=(16, 4.6), width_ratios=(5, 4, 6))
    _draw_bytes(sent, found)
    _draw_seconds(seconds, found)
    _draw_categories(categories, found)
    for axes in (sent, seconds, categories):
        axes.spines[["top", "right"]].set_visible(False)
    cluster = found.cluster
    figure.suptitle(
        f"{model}, {cluster.world_size} ranks, {cluster.local_size} a node, {cluster.between_nodes} between nodes, "
        f"{cluster.in_node} inside: a projection",
        fontsize=12,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bytes(axes: Any, found: Forecast) -> None:
    rows = list(reversed(found.contenders))
    axes.barh(range(len(rows)), [one.slow_bytes / 1e9 for one in rows], color=_colors(found))
    most = max(one.slow_bytes for one in rows) / 1e9
    for place, one in enumerate(rows):
        inside = one.gather_bytes - one.slow_bytes
        text = f"{one.slow_bytes / 1e9:,.3g}" + (f"  (+{inside / 1e9:,.3g} inside)" if inside else "")
        axes.text(one.slow_bytes / 1e9 + most / 60, place, text, va="center", fontsize=9)
    axes.set_xlim(0, 1.5 * most)
    axes.set_yticks(range(len(rows)), [one.name for one in rows])
    axes.set_xlabel(f"GB that a rank sends {_where(found)} in a step")
    axes.set_title("bytes of parameter gathers", fontsize=11)


def _draw_seconds(axes: Any, found: Forecast) -> None:
    rows = list(reversed(found.contenders))
    axes.barh(range(len(rows)), [one.gather_seconds for one in rows], color=_colors(found))
    most = max(one.gather_seconds for one in rows)
    for place, one in enumerate(rows):
        extra = f"  (+{one.extra_memory_bytes / 2**30:,.1f} GiB)" if one.extra_memory_bytes else ""
        axes.text(one.gather_seconds + most / 60, place, f"{one.gather_seconds:,.3g} s{extra}", va="center", fontsize=9)
    axes.set_xlim(0, 1.6 * most)
    axes.set_yticks(range(len(rows)), [""] * len(rows))
    axes.set_xlabel("seconds of gathers in a step (+ memory of a rank)")
    axes.set_title("seconds", fontsize=11)


def _colors(found: Forecast) -> list[str]:
    return [CIERA_COLOR, *[STOCK_COLOR] * (len(found.contenders) - 1)]


def _draw_categories(axes: Any, found: Forecast) -> None:
    rows = list(reversed(found.plan.rows))
    stock = [row.raw_bytes / found.cluster.ring_share for row in rows]
    share = found.cluster.ring_share if found.topology == "flat" else 1
    ours = [(row.wire_bytes - row.in_node_bytes) / share for row in rows]
    places = range(len(rows))
    axes.barh([place + 0.2 for place in places], stock, height=0.38, color=STOCK_COLOR, label="FSDP2")
    axes.barh([place - 0.2 for place in places], ours, height=0.38, color=CIERA_COLOR, label="fsdp_ciera")
    for place, before, after in zip(places, stock, ours, strict=True):
        axes.text(after, place - 0.2, f" {before / after:,.1f}x fewer" if after < before else " as many", va="center",
                  fontsize=9)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(min(ours) / 3, 12 * max(stock))
    axes.set_yticks(list(places), [f"{row.category.replace('_', ' ')}\n{row.codec}" for row in rows], fontsize=9)
    axes.set_xlabel(f"bytes that a rank sends {_where(found)} in a step (logarithmic)")
    axes.set_title("gathers by category and codec", fontsize=11)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9)


def _where(found: Forecast) -> str:
    return "inside the node" if found.cluster.num_nodes == 1 else "across nodes"

"""The pictures of `ciera simulate`: a step as lanes of bars (the paper's Fig. 7), and iterations over the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_ciera.cli.figures.demo import CIERA_COLOR, STOCK_COLOR
from fsdp_ciera.simulator.engine import Schedule
from fsdp_ciera.simulator.project import Point
from fsdp_ciera.simulator.report import STAMP
from fsdp_ciera.units import format_seconds

KIND_COLORS = {
    "Compute": "#b8c4d0",
    "AllGather": "#1f6feb",
    "InNode": "#79b8ff",
    "ReduceScatter": "#8957e5",
    "AllReduce": "#d2a8ff",
    "Hash": "#f2cc60",
    "Cmp": "#e3873b",
    "PreDecmp": "#7ee787",
    "Decmp": "#2da44e",
}
_LANES = ("compute", "sender", "gather", "receiver", "reduce-scatter")
_LINES = ("#1f6feb", "#2da44e", "#8957e5", "#e3873b", "#d1242f", "#0a7ea4", "#bf8700", "#57606a", "#cf4f9b", "#6e7781")
_NARROW = 0.004
"""Bars of a smaller share of the longest step are drawn without an edge."""


@dataclass(frozen=True)
class Panel:
    """One schedule of the timeline."""

    title: str
    schedule: Schedule


def draw_timeline(title: str, panels: Sequence[Panel], path: Path, is_unvalidated: bool) -> None:
    """Writes a PNG: panels above one another over the same time axis. Raises `ImportError` without matplotlib."""
    plt = _pyplot()
    lanes = [_lanes_of(panel.schedule) for panel in panels]
    heights = [len(its) + 1.2 for its in lanes]
    figure, axes_list = plt.subplots(
        len(panels),
        1,
        figsize=(14, 0.34 * sum(heights) + 1.6),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    longest = max(panel.schedule.seconds for panel in panels)
    kinds: dict[str, None] = {}
    for axes, panel, its in zip(axes_list[:, 0], panels, lanes, strict=True):
        _draw_panel(axes, panel, its, longest)
        kinds.update(dict.fromkeys(node.kind for node in panel.schedule.nodes if node.seconds > 0))
    unit, scale = _unit(longest)
    last = axes_list[-1, 0]
    last.set_xlim(0, 1.1 * longest)
    last.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g}")
    last.set_xlabel(f"{unit} after the beginning of the step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for kind, color in KIND_COLORS.items() if kind in kinds]
    figure.suptitle(title, fontsize=12)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.legend(
        handles, [kind for kind in KIND_COLORS if kind in kinds], frameon=False, loc="lower center", ncols=len(handles)
    )
    _finish(figure, path, is_unvalidated)
    plt.close(figure)


def draw_projection(title: str, points: Sequence[Point], path: Path, is_unvalidated: bool) -> None:
    """Writes a PNG: seconds of an iteration and speed-up over FSDP2, by world size. Raises `ImportError` without matplotlib."""
    plt = _pyplot()
    figure, (seconds, speedups) = plt.subplots(1, 2, figsize=(14, 5.2))
    by_contender: dict[str, list[Point]] = {}
    for point in points:
        by_contender.setdefault(point.contender, []).append(point)
    for number, (key, its) in enumerate(by_contender.items()):
        style = _style(key, number)
        sizes = [one.world_size for one in its]
        seconds.plot(sizes, [one.seconds for one in its], label=its[0].label, **style)
        speedups.plot(sizes, [one.speedup for one in its], label=its[0].label, **style)
    sizes = sorted({point.world_size for point in points})
    for axes in (seconds, speedups):
        axes.set_xscale("log", base=2)
        step = -(-len(sizes) // 8)
        axes.set_xticks(sizes[::step], [f"{size:,}" for size in sizes[::step]])
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    seconds.set_yscale("log")
    seconds.set_title("seconds of an iteration (logarithmic)", fontsize=11)
    speedups.set_title("speed-up over FSDP2", fontsize=11)
    speedups.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout(rect=(0, 0, 0.83, 1))
    handles, names = seconds.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="center left", bbox_to_anchor=(0.83, 0.5))
    _finish(figure, path, is_unvalidated)
    plt.close(figure)


def _style(key: str, number: int) -> dict[str, Any]:
    if key == "fsdp2":
        return {"color": STOCK_COLOR, "linewidth": 3.5}
    if key == "default":
        return {"color": CIERA_COLOR, "linewidth": 3, "marker": "o", "markersize": 4}
    dashes = ("-", "--", ":")[number // len(_LINES) % 3] if number else "-"
    return {"color": _LINES[number % len(_LINES)], "linewidth": 1.4, "linestyle": dashes}


def _lanes_of(schedule: Schedule) -> list[str]:
    used = {node.streams[0] for node in schedule.nodes if node.seconds > 0}
    return [lane for lane in (*_LANES, "host") if lane in used]


def _draw_panel(axes: Any, panel: Panel, lanes: Sequence[str], longest: float) -> None:
    schedule = panel.schedule
    for place, lane in enumerate(lanes):
        bars: dict[str, list[tuple[float, float]]] = {}
        for number, node in enumerate(schedule.nodes):
            if node.streams[0] == lane and node.seconds > 0:
                bars.setdefault(node.kind, []).append((schedule.starts[number], node.seconds))
        for kind, its in bars.items():
            axes.broken_barh(its, (place - 0.4, 0.8), facecolors=KIND_COLORS[kind], linewidth=0)
            wide = [bar for bar in its if bar[1] > _NARROW * longest]  # an edge would hide the others
            axes.broken_barh(wide, (place - 0.4, 0.8), facecolors="none", edgecolor="white", linewidth=0.5)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(schedule.seconds, color="black", linewidth=0.8, linestyle="--")
    axes.text(
        schedule.seconds + longest / 150,
        (len(lanes) - 1) / 2,
        format_seconds(schedule.seconds),
        va="center",
        fontsize=10,
    )
    axes.set_title(panel.title, fontsize=10, loc="left")


def _unit(longest: float) -> tuple[str, float]:
    return ("seconds", 1.0) if longest >= 2 else ("milliseconds", 1e3)


def _finish(figure: Any, path: Path, is_unvalidated: bool) -> None:
    if is_unvalidated:
        figure.text(0.5, 0.5, STAMP, fontsize=72, color="#d1242f", alpha=0.16, rotation=18, ha="center", va="center",
                    weight="bold")  # fmt: skip
        figure.text(0.995, 0.985, STAMP, fontsize=12, color="#d1242f", ha="right", va="top", weight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt

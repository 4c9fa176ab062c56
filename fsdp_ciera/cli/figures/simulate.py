"""Draws the pictures of `ciera simulate`: a step as lanes of bars (the paper's Fig. 7), and iterations by number of GPUs."""

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
"""A bar that is shorter than this share of the longest step is drawn without an edge."""


@dataclass(frozen=True)
class Panel:
    """One schedule of the timeline."""

    title: str
    schedule: Schedule


def draw_timeline(title: str, panels: Sequence[Panel], path: Path, is_unvalidated: bool) -> None:
    """Writes a PNG: panels above one another over the same time axis. Raises `ImportError` without matplotlib."""
    plt = _pyplot()
    panel_lanes = [_lanes_of(panel.schedule) for panel in panels]
    heights = [len(lanes) + 1.2 for lanes in panel_lanes]
    figure, axes_list = plt.subplots(
        len(panels),
        1,
        figsize=(14, 0.34 * sum(heights) + 1.6),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    longest_seconds = max(panel.schedule.seconds for panel in panels)
    kinds: dict[str, None] = {}
    for axes, panel, lanes in zip(axes_list[:, 0], panels, panel_lanes, strict=True):
        _draw_panel(axes, panel, lanes, longest_seconds)
        kinds.update(dict.fromkeys(node.kind for node in panel.schedule.nodes if node.seconds > 0))
    unit, scale = _unit(longest_seconds)
    bottom_axes = axes_list[-1, 0]
    bottom_axes.set_xlim(0, 1.1 * longest_seconds)
    bottom_axes.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g}")
    bottom_axes.set_xlabel(f"{unit} after the beginning of the step")
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
    figure, (seconds_axes, speedup_axes) = plt.subplots(1, 2, figsize=(14, 5.2))
    by_contender: dict[str, list[Point]] = {}
    for point in points:
        by_contender.setdefault(point.contender, []).append(point)
    for index, (key, curve) in enumerate(by_contender.items()):
        style = _style(key, index)
        sizes = [point.world_size for point in curve]
        seconds_axes.plot(sizes, [point.seconds for point in curve], label=curve[0].label, **style)
        speedup_axes.plot(sizes, [point.speedup for point in curve], label=curve[0].label, **style)
    sizes = sorted({point.world_size for point in points})
    for axes in (seconds_axes, speedup_axes):
        axes.set_xscale("log", base=2)
        step = -(-len(sizes) // 8)
        axes.set_xticks(sizes[::step], [f"{size:,}" for size in sizes[::step]])
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    seconds_axes.set_yscale("log")
    seconds_axes.set_title("seconds of an iteration (logarithmic)", fontsize=11)
    speedup_axes.set_title("speed-up over FSDP2", fontsize=11)
    speedup_axes.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout(rect=(0, 0, 0.83, 1))
    handles, names = seconds_axes.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="center left", bbox_to_anchor=(0.83, 0.5))
    _finish(figure, path, is_unvalidated)
    plt.close(figure)


def _style(key: str, index: int) -> dict[str, Any]:
    if key == "fsdp2":
        return {"color": STOCK_COLOR, "linewidth": 3.5}
    if key == "default":
        return {"color": CIERA_COLOR, "linewidth": 3, "marker": "o", "markersize": 4}
    dashes = ("-", "--", ":")[index // len(_LINES) % 3] if index else "-"
    return {"color": _LINES[index % len(_LINES)], "linewidth": 1.4, "linestyle": dashes}


def _lanes_of(schedule: Schedule) -> list[str]:
    used = {node.streams[0] for node in schedule.nodes if node.seconds > 0}
    return [lane for lane in (*_LANES, "host") if lane in used]


def _draw_panel(axes: Any, panel: Panel, lanes: Sequence[str], longest_seconds: float) -> None:
    schedule = panel.schedule
    for row, lane in enumerate(lanes):
        bars: dict[str, list[tuple[float, float]]] = {}
        for index, node in enumerate(schedule.nodes):
            if node.streams[0] == lane and node.seconds > 0:
                bars.setdefault(node.kind, []).append((schedule.starts[index], node.seconds))
        for kind, kind_bars in bars.items():
            axes.broken_barh(kind_bars, (row - 0.4, 0.8), facecolors=KIND_COLORS[kind], linewidth=0)
            # an edge would hide the others
            wide_bars = [(start, seconds) for start, seconds in kind_bars if seconds > _NARROW * longest_seconds]
            axes.broken_barh(wide_bars, (row - 0.4, 0.8), facecolors="none", edgecolor="white", linewidth=0.5)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(schedule.seconds, color="black", linewidth=0.8, linestyle="--")
    axes.text(
        schedule.seconds + longest_seconds / 150,
        (len(lanes) - 1) / 2,
        format_seconds(schedule.seconds),
        va="center",
        fontsize=10,
    )
    axes.set_title(panel.title, fontsize=10, loc="left")


def _unit(longest_seconds: float) -> tuple[str, float]:
    return ("seconds", 1.0) if longest_seconds >= 2 else ("milliseconds", 1e3)


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

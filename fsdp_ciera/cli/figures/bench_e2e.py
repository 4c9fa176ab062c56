"""The pictures of a run of the stand: iterations (the paper's Fig. 8), ablation, losses, and ratios by link rate.

Every function writes a PNG. It raises `ImportError` if matplotlib is missing, `OSError` if `path` cannot be written, and
`ReportError` if there is nothing to draw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from fsdp_ciera.bench.ablation import ablation_steps
from fsdp_ciera.bench.contenders import ABLATION, CONTENDERS, FSDP2, KEEP, Contender, Kind
from fsdp_ciera.bench.report import DEFAULT, SLOWER_BAR_PERCENT, Summary, median_seconds, setting_text, summarize
from fsdp_ciera.bench.results import Results
from fsdp_ciera.errors import ReportError
from fsdp_ciera.policies.links import parse_link

_KIND_NAMES = {Kind.STOCK: "stock FSDP2", Kind.PEER: "peers", Kind.OURS: "fsdp_ciera"}
_PARTS = {
    "compute": "compute",
    "gather": "gather",
    "reduce_scatter": "reduce-scatter",
    "other_collective": "other collectives",
    "codec": "codec",
}
_SHADES = {
    Kind.STOCK: ("#4b5563", "#7b8794", "#a9b3bd", "#d5dbe1"),
    Kind.PEER: ("#6b5a45", "#a08a6c", "#c8b698", "#e6dccb"),
    Kind.OURS: ("#123f86", "#1f6feb", "#79aef5", "#cbdffb"),
}
"""Colours of bars: the hue shows the kind of contender, and the lightness the part, from dark to light as in `_PARTS`."""
_CODEC_COLOR = "#e8890c"
"""Colour of encoding and decoding in every bar: they are small, and the part to look for."""
_LINE_COLORS = (
    "#1f6feb",
    "#d1495b",
    "#2a9d5c",
    "#8e5bd0",
    "#e8890c",
    "#0fa3b1",
    "#b5457f",
    "#6b7280",
    "#8a6d1d",
    "#333399",
)


def draw_iterations(results: Results, path: Path, contenders: Mapping[str, Contender] = CONTENDERS) -> None:
    """Draws bars of median seconds, stacked by part, with whiskers from the 5th to the 95th percentile and ratios to FSDP2.

    The medians of parts do not add up to the median of the whole, so they are scaled until they do. Names failed contenders.
    """
    summaries = sorted(summarize(results, contenders), key=lambda summary: list(Kind).index(summary.contender.kind))
    shown = [summary for summary in summaries if summary.measured.steps]
    if not shown:
        raise ReportError("no contender of this run has timed iterations: nothing to draw")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(max(8.0, 1.0 * len(shown) + 1.5), 6.4))
    largest_seconds = max(summary.p95_seconds for summary in shown)
    for position, summary in enumerate(shown):
        _draw_bar(axes, position, summary)
        axes.errorbar(
            position,
            summary.seconds,
            yerr=[[summary.seconds - summary.p5_seconds], [summary.p95_seconds - summary.seconds]],
            color="black",
            capsize=4,
            linewidth=1.2,
        )
        ratio = "" if math.isnan(summary.stock_ratio) else f"{summary.stock_ratio:.2f}x"
        lossy = "" if summary.contender.is_lossless else "\nlossy"
        weight = "bold" if summary.contender.key == DEFAULT else "normal"
        top = max(summary.p95_seconds, summary.seconds) + 0.012 * largest_seconds
        axes.text(position, top, f"{ratio}{lossy}", ha="center", va="bottom", fontsize=10, fontweight=weight,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    if any(summary.contender.key == FSDP2 for summary in shown):
        axes.axhline(median_seconds(results.of(FSDP2)), color="#4b5563", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_ylim(0, 1.13 * largest_seconds)
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_ylabel("seconds of an iteration")
    labels = [_wrapped(summary.contender.label, 13) for summary in shown]
    axes.set_xticks(range(len(shown)), labels, fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    _name_kinds(axes, [summary.contender.kind for summary in shown], max(label.count("\n") + 1 for label in labels))
    _add_parts_legend(axes)
    axes.spines[["top", "right"]].set_visible(False)
    failed = [summary.label for summary in summaries if not summary.measured.steps]
    title = f"{results.setting.model}, {setting_text(results.setting)}: median iteration, 5th to 95th percentile, and x FSDP2"
    axes.set_title(title + (f"\nnot measured: {'; '.join(failed)}" if failed else ""), fontsize=11, pad=30)
    _save(plt, figure, path)


def _draw_bar(axes: Any, position: int, summary: Summary) -> None:
    parts = {part: max(0.0, seconds) for part, seconds in summary.part_seconds.items()}
    total = sum(parts.values())
    bottom = 0.0
    for part, color in zip(_PARTS, (*_SHADES[summary.contender.kind], _CODEC_COLOR), strict=True):
        height = parts[part] * summary.seconds / total if total else 0.0
        hatch = None if summary.contender.is_lossless else "///"
        axes.bar(
            position, height, bottom=bottom, width=0.72, color=color, hatch=hatch, edgecolor="white", linewidth=0.5
        )
        bottom += height


def _name_kinds(axes: Any, kinds: Sequence[Kind], num_lines: int) -> None:
    """Draws a line with the name of the kind below the labels of each kind of contender."""
    depth = -(18 + 12 * num_lines)
    for kind, members in groupby(enumerate(kinds), key=lambda pair: pair[1]):
        positions = [position for position, _ in members]
        color = _SHADES[kind][1]
        axes.plot(
            [positions[0] - 0.4, positions[-1] + 0.4], [0, 0], color=color, linewidth=3, transform=_points_below(axes, depth),
            clip_on=False, solid_capstyle="butt",
        )  # fmt: skip
        axes.text(
            (positions[0] + positions[-1]) / 2, 0, _KIND_NAMES[kind], color=_SHADES[kind][0], ha="center", va="top",
            fontsize=10, fontweight="bold", transform=_points_below(axes, depth - 5),
        )  # fmt: skip


def _points_below(axes: Any, points: float) -> Any:
    """Returns the transform with x in data units, and y `points` above the foot of the axes: tick labels keep their height in
    pictures of any size."""
    from matplotlib.transforms import ScaledTranslation

    return axes.get_xaxis_transform() + ScaledTranslation(0, points / 72, axes.figure.dpi_scale_trans)


def _add_parts_legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    colors = (*_SHADES[Kind.STOCK], _CODEC_COLOR)
    handles = [Patch(color=color, label=name) for color, name in zip(colors, _PARTS.values(), strict=True)]
    axes.legend(
        handles=handles, frameon=False, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9
    )


def draw_ablation(
    results: Results,
    path: Path,
    ablation: Sequence[tuple[str, str]] = ABLATION,
    contenders: Mapping[str, Contender] = CONTENDERS,
) -> None:
    """Draws bars of cumulative speed-ups over stock FSDP2, from left to right; a step without one shows its reason."""
    steps = ablation_steps(results, ablation, contenders)
    known = [step.speedup for step in steps if step.reason is None]
    if not known:
        raise ReportError("no step of the ablation was measured beside stock FSDP2: nothing to draw")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(max(7.0, 1.25 * (len(steps) + 1)), 4.6))
    axes.bar(0, 1, width=0.66, color=_SHADES[Kind.STOCK][1])
    axes.text(0, 1, f"{median_seconds(results.of(FSDP2)):.2f} s", ha="center", va="bottom", fontsize=10)
    for position, step in enumerate(steps, start=1):
        if step.reason is None:
            axes.bar(position, step.speedup, width=0.66, color=_SHADES[Kind.OURS][1])
            axes.text(position, step.speedup, f"{step.speedup:.2f}x", ha="center", va="bottom", fontsize=10)
        else:
            lines = _lines(f"n/a: {step.reason}", 18)
            text = "\n".join(lines[:6]) + (" ..." if len(lines) > 6 else "")
            axes.text(
                position,
                0.03,
                text,
                ha="center",
                va="bottom",
                fontsize=8,
                color="#6b7280",
                transform=axes.get_xaxis_transform(),
            )
    axes.axhline(1, color="#4b5563", linewidth=0.8, linestyle=":")
    axes.set_xticks(
        range(len(steps) + 1),
        ["stock\nFSDP2", *(_wrapped(step.label + (" *" if step.caveat else ""), 14) for step in steps)],
    )
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(steps) + 0.6)
    axes.set_ylim(0, 1.12 * max(1.0, *known))
    axes.set_ylabel("x as fast as stock FSDP2")
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{results.setting.model}, {setting_text(results.setting)}: each step added to those before"
    caveats = dict.fromkeys(step.caveat for step in steps if step.caveat)
    axes.set_title("\n* ".join([title, *caveats]), fontsize=11)
    _save(plt, figure, path)


def draw_losses(results: Results, path: Path, contenders: Mapping[str, Contender] = CONTENDERS) -> None:
    """Draws the losses of a round, and their differences from FSDP2's on a symlog scale.

    Contenders with other bits than FSDP2 have a line each, with their label; all with the same bits share one.
    """
    stock = results.of(FSDP2)
    if stock is None or not stock.losses:
        raise ReportError("FSDP2 has no losses in this run: nothing to draw them against")
    others = [
        summary
        for summary in summarize(results, contenders)
        if summary.measured.losses and summary.contender.key != FSDP2
    ]
    same = [summary for summary in others if summary.has_stock_bits]
    drifting = [summary for summary in others if not summary.has_stock_bits]
    plt = _pyplot()
    figure, (losses, drift) = plt.subplots(1, 2, figsize=(13, 4.6))
    losses.plot(stock.losses, color=_SHADES[Kind.STOCK][2], linewidth=6, label="FSDP2", solid_capstyle="round")
    if same:
        named = f"{len(same)} with the same bits"
        for axes, values in ((losses, same[0].measured.losses), (drift, [0.0] * len(same[0].measured.losses))):
            axes.plot(
                values, color="black", linewidth=1, linestyle="--", label=named if axes is losses else None, zorder=5
            )
    smallest = math.inf
    for summary, color in zip(drifting, _cycled(len(drifting)), strict=True):
        losses.plot(summary.measured.losses, color=color, linewidth=1.3, marker=".", label=summary.label)
        differences = [ours - theirs for ours, theirs in zip(summary.measured.losses, stock.losses, strict=False)]
        drift.plot(differences, color=color, linewidth=1.3, marker=".")
        smallest = min([smallest, *(abs(value) for value in differences if value)])
    drift.set_yscale("symlog", linthresh=_power_of_ten(smallest))
    drift.axhline(0, color=_SHADES[Kind.STOCK][2], linewidth=1, zorder=0)
    losses.set_ylabel("loss")
    drift.set_ylabel("loss - loss of FSDP2 (symlog)")
    for axes in (losses, drift):
        axes.set_xlabel("iteration from the pretrained weights, warm-up included")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*losses.get_legend_handles_labels(), frameon=False, loc="lower center", ncols=5, fontsize=9,
                  bbox_to_anchor=(0.5, -0.07))  # fmt: skip
    figure.suptitle(f"{results.setting.model}, {setting_text(results.setting)}: losses of a round", fontsize=12)
    _save(plt, figure, path)


def draw_rates(runs: Sequence[Results], path: Path, contenders: Mapping[str, Contender] = CONTENDERS) -> None:
    """Draws the ratio to FSDP2 by link rate, for all of ours and for FSDP2 that keeps its parameters gathered.

    Each run has a mark, and lines go through the mean of all runs of a rate. Also raises `ReportError` if the runs differ in
    hosts, ranks or model.
    """
    settings = {(run.setting.hosts, run.setting.ranks_per_host, run.setting.model) for run in runs}
    if len(settings) != 1:
        raise ReportError(f"runs of {len(settings)} different (hosts, ranks, model) cannot share a picture: {settings}")
    rates = sorted({run.setting.rate for run in runs}, key=_bytes_per_second)
    points: dict[str, list[tuple[int, float]]] = {}
    for run in runs:
        for summary in summarize(run, contenders):
            is_shown = summary.contender.kind is Kind.OURS or summary.contender.key == KEEP
            if is_shown and not math.isnan(summary.stock_ratio):
                point = (rates.index(run.setting.rate), summary.stock_ratio)
                points.setdefault(summary.contender.key, []).append(point)
    if not points:
        raise ReportError("no ratio to FSDP2 of ours was measured: nothing to draw")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10.5, 5.6))
    keys = sorted(points, key=lambda key: -points[key][0][1])
    for number, key in enumerate(keys):
        color = {DEFAULT: "black", KEEP: _SHADES[Kind.STOCK][1]}.get(key, _LINE_COLORS[number % len(_LINE_COLORS)])
        positions = sorted({position for position, _ in points[key]})
        means = [fmean(ratio for x, ratio in points[key] if x == position) for position in positions]
        axes.plot(positions, means, color=color, linewidth=2.6 if key == DEFAULT else 1.3, label=contenders[key].label,
                  linestyle="--" if key == KEEP else "-")  # fmt: skip
        axes.scatter(*zip(*points[key], strict=True), color=color, s=18, marker="osD^v"[number % 5], zorder=3)
    axes.axhline(1, color="#4b5563", linewidth=1)
    axes.axhline(1 / (1 + SLOWER_BAR_PERCENT / 100), color="#d1495b", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(rates)), [rate or "no limit" for rate in rates])
    axes.set_xlabel("what a host may send a second")
    axes.set_ylabel(f"x as fast as FSDP2 (dotted: {SLOWER_BAR_PERCENT:g} % longer)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    axes.set_title(
        f"{runs[0].setting.model}, {setting_text(runs[0].setting).partition(',')[0]}: x FSDP2 by rate", fontsize=11
    )
    _save(plt, figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _lines(text: str, width: int) -> list[str]:
    """Breaks a text after blanks and any of `_=-/.`, into lines of at most `width` characters unless a word is longer."""
    lines = [""]
    for word in re.findall(r"[^\s_=\-/.]*(?:[\s_=\-/.]+|$)", text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.strip() for line in lines if line.strip()]


def _wrapped(text: str, width: int) -> str:
    return "\n".join(_lines(text, width))


def _cycled(num_lines: int) -> list[str]:
    return [_LINE_COLORS[number % len(_LINE_COLORS)] for number in range(num_lines)]


def _power_of_ten(value: float) -> float:
    """Returns the largest power of ten that is not above `value`; 1e-6 for infinity, which stands for no drift at all."""
    return float(10 ** math.floor(math.log10(value))) if math.isfinite(value) else 1e-6


def _bytes_per_second(rate: str | None) -> float:
    return math.inf if rate is None else parse_link(rate).bytes_per_second

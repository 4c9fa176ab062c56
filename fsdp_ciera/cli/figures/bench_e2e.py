"""The pictures of a run of the stand: iterations (the paper's Fig. 8), ablation, losses, and ratios by link rate.

Every function writes a PNG, and raises `ImportError` where matplotlib is missing, `OSError` where `path` cannot be written,
and `ReportError` where there is nothing to draw.
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

_GROUPS = {Kind.STOCK: "stock FSDP2", Kind.PEER: "peers", Kind.OURS: "fsdp_ciera"}
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
"""Whose a bar is shows in its hue, and the parts, in the order of `_PARTS`, in how light it is: dark to light."""
_CODEC_COLOR = "#e8890c"
"""Of encoding and decoding in every bar: small and what one looks for."""
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
    """Bars of median seconds, stacked by part, with whiskers from the 5th to the 95th percentile and ratios to FSDP2.

    Medians of parts do not add up to the median of the whole, so parts are scaled to do so. Failed contenders are named.
    """
    everyone = sorted(summarize(results, contenders), key=lambda one: list(Kind).index(one.contender.kind))
    shown = [one for one in everyone if one.measured.steps]
    if not shown:
        raise ReportError("no contender of this run has timed iterations: nothing to draw")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(max(8.0, 1.0 * len(shown) + 1.5), 6.4))
    most = max(one.p95_seconds for one in shown)
    for place, one in enumerate(shown):
        _draw_bar(axes, place, one)
        axes.errorbar(
            place,
            one.seconds,
            yerr=[[one.seconds - one.p5_seconds], [one.p95_seconds - one.seconds]],
            color="black",
            capsize=4,
            linewidth=1.2,
        )
        ratio = "" if math.isnan(one.stock_ratio) else f"{one.stock_ratio:.2f}x"
        lossy = "" if one.contender.is_lossless else "\nlossy"
        weight = "bold" if one.contender.key == DEFAULT else "normal"
        top = max(one.p95_seconds, one.seconds) + 0.012 * most
        axes.text(place, top, f"{ratio}{lossy}", ha="center", va="bottom", fontsize=10, fontweight=weight,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    if any(one.contender.key == FSDP2 for one in shown):
        axes.axhline(median_seconds(results.of(FSDP2)), color="#4b5563", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_ylim(0, 1.13 * most)
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_ylabel("seconds of an iteration")
    labels = [_wrapped(one.contender.label, 13) for one in shown]
    axes.set_xticks(range(len(shown)), labels, fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    _name_groups(axes, [one.contender.kind for one in shown], max(label.count("\n") + 1 for label in labels))
    _add_parts_legend(axes)
    axes.spines[["top", "right"]].set_visible(False)
    failed = [one.label for one in everyone if not one.measured.steps]
    title = f"{results.setting.model}, {setting_text(results.setting)}: median iteration, 5th to 95th percentile, and x FSDP2"
    axes.set_title(title + (f"\nnot measured: {'; '.join(failed)}" if failed else ""), fontsize=11, pad=30)
    _save(plt, figure, path)


def _draw_bar(axes: Any, place: int, one: Summary) -> None:
    parts = {part: max(0.0, seconds) for part, seconds in one.part_seconds.items()}
    total = sum(parts.values())
    bottom = 0.0
    for part, color in zip(_PARTS, (*_SHADES[one.contender.kind], _CODEC_COLOR), strict=True):
        height = parts[part] * one.seconds / total if total else 0.0
        hatch = None if one.contender.is_lossless else "///"
        axes.bar(place, height, bottom=bottom, width=0.72, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
        bottom += height


def _name_groups(axes: Any, kinds: Sequence[Kind], num_lines: int) -> None:
    """A line with a name below the labels of each group of bars."""
    depth = -(18 + 12 * num_lines)
    for kind, members in groupby(enumerate(kinds), key=lambda pair: pair[1]):
        places = [place for place, _ in members]
        color = _SHADES[kind][1]
        axes.plot(
            [places[0] - 0.4, places[-1] + 0.4], [0, 0], color=color, linewidth=3, transform=_points_below(axes, depth),
            clip_on=False, solid_capstyle="butt",
        )  # fmt: skip
        axes.text(
            (places[0] + places[-1]) / 2, 0, _GROUPS[kind], color=_SHADES[kind][0], ha="center", va="top", fontsize=10,
            fontweight="bold", transform=_points_below(axes, depth - 5),
        )  # fmt: skip


def _points_below(axes: Any, points: float) -> Any:
    """x in data, y from the foot of the axes, moved by `points`: labels are as tall in a large picture as in a small one."""
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
    """Bars of cumulative speed-ups over stock FSDP2, from left to right; what was not run says why."""
    steps = ablation_steps(results, ablation, contenders)
    known = [step.speedup for step in steps if step.reason is None]
    if not known:
        raise ReportError("no step of the ablation was measured beside stock FSDP2: nothing to draw")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(max(7.0, 1.25 * (len(steps) + 1)), 4.6))
    axes.bar(0, 1, width=0.66, color=_SHADES[Kind.STOCK][1])
    axes.text(0, 1, f"{median_seconds(results.of(FSDP2)):.2f} s", ha="center", va="bottom", fontsize=10)
    for place, step in enumerate(steps, start=1):
        if step.reason is None:
            axes.bar(place, step.speedup, width=0.66, color=_SHADES[Kind.OURS][1])
            axes.text(place, step.speedup, f"{step.speedup:.2f}x", ha="center", va="bottom", fontsize=10)
        else:
            lines = _lines(f"n/a: {step.reason}", 18)
            text = "\n".join(lines[:6]) + (" ..." if len(lines) > 6 else "")
            axes.text(
                place,
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
    """Losses of a round: those with other bits than FSDP2 by name, against FSDP2; the difference on a symlog scale."""
    stock = results.of(FSDP2)
    if stock is None or not stock.losses:
        raise ReportError("FSDP2 has no losses in this run: nothing to draw them against")
    others = [one for one in summarize(results, contenders) if one.measured.losses and one.contender.key != FSDP2]
    same = [one for one in others if one.has_stock_bits]
    drifting = [one for one in others if not one.has_stock_bits]
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
    for one, color in zip(drifting, _cycled(len(drifting)), strict=True):
        losses.plot(one.measured.losses, color=color, linewidth=1.3, marker=".", label=one.label)
        away = [ours - theirs for ours, theirs in zip(one.measured.losses, stock.losses, strict=False)]
        drift.plot(away, color=color, linewidth=1.3, marker=".")
        smallest = min([smallest, *(abs(value) for value in away if value)])
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
    """Ratio to FSDP2 by link rate, for everything of ours and for FSDP2 that keeps its parameters.

    Runs of the same rate are all marked, and the line goes through their mean. Raises `ReportError` also if the runs differ in
    hosts, ranks or model.
    """
    settings = {(run.setting.hosts, run.setting.ranks_per_host, run.setting.model) for run in runs}
    if len(settings) != 1:
        raise ReportError(f"runs of {len(settings)} different (hosts, ranks, model) cannot share a picture: {settings}")
    rates = sorted({run.setting.rate for run in runs}, key=_bytes_per_second)
    points: dict[str, list[tuple[int, float]]] = {}
    for run in runs:
        for one in summarize(run, contenders):
            is_shown = one.contender.kind is Kind.OURS or one.contender.key == KEEP
            if is_shown and not math.isnan(one.stock_ratio):
                points.setdefault(one.contender.key, []).append((rates.index(run.setting.rate), one.stock_ratio))
    if not points:
        raise ReportError("no ratio to FSDP2 of ours was measured: nothing to draw")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10.5, 5.6))
    keys = sorted(points, key=lambda key: -points[key][0][1])
    for number, key in enumerate(keys):
        color = {DEFAULT: "black", KEEP: _SHADES[Kind.STOCK][1]}.get(key, _LINE_COLORS[number % len(_LINE_COLORS)])
        places = sorted({place for place, _ in points[key]})
        means = [fmean(ratio for at, ratio in points[key] if at == place) for place in places]
        axes.plot(places, means, color=color, linewidth=2.6 if key == DEFAULT else 1.3, label=contenders[key].label,
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
    """Text broken behind blanks and "_", "=", "-", "/", ".", into lines of `width` characters where its words allow it."""
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
    """The largest power of ten that is not above `value`; 1e-6 where there is no drift at all."""
    return float(10 ** math.floor(math.log10(value))) if math.isfinite(value) else 1e-6


def _bytes_per_second(rate: str | None) -> float:
    return math.inf if rate is None else parse_link(rate).bytes_per_second

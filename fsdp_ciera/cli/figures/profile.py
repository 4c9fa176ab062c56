"""The figures of a `Profile`: the paper's Figs. 2 to 5 for one run, and one of what the paper does not measure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_ciera.profiling.profile import ALL, DERIVED_INTERVALS, Profile

CATEGORY_COLORS = {
    "expert_ffn": "#1f6feb", "attention": "#d9480f", "routing_gate": "#8250df", "layer_norm": "#2a9d5c",
    "embedding": "#b8860b", "other": "#9aa5b1", ALL: "#1b1f24",
}  # fmt: skip
CODEC_COLORS = {
    "entropy": "#e0a100", "exponent_block": "#9aa5b1", "exponent_delta": "#2a9d5c", "value_delta": "#1f6feb"
}  # fmt: skip


def draw_profile(profile: Profile, folder: Path) -> list[Path]:
    """Writes the PNGs into `folder` and returns their paths; figures of averages are left out when there are none.

    Raises `ImportError` where matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures: dict[str, Callable[[Profile], Any]] = (
        {"fig2_exponent_change.png": _exponent_change} if profile.series else {}
    )
    if profile.rates:
        figures |= {
            "fig3_shard_and_block_change.png": _shard_and_block_change,
            "fig4_distribution.png": _distribution,
            "fig5_check_cost.png": _check_cost,
            "fig6_beyond_the_paper.png": _beyond_the_paper,
        }
    paths = []
    for name, draw in figures.items():
        figure = draw(profile)
        paths.append(folder / name)
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths


def _exponent_change(profile: Profile) -> Any:
    figure, axes = _subplots(1, figsize=(9, 5))
    steps = [look.step for look in profile.series]
    names = _names(profile)
    lines = {name: [100 * (look.rates[name].exponent_change or 0) for look in profile.series] for name in names}
    for name, rates in lines.items():
        # On a logarithmic scale a rate of 0 is a gap.
        drawn = [rate or float("nan") for rate in rates]
        axes.plot(steps, drawn, color=CATEGORY_COLORS[name], linewidth=2.6 if name == ALL else 1.5, label=_label(name),
                  marker="o", markersize=3, zorder=3 if name == ALL else 2)  # fmt: skip
    axes.set_yscale("log")
    known = [rate for rates in lines.values() for rate in rates if rate]
    axes.set_ylim(min(known, default=1e-3) / 2, max(known, default=1.0) * 2)
    _plain_percent(axes.yaxis)
    last_of_warmup = max((look.step for look in profile.series if look.step <= profile.warmup_steps), default=None)
    if last_of_warmup is not None:
        edge = last_of_warmup + profile.interval / 2
        axes.axvspan(steps[0] - profile.interval / 2, edge, color="#eaeef2", zorder=0, label="warm-up, not averaged")
    axes.set_xlim(steps[0] - profile.interval / 2, steps[-1] + profile.interval / 2)
    has_gaps = any(rate == 0 for rates in lines.values() for rate in rates)
    axes.set_xlabel("optimizer step" + (" (gaps: no exponent changed)" if has_gaps else ""))
    over = "between two steps" if profile.interval == 1 else f"over {profile.interval} steps"
    axes.set_ylabel(f"exponents that change {over} (%)")
    _legend_beside(axes)
    return _titled(figure, profile, "Exponent change rate (paper Fig. 2)")


def _shard_and_block_change(profile: Profile) -> Any:
    figure, (shards, blocks) = _subplots(2, figsize=(12, 5))
    worlds = sorted(profile.shard_change[ALL])
    names = _names(profile)
    for position, name in enumerate(names):
        width = 2.6 if name == ALL else 1.6
        style: dict[str, Any] = {
            "color": CATEGORY_COLORS[name],
            "marker": "o",
            "clip_on": False,
            "zorder": 3 + position,
        }
        around = len(names) - 1 - position  # curves that coincide, at 100 % say, show around one another
        size = 5 + 1.2 * around
        by_world = profile.shard_change[name]
        drawn = [100 * by_world[num_ranks] for num_ranks in worlds]
        shards.plot(worlds, drawn, linewidth=width + 0.5 * around, markersize=size, markerfacecolor="white", **style)
        shards.plot(worlds[:1], drawn[:1], markersize=size, **style)
        by_size = profile.rates[name].block_change
        rates = [100 * rate for rate in by_size.values()]
        blocks.plot(list(by_size), rates, linewidth=width, markersize=5, label=_label(name), **style)
    for axes, ticks in ((shards, worlds), (blocks, list(profile.rates[ALL].block_change))):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 104)
    shards.set_xlabel("ranks that share the model (filled: measured, hollow: projected)")
    shards.set_ylabel("shards in which an exponent changes (%)")
    shards.set_title("a: shard change rate", fontsize=11)
    blocks.set_xlabel("values in a block")
    blocks.set_ylabel("blocks in which an exponent changes (%)")
    blocks.set_title("b: block change rate", fontsize=11)
    _legend_beside(blocks)
    return _titled(figure, profile, "Shard and block change rates (paper Fig. 3)")


def _distribution(profile: Profile) -> Any:
    figure, axes = _subplots(1, figsize=(9, 5))
    names = list(profile.distribution)
    for position, name in enumerate(names):
        rates = [100 * rate for rate in profile.distribution[name]]
        color = CATEGORY_COLORS[name]
        if max(rates) - min(rates) > 0.01:
            parts = axes.violinplot(rates, [position], widths=0.8, showextrema=False)
            for body in parts["bodies"]:
                body.set(facecolor=color, alpha=0.3)
        box = axes.boxplot([rates], positions=[position], widths=0.16, patch_artist=True, showfliers=False)
        box["boxes"][0].set(facecolor="white", edgecolor=color)
        for line in (*box["whiskers"], *box["caps"]):
            line.set(color=color)
        box["medians"][0].set(color=color, linewidth=2.5)
        median = statistics.median(rates)
        axes.annotate(f"{median:.1f} %", (position + 0.09, median), (4, 0), textcoords="offset points", va="center",
                      fontsize=9, bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none",
                                        "alpha": 0.6}, zorder=5)  # fmt: skip
    labels = [f"{_label(name)}\n({len(profile.distribution[name])})" for name in names]
    axes.set_xticks(range(len(names)), labels)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(-4, 104)
    axes.set_ylabel(f"blocks of {profile.kept_block_size} that change (%)")
    axes.set_xlabel("category (number of shards); the median is written beside its line")
    return _titled(figure, profile, "Block change rates of the shards, means over the steps (paper Fig. 4)")


def _check_cost(profile: Profile) -> Any:
    figure, (shares, rates) = _subplots(2, figsize=(12, 4.6))
    intervals = sorted({*DERIVED_INTERVALS, profile.interval})
    for position, interval in enumerate(intervals):
        share = 100 * (profile.derived_check_share(interval) or 0.0)
        is_measured = interval == profile.interval
        color = CATEGORY_COLORS["expert_ffn"]
        shares.bar(position, share, width=0.6, color=color if is_measured else "white", edgecolor=color, linewidth=1.5)
        shares.text(position, share, f"{share:.2g} %", ha="center", va="bottom", fontsize=9)
    shares.set_xticks(range(len(intervals)), [str(interval) for interval in intervals])
    shares.margins(y=0.12)
    shares.set_xlabel("check interval in steps (filled: measured, hollow: derived)")
    shares.set_ylabel("share of the iteration, check included (%)")
    shares.set_title("a: what a check costs", fontsize=11)
    for position, name in enumerate(_names(profile)):
        rate = 100 * (profile.rates[name].exponent_change or 0.0)
        rates.barh(position, rate, height=0.6, color=CATEGORY_COLORS[name])
        rates.text(rate, position, f" {rate:.2g} %", va="center", fontsize=9)
    rates.set_yticks(range(len(_names(profile))), [_label(name) for name in _names(profile)])
    rates.invert_yaxis()
    rates.margins(x=0.15)
    rates.set_xlabel(f"exponents that change from check to check, at interval {profile.interval} (%)")
    rates.set_title("b: what it finds", fontsize=11)
    seconds = ""
    if profile.check_seconds is not None and profile.step_seconds is not None:
        seconds = f": {profile.check_seconds:.3g} s a check, {profile.step_seconds:.3g} s a step"
    return _titled(figure, profile, f"Cost of checking (paper Fig. 5){seconds}")


def _beyond_the_paper(profile: Profile) -> Any:
    figure, (values, bits, entropies) = _subplots(3, figsize=(15, 5.4), width_ratios=(3, 5, 4))
    names = _names(profile)
    for position, name in enumerate(names):
        rate = 100 * (profile.rates[name].value_change or 0.0)
        values.barh(position, rate, height=0.6, color=CATEGORY_COLORS[name])
        values.text(rate, position, f" {rate:.2g} %", va="center", fontsize=9)
    values.set_xlabel("values that change (%)")
    values.set_title("value change rate", fontsize=11)
    codecs = list(profile.rates[ALL].codec_bits)
    codec_bars = [
        (_label(codec), CODEC_COLORS[codec], [profile.rates[name].codec_bits.get(codec) for name in names])
        for codec in codecs
    ]
    _grouped_bars(bits, codec_bars)
    bits.set_xlabel("bits sent for a value in a first gather")
    bits.set_title(f"codecs, on real shards ({profile.dtype})", fontsize=11)
    entropy_bars = [
        ("exponents", CODEC_COLORS["entropy"], [profile.rates[name].exponent_entropy_bits for name in names]),
        (
            "changes of values",
            CODEC_COLORS["value_delta"],
            [profile.rates[name].value_change_entropy_bits for name in names],
        ),
    ]
    _grouped_bars(entropies, entropy_bars)
    entropies.set_xlabel("order-0 entropy (bits a value)")
    entropies.set_title("entropies", fontsize=11)
    for axes in (values, bits, entropies):
        axes.set_yticks(range(len(names)), [_label(name) for name in names] if axes is values else [""] * len(names))
        axes.invert_yaxis()
        axes.margins(x=0.17)
    for axes, columns in ((bits, 2), (entropies, 2)):
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns, fontsize=9)
    return _titled(figure, profile, "Values, codecs and entropies")


def _grouped_bars(axes: Any, bars: Sequence[tuple[str, str, Sequence[float | None]]]) -> None:
    height = 0.84 / len(bars)
    for index, (label, color, lengths) in enumerate(bars):
        offset = (index - (len(bars) - 1) / 2) * height
        positions = [position + offset for position in range(len(lengths))]
        axes.barh(positions, [length or 0.0 for length in lengths], height=0.9 * height, color=color, label=label)
        for position, length in zip(positions, lengths, strict=True):
            text = " not tried" if length is None else f" {length:.2f}"
            axes.text(length or 0.0, position, text, va="center", fontsize=8)


def _subplots(count: int, **arguments: Any) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, layout="constrained", **arguments)
    for panel in axes if count > 1 else [axes]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, axes


def _titled(figure: Any, profile: Profile, heading: str) -> Any:
    steps = "" if profile.steps is None else f", averages of steps {profile.steps[0]} to {profile.steps[1]}"
    ranks = f"{profile.world_size} rank{'s' if profile.world_size > 1 else ''}"
    figure.suptitle(f"{heading}\n{profile.model}, {profile.dtype}, {ranks}{steps}", fontsize=12)
    return figure


def _legend_beside(axes: Any) -> None:
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=10)


def _plain_percent(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _names(profile: Profile) -> list[str]:
    """The categories that the figures show, and `"all"`."""
    return list(profile.rates or profile.series[-1].rates)


def _label(name: str) -> str:
    return {"expert_ffn": "expert FFN", ALL: "all values"}.get(name, name.replace("_", " "))

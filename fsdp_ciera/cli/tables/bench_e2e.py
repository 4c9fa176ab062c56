"""Tables of `ciera bench e2e` and `ciera bench compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_ciera.bench.ablation import ablation_steps
from fsdp_ciera.bench.compare import BAR_PERCENT, Comparison
from fsdp_ciera.bench.contenders import ABLATION, CONTENDERS, FSDP2, Contender, Kind
from fsdp_ciera.bench.report import Summary, Verdict, median_seconds, setting_text, summarize
from fsdp_ciera.bench.results import Results, Setting
from fsdp_ciera.units import format_number


def print_report(console: Console, results: Results, contenders: Mapping[str, Contender] = CONTENDERS) -> None:
    """Both tables, then what failed and what is to be known about contenders, one line each."""
    summaries = summarize(results, contenders)
    console.print(time_table(results.setting, summaries))
    console.print(bytes_table(results.setting, summaries))
    for summary in summaries:
        if summary.measured.failure is not None:
            console.print(Text(f"- {summary.label} was not measured: {_one_line(summary.measured.failure)}", "yellow"))
        for note in summary.measured.notes:
            console.print(Text(f"- {summary.label}: {note}"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def time_table(setting: Setting, summaries: Sequence[Summary]) -> Table:
    """Seconds of an iteration and of its parts, and the ratios; fits 120 columns."""
    made = _table(
        f"Seconds of an iteration, {setting_text(setting)}",
        "p5, p95: percentiles of iterations; parts: medians, means over ranks. x FSDP2: median of FSDP2 / this median",
        ("median", "p5", "p95", "compute", "gather", "reduce", "other", "codec", "x FSDP2", "x keep"),
    )
    for summary in summaries:
        seconds = (summary.seconds, summary.p5_seconds, summary.p95_seconds, *summary.part_seconds.values())
        made.add_row(
            Text(summary.label),
            *(format_number(value, 3) for value in seconds),
            Text(format_number(summary.stock_ratio, 2), "red" if summary.is_slower else ""),
            format_number(summary.keep_ratio, 2),
            style=_style(summary),
        )
    return made


def bytes_table(setting: Setting, summaries: Sequence[Summary]) -> Table:
    """MB of an iteration, memory and losses; fits 120 columns."""
    made = _table(
        f"Bytes and losses, {setting_text(setting)}",
        "MB out of a host in an iteration, means (1 MB = 10^6 B); memory of the largest rank; loss: the last of a round",
        (
            "gathers\nMB",
            "all, counted\nMB",
            "interface\nMB",
            "differ",
            "peak\nMB",
            "caches\nMB",
            "loss",
            "against FSDP2",
        ),
    )
    for summary in summaries:
        percent = summary.interface_percent
        sent = (summary.gathered_bytes, summary.counted_bytes, summary.interface_bytes)
        made.add_row(
            Text(summary.label),
            *(format_number(value / 1e6, 2) for value in sent),
            "-" if math.isnan(percent) else f"{percent:+.2f} %",
            *(
                format_number(value / 1e6 if summary.measured.steps else math.nan, 0)
                for value in (summary.measured.peak_memory_bytes, summary.measured.cache_bytes)
            ),
            format_number(summary.loss, 6),
            _loss_text(summary),
            style=_style(summary),
        )
    return made


def print_verdicts(console: Console, found: Sequence[Verdict]) -> None:
    """One line each; in words as well as in colour."""
    for one in found:
        word, style = {True: ("✓ kept  ", "green"), False: ("✗ MISSED", "red"), None: ("- unknown", "yellow")}[
            one.passed
        ]
        console.print(Text.assemble((word, style), f"  {one.name}: {one.text}"))


def comparison_table(found: Comparison, contenders: Mapping[str, Contender] = CONTENDERS) -> Table:
    """Ratios of both runs, and how far apart; contenders that `contenders` lacks go by their key."""
    made = Table(
        title=f"Ratios to FSDP2 in two runs, {setting_text(found.setting)}",
        caption=f"FSDP2 took {found.stock_seconds[0]:.3f} s and {found.stock_seconds[1]:.3f} s an iteration (medians)",
        box=SIMPLE,
    )
    made.add_column("", overflow="fold")
    for heading in ("first", "second", "apart"):
        made.add_column(heading, justify="right", no_wrap=True)
    in_both = found.both
    for row in found.rows:
        label = contenders[row.contender].label if row.contender in contenders else row.contender
        ratios = ("-" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in (row.first_ratio, row.second_ratio))
        apart = Text("one run only")
        if row in in_both:
            style = "green" if row.apart_percent <= BAR_PERCENT else "red"
            apart = Text(f"{row.apart_percent:.1f} %", style)
        made.add_row(Text(label), *ratios, apart, style="bold" if in_both and row is found.worst else None)
    return made


def ablation_table(
    results: Results,
    ablation: Sequence[tuple[str, str]] = ABLATION,
    contenders: Mapping[str, Contender] = CONTENDERS,
) -> Table:
    """In the paper's layout: the model, stock seconds, and a cumulative speed-up for each part; "n/a" is explained below."""
    steps = ablation_steps(results, ablation, contenders)
    reasons = [f"{step.label}: {step.reason or step.caveat}" for step in steps if step.reason or step.caveat]
    made = Table(
        title=f"Cumulative speed-up over stock FSDP2 (paper: Table 3), {setting_text(results.setting)}",
        caption="\n".join(reasons) or None,
        box=SIMPLE,
    )
    made.add_column("model", overflow="fold")
    for heading in ("FSDP2, s", *(step.label for step in steps)):
        made.add_column(heading, justify="right")
    stock_seconds = median_seconds(results.of(FSDP2))
    made.add_row(
        results.setting.model,
        "n/a" if math.isnan(stock_seconds) else f"{stock_seconds:.3f}",
        *("n/a" if step.reason is not None else f"{step.speedup:.2f}x" for step in steps),
    )
    return made


def _table(title: str, caption: str, headings: Sequence[str]) -> Table:
    made = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 1, 0, 0), collapse_padding=True)
    made.add_column("", overflow="fold")
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def _style(summary: Summary) -> str | None:
    if summary.measured.failure is not None:
        return "yellow"
    return {Kind.STOCK: None, Kind.PEER: "dim", Kind.OURS: "bold"}[summary.contender.kind]


def _loss_text(summary: Summary) -> Text:
    if summary.measured.failure is not None:
        return Text("not measured")
    if summary.contender.key == FSDP2:
        return Text("reference")
    if summary.has_stock_bits:
        return Text("same bits", "green")
    if math.isnan(summary.loss_difference):
        return Text("-")
    # A difference of zero with other bits elsewhere must not read like equality.
    return Text(f"{summary.loss_difference:+.2e}", "red" if summary.contender.is_bitwise else "")

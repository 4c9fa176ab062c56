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
    """Prints both tables, then one line for each failure and each note of a contender."""
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
    """Returns the seconds of iterations and their parts, and the ratios, as a table that fits 120 columns."""
    table = _table(
        f"Seconds of an iteration, {setting_text(setting)}",
        "p5, p95: percentiles of iterations; parts: medians, means over ranks. x FSDP2: median of FSDP2 / this median",
        ("median", "p5", "p95", "compute", "gather", "reduce", "other", "codec", "x FSDP2", "x keep"),
    )
    for summary in summaries:
        seconds = (summary.seconds, summary.p5_seconds, summary.p95_seconds, *summary.part_seconds.values())
        table.add_row(
            Text(summary.label),
            *(format_number(value, 3) for value in seconds),
            Text(format_number(summary.stock_ratio, 2), "red" if summary.is_slower else ""),
            format_number(summary.keep_ratio, 2),
            style=_style(summary),
        )
    return table


def bytes_table(setting: Setting, summaries: Sequence[Summary]) -> Table:
    """Returns the MB of iterations, memory and losses as a table that fits 120 columns."""
    table = _table(
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
        table.add_row(
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
    return table


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Prints one line for each verdict, in words as well as in colour."""
    for verdict in verdicts:
        word, style = {True: ("✓ kept  ", "green"), False: ("✗ MISSED", "red"), None: ("- unknown", "yellow")}[
            verdict.passed
        ]
        console.print(Text.assemble((word, style), f"  {verdict.name}: {verdict.text}"))


def comparison_table(comparison: Comparison, contenders: Mapping[str, Contender] = CONTENDERS) -> Table:
    """Returns the ratios of both runs and how far apart they are; contenders that `contenders` lacks are named by their key."""
    first_seconds, second_seconds = comparison.stock_seconds
    table = Table(
        title=f"Ratios to FSDP2 in two runs, {setting_text(comparison.setting)}",
        caption=f"FSDP2 took {first_seconds:.3f} s and {second_seconds:.3f} s an iteration (medians)",
        box=SIMPLE,
    )
    table.add_column("", overflow="fold")
    for heading in ("first", "second", "apart"):
        table.add_column(heading, justify="right", no_wrap=True)
    in_both = comparison.both
    for row in comparison.rows:
        label = contenders[row.contender].label if row.contender in contenders else row.contender
        ratios = ("-" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in (row.first_ratio, row.second_ratio))
        apart = Text("one run only")
        if row in in_both:
            style = "green" if row.apart_percent <= BAR_PERCENT else "red"
            apart = Text(f"{row.apart_percent:.1f} %", style)
        table.add_row(Text(label), *ratios, apart, style="bold" if in_both and row is comparison.worst else None)
    return table


def ablation_table(
    results: Results,
    ablation: Sequence[tuple[str, str]] = ABLATION,
    contenders: Mapping[str, Contender] = CONTENDERS,
) -> Table:
    """Returns the ablation in the paper's layout: the model, stock seconds, and the cumulative speed-up of each part.

    The caption explains each "n/a".
    """
    steps = ablation_steps(results, ablation, contenders)
    reasons = [f"{step.label}: {step.reason or step.caveat}" for step in steps if step.reason or step.caveat]
    table = Table(
        title=f"Cumulative speed-up over stock FSDP2 (paper: Table 3), {setting_text(results.setting)}",
        caption="\n".join(reasons) or None,
        box=SIMPLE,
    )
    table.add_column("model", overflow="fold")
    for heading in ("FSDP2, s", *(step.label for step in steps)):
        table.add_column(heading, justify="right")
    stock_seconds = median_seconds(results.of(FSDP2))
    table.add_row(
        results.setting.model,
        "n/a" if math.isnan(stock_seconds) else f"{stock_seconds:.3f}",
        *("n/a" if step.reason is not None else f"{step.speedup:.2f}x" for step in steps),
    )
    return table


def _table(title: str, caption: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column("", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


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

"""Tables of plans, of statistics and of memory estimates."""

from __future__ import annotations

from rich.filesize import decimal
from rich.table import Table

from fsdp_ciera.planning.estimate import MemoryEstimate
from fsdp_ciera.planning.plan import Plan, PlanRow
from fsdp_ciera.statistics import CieraStats
from fsdp_ciera.units import format_in


def plan_table(plan: Plan, title: str = "fsdp_ciera: the plan") -> Table:
    """One row for each category and codec of `plan`: bytes and milliseconds of a step."""
    link = "" if plan.link is None else f"; slowest link {plan.link}"
    budget = "without limit" if plan.budget_bytes is None else f"at most {decimal(plan.budget_bytes)}"
    table = Table(title=title, caption=f"rates: {plan.table} at LR {plan.learning_rate:g}{link}; caches: {budget}")
    for column in ("category", "codec"):
        table.add_column(column)
    for column in ("shards", "raw", "sent", "in node", "caches", "gain"):
        table.add_column(column, justify="right")
    for row in plan.rows:
        table.add_row(row.category, row.codec, *_cells(row, row.num_shards))
    table.add_section()
    table.add_row("heads, agreements", "", "", "", decimal(int(plan.overhead_bytes)))
    table.add_row("all", "", *_cells(plan, sum(row.num_shards for row in plan.rows)), style="bold")
    return table


def stats_table(stats: CieraStats, title: str = "fsdp_ciera") -> Table:
    """One row for each category, codec, phase and link: raw and sent megabytes, and their ratio."""
    table = Table(title=title)
    for column in ("", "raw MB", "wire MB", "raw / wire"):
        table.add_column(column, justify="right" if column else "left")
    for heading, breakdown in (
        ("category", stats.by_category),
        ("codec", stats.by_codec),
        ("phase", stats.by_phase),
        ("link", stats.by_link),
    ):
        for key, amount in breakdown.items():
            ratio = f"{amount.ratio:.2f}" if amount.raw_bytes else ""
            table.add_row(
                f"{heading}: {key}",
                format_in(amount.raw_bytes, "MB", 2),
                format_in(amount.wire_bytes, "MB", 2),
                ratio,
            )
        table.add_section()
    table.add_row(
        "all", format_in(stats.raw_bytes, "MB", 2), format_in(stats.wire_bytes, "MB", 2), f"{stats.ratio:.2f}"
    )
    return table


def memory_table(estimate: MemoryEstimate, title: str = "fsdp_ciera: memory of each rank") -> Table:
    """The caches by category and by codec, the outputs that are held, and the buffers, in MiB."""
    table = Table(title=title)
    table.add_column("")
    table.add_column("shards MiB", justify="right")
    table.add_column("caches MiB", justify="right")
    for category, num_bytes in estimate.by_category.items():
        table.add_row(f"category: {category}", "", _mib(num_bytes))
    table.add_section()
    for codec, num_bytes in estimate.by_codec.items():
        table.add_row(f"codec: {codec}", _mib(estimate.shard_bytes_by_codec[codec]), _mib(num_bytes))
    table.add_section()
    table.add_row("outputs that are held", "", _mib(estimate.held_output_bytes))
    table.add_row(
        "all",
        _mib(sum(estimate.shard_bytes_by_codec.values())),
        _mib(estimate.cache_bytes + estimate.held_output_bytes),
    )
    table.add_row("buffers while the largest group is gathered", "", _mib(estimate.buffer_bytes))
    return table


def _cells(amounts: Plan | PlanRow, num_shards: int) -> list[str]:
    """The cells of one row of the plan's table: shards, bytes and milliseconds of a step."""
    return [
        str(num_shards),
        decimal(int(amounts.raw_bytes)),
        decimal(int(amounts.wire_bytes - amounts.in_node_bytes)),
        decimal(int(amounts.in_node_bytes)) if amounts.in_node_bytes else "",
        decimal(amounts.cache_bytes) if amounts.cache_bytes else "",
        f"{1e3 * amounts.gain_seconds:,.1f} ms" if amounts.gain_seconds else "",
    ]


def _mib(num_bytes: int) -> str:
    return format_in(num_bytes, "MiB")

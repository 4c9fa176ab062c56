"""What `ciera bench gather` shows and leaves: tables, gathers.csv, gathers.json and gathers.png."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from fsdp_ciera.bench.gather_cells import Cell, Crossover, LinkBreakEven, crossovers, link_break_evens
from fsdp_ciera.units import format_bytes, format_host_rate

FORMAT = 1
CSV_COLUMNS = ("rate", "codec", "size_bytes", "changed_percent", "measured_changed_percent", "repeats", "plain_seconds",
               "seconds", "ratio", "raw_bytes", "wire_bytes", "is_equal")  # fmt: skip


def write_report(cells: Sequence[Cell], setting: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Prints the tables and writes the files into `folder`, which is made. Raises `OSError`.

    Without matplotlib there is no picture, and a line says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found, over_links = crossovers(cells), link_break_evens(cells)
    _write_csv(cells, folder / "gathers.csv")
    content = {
        "format": FORMAT,
        "setting": dict(setting),
        "cells": [cell.to_dict() for cell in cells],
        "crossovers": [asdict(one) for one in found],
        "link_break_evens": [asdict(one) for one in over_links],
    }
    (folder / "gathers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for table in tables(cells, found, over_links):
        console.print(table)


def _write_csv(cells: Sequence[Cell], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for cell in cells:
            writer.writerow({**cell.to_dict(), "rate": cell.rate or "none", "repeats": len(cell.samples)})


def tables(cells: Sequence[Cell], found: Sequence[Crossover], over_links: Sequence[LinkBreakEven]) -> Iterator[Table]:
    """Speed-ups and crossovers for each link speed, and the break-even of link speeds where several were measured."""
    for rate in dict.fromkeys(cell.rate for cell in cells):
        yield _speed_ups([cell for cell in cells if cell.rate == rate], rate)
        yield _crossover_table([one for one in found if one.rate == rate], rate)
    if over_links:
        yield _link_table(over_links)


def _speed_ups(cells: Sequence[Cell], rate: str | None) -> Table:
    codecs = list(dict.fromkeys(cell.codec for cell in cells))
    table = Table(
        title=f"Seconds of a plain gather / ours, {format_host_rate(rate)} (size: the gathered total)", box=SIMPLE
    )
    for heading in ("size", "changed", "plain ms", *codecs):
        table.add_column(heading, justify="right", no_wrap=True)
    by_place: dict[tuple[int, float], dict[str, Cell]] = {}
    for cell in cells:
        by_place.setdefault((cell.size_bytes, cell.changed_percent), {})[cell.codec] = cell
    last_size = None
    for (size, percent), of_place in by_place.items():
        if last_size is not None and size != last_size:
            table.add_section()
        any_cell = next(iter(of_place.values()))
        ratios = [_ratio_text(of_place[codec]) for codec in codecs]
        first = format_bytes(size) if size != last_size else ""
        table.add_row(first, f"{percent:g} %", f"{1e3 * any_cell.plain_seconds:,.1f}", *ratios)
        last_size = size
    return table


def _ratio_text(cell: Cell) -> str:
    """Bold where ours is faster, with the share of bytes that it sends."""
    text = f"{cell.ratio:.2f}x ({100 * cell.wire_bytes / cell.raw_bytes:.3g} % B)"
    if not cell.is_equal:
        return f"[red]WRONG BITS[/] {text}"
    return f"[bold]{text}[/]" if cell.ratio > 1 else text


def _crossover_table(found: Sequence[Crossover], rate: str | None) -> Table:
    codecs = list(dict.fromkeys(one.codec for one in found))
    table = Table(
        title=f"Ours is faster from this size on, {format_host_rate(rate)} (~ where both are equal; -: at no size)",
        box=SIMPLE,
    )
    for heading in ("changed", *codecs):
        table.add_column(heading, justify="right", no_wrap=True)
    by_percent: dict[float, dict[str, Crossover]] = {}
    for one in found:
        by_percent.setdefault(one.changed_percent, {})[one.codec] = one
    for percent, of_percent in by_percent.items():
        table.add_row(f"{percent:g} %", *(_crossover_text(of_percent[codec]) for codec in codecs))
    return table


def _crossover_text(one: Crossover) -> str:
    if one.smallest_faster_bytes is None:
        return "-"
    if one.break_even_bytes is None:
        return f"all, from {format_bytes(one.smallest_faster_bytes)}"
    return f"{format_bytes(one.smallest_faster_bytes)} (~{format_bytes(one.break_even_bytes)})"


def _link_table(over_links: Sequence[LinkBreakEven]) -> Table:
    codecs = list(dict.fromkeys(one.codec for one in over_links))
    size = format_bytes(over_links[0].size_bytes)
    table = Table(title=f"Ours is faster on links up to this speed, at {size} (as plain gathers reach it)", box=SIMPLE)
    for heading in ("changed", *codecs):
        table.add_column(heading, justify="right", no_wrap=True)
    by_percent: dict[float, dict[str, LinkBreakEven]] = {}
    for one in over_links:
        by_percent.setdefault(one.changed_percent, {})[one.codec] = one
    for percent, of_percent in by_percent.items():
        table.add_row(f"{percent:g} %", *(_link_text(of_percent[codec]) for codec in codecs))
    return table


def _link_text(one: LinkBreakEven) -> str:
    if one.bits_per_second is None:
        return "all measured" if one.always else "none measured"
    return f"{one.bits_per_second / 1e6:,.0f} Mbit/s"

"""`ciera bench gather`: one collective, plain and by every codec, over sizes, shares of changed values and link speeds.

hosts of netns.py or local.py  ->  ranks of gather_rank.py, one set for each link speed  ->  cells  ->  tables/bench_gather.py
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fsdp_ciera.bench.gather_cells import Cell
from fsdp_ciera.bench.gather_rank import ONE_UNIT_SHARE, GatherJob
from fsdp_ciera.bench.local import LocalCluster
from fsdp_ciera.bench.machine import num_cores
from fsdp_ciera.bench.netns import MAX_HOSTS, NetnsCluster, burst_bytes
from fsdp_ciera.bench.ranks import Hosts, RankProcesses
from fsdp_ciera.cli.bench_gather import GatherOptions
from fsdp_ciera.cli.tables.bench_gather import write_report
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import GatherError, NetnsError, RankError
from fsdp_ciera.policies.links import Link
from fsdp_ciera.units import format_bytes, format_host_rate, parse_rate

SMALLEST_BYTES, LARGEST_BYTES = 2**10, 2**34
_TABLE_WIDTH = 120
_SECONDS_WITHOUT_A_CELL = 1200.0
_START_SECONDS = 10.0
_PLAIN_BYTES_PER_SECOND, _CODEC_BYTES_PER_SECOND = 5e8, 2.5e8
"""Speeds of one core, only for the estimate: gathered bytes of all ranks that it moves, and that it encodes or decodes."""


def check(options: GatherOptions) -> None:
    """Raises `GatherError` for options that are not allowed."""
    if not 1 <= options.hosts <= MAX_HOSTS or options.ranks_per_host < 1 or options.num_ranks < 2:
        raise GatherError(
            f"--hosts {options.hosts} --ranks-per-host {options.ranks_per_host}: a gather needs at least 2 ranks on 1 to "
            f"{MAX_HOSTS} hosts"
        )
    for rate in options.rates:
        if rate is not None:
            try:
                parse_rate(rate)
            except ValueError as error:
                raise GatherError(f"--rate: {error}, or none") from None
            if options.loopback:
                raise GatherError(f"--loopback has no links to limit, so --rate {rate} must be left out")
    for size in options.sizes_bytes:
        if not SMALLEST_BYTES <= size <= LARGEST_BYTES:
            raise GatherError(
                f"--sizes: {size} bytes must be from {format_bytes(SMALLEST_BYTES)} to {format_bytes(LARGEST_BYTES)}"
            )
    for percent in options.changes:
        if not 0 <= percent <= 100:
            raise GatherError(f"--changes: {percent:g} must be from 0 to 100 percent of values")
    for codec in options.codecs:
        if codec not in CODECS:
            raise GatherError(f"--codecs: {codec!r} is not one of {', '.join(CODECS)}")
    for name, values in (
        ("--rate", options.rates),
        ("--sizes", options.sizes_bytes),
        ("--changes", options.changes),
        ("--codecs", options.codecs),
    ):
        if not values or len(set(values)) != len(values):
            raise GatherError(f"{name}: {values} must be at least one value, each once")
    if options.repeats is not None and options.repeats < 1:
        raise GatherError(f"--repeats {options.repeats} must be at least 1")


def job_of(options: GatherOptions, rate: str | None) -> GatherJob:
    """Returns what the ranks measure at this link speed."""
    return GatherJob(
        sizes_bytes=options.sizes_bytes,
        repeats=tuple(map(options.repeats_of, options.sizes_bytes)),
        changed_percents=options.changes,
        codecs=options.codecs,
        drain_bytes=0 if rate is None else burst_bytes(parse_rate(rate)),
    )


def run_gather(options: GatherOptions) -> int:
    """Measures and reports. Returns the exit code: 0, or 1 if a gather differed from the plain one or a rank failed.

    Returns 2 if network namespaces are not available or the files cannot be written. One line on stderr says why. Raises
    `GatherError` for options that are not allowed.
    """
    check(options)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    estimate = sum(estimated_seconds(options, rate) for rate in options.rates)
    console.print(f"about {max(1, round(estimate / 60))} min, on a machine that does nothing else", highlight=False)
    try:
        cells = measure_cells(options, console)
    except NetnsError as error:
        print(f"ciera: {error}; --loopback needs none, and has no links to limit", file=sys.stderr)
        return 2
    except (RankError, TimeoutError) as error:
        print(f"ciera: {error}", file=sys.stderr)
        return 1
    try:
        setting = setting_of(options)
        write_report(cells, setting, options.output, console)
        written_names = ["gathers.csv", "gathers.json"]
        try:
            from fsdp_ciera.cli.figures.bench_gather import draw

            draw(cells, setting, options.output / "gathers.png")
            written_names.append("gathers.png")
        except ImportError:
            console.print("no picture: it needs matplotlib (pip install 'fsdp-ciera[plot]')", markup=False)
        text = f"written to {options.output}: {', '.join(written_names)}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    except OSError as error:
        print(f"ciera: --out: {str(options.output)!r} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    wrong = [cell for cell in cells if not cell.is_equal]
    for cell in wrong:
        where = f"{format_bytes(cell.size_bytes)}, {cell.changed_percent:g} % changed, {format_host_rate(cell.rate)}"
        print(f"ciera: {cell.codec} gave other bits than the plain gather: {where}", file=sys.stderr)
    return 1 if wrong else 0


def measure_cells(options: GatherOptions, console: Console) -> list[Cell]:
    """Measures all cells, rate by rate. Raises `NetnsError`, `RankError`, or `TimeoutError` if no cell comes for long."""
    cells: list[Cell] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        total_seconds = sum(estimated_seconds(options, rate) for rate in options.rates)
        task = progress.add_task("", total=total_seconds)
        for rate in options.rates:
            progress.update(task, description=f"{format_host_rate(rate)}: starting {options.num_ranks} ranks")

            def note(num_done: int, rate: str | None = rate) -> None:
                index = num_done // len(options.codecs)  # of the size and share that are measured now
                size_bytes = options.sizes_bytes[min(index // len(options.changes), len(options.sizes_bytes) - 1)]
                percent = options.changes[index % len(options.changes)]
                spent_seconds = sum(
                    _cell_seconds(options, rate, options.sizes_bytes[i // len(options.changes)],
                                  options.changes[i % len(options.changes)])
                    for i in range(index)
                )  # fmt: skip
                earlier_rates = options.rates[: options.rates.index(rate)]
                earlier_seconds = sum(estimated_seconds(options, earlier_rate) for earlier_rate in earlier_rates)
                text = f"{format_host_rate(rate)}: {format_bytes(size_bytes)}, {percent:g} % changed"
                completed_seconds = earlier_seconds + _START_SECONDS + spent_seconds
                progress.update(task, description=text, completed=completed_seconds)

            with _hosts(options, rate) as hosts:
                cells += _measure_at(hosts, options, rate, note)
        progress.update(task, description="measured", completed=total_seconds)
    return cells


def _hosts(options: GatherOptions, rate: str | None) -> Hosts:
    return LocalCluster(options.hosts) if options.loopback else NetnsCluster(options.hosts, rate)


def _measure_at(hosts: Hosts, options: GatherOptions, rate: str | None, note: Callable[[int], None]) -> list[Cell]:
    num_outcomes = len(options.sizes_bytes) * len(options.changes) * len(options.codecs)
    with tempfile.TemporaryDirectory(prefix="ciera-gather-") as folder:
        path = Path(folder) / "outcomes"
        argv = [sys.executable, "-m", "fsdp_ciera.bench.gather_rank", job_of(options, rate).to_json(), str(path)]
        processes = hosts.start(argv, ranks_per_host=options.ranks_per_host)
        lines = _await_lines(path, num_outcomes, processes, note)
        processes.wait(60)
    return [_cell(rate, json.loads(line)) for line in lines]


def _await_lines(path: Path, num_lines: int, processes: RankProcesses, note: Callable[[int], None]) -> list[str]:
    """Waits until rank 0 has written all lines, and returns them. Calls `note` with their number whenever it grows."""
    lines: list[str] = []
    last_news = time.monotonic()
    while len(lines) < num_lines:
        processes.raise_if_failed()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        complete_lines = text[: text.rfind("\n") + 1].splitlines()
        if len(complete_lines) > len(lines):
            lines, last_news = complete_lines, time.monotonic()
            note(len(lines))
        elif time.monotonic() - last_news > _SECONDS_WITHOUT_A_CELL:
            raise TimeoutError(
                f"no cell was measured for {_SECONDS_WITHOUT_A_CELL:g} s ({len(lines)} of {num_lines} are)"
            )
        time.sleep(0.1)
    return lines


def _cell(rate: str | None, outcome: dict[str, Any]) -> Cell:
    samples = {key: tuple(outcome[key]) for key in ("plain_samples", "samples")}
    return Cell(rate=rate, **{**outcome, **samples})


def setting_of(options: GatherOptions) -> dict[str, Any]:
    """Returns where and how gathers are measured, as JSON values."""
    return {
        "hosts": options.hosts,
        "ranks_per_host": options.ranks_per_host,
        "mode": "loopback" if options.loopback else "namespaces",
        "machine": f"{platform.system()} {platform.machine()}",
        "num_cores": num_cores(),
        "torch_version": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["ciera", *sys.argv[1:]]),
    }


def estimated_seconds(options: GatherOptions, rate: str | None) -> float:
    """Estimates how long all cells at one link speed take, from formulas and rough speeds of a core."""
    cells = [(size, percent) for size in options.sizes_bytes for percent in options.changes]
    return _START_SECONDS + sum(_cell_seconds(options, rate, size, percent) for size, percent in cells)


def _cell_seconds(options: GatherOptions, rate: str | None, size_bytes: int, changed_percent: float) -> float:
    # The first gather of each codec, with the caches still empty, is spread over the cells of a size.
    rounds = options.repeats_of(size_bytes) + 1 / len(options.changes)
    shares = [1.0, *(_expected_share(codec, changed_percent / 100) for codec in options.codecs)]
    link_seconds = 0.0
    if rate is not None:
        link = Link(0.0, parse_rate(rate) / 8)
        shard_bytes = size_bytes / options.num_ranks
        burst_seconds = 2 * burst_bytes(parse_rate(rate)) / link.bytes_per_second
        link_seconds = sum(link.seconds(share * shard_bytes, options.num_ranks) + burst_seconds for share in shares)
    all_bytes = size_bytes * options.num_ranks / num_cores()
    core_seconds = all_bytes * (len(shares) / _PLAIN_BYTES_PER_SECOND + len(options.codecs) / _CODEC_BYTES_PER_SECOND)
    return rounds * (link_seconds + core_seconds + 0.01 * len(shares))


def _expected_share(codec: str, changed_share: float) -> float:
    """Estimates the sent bytes as a share of those of a plain gather."""
    if codec == "value_delta":
        bits_per_value = changed_share * (1 + _entropy(ONE_UNIT_SHARE) / ONE_UNIT_SHARE) + _entropy(changed_share)
        return bits_per_value / 16
    return {"raw": 1.0, "entropy": 0.67}.get(codec, 0.55)


def _entropy(share: float) -> float:
    probabilities: Sequence[float] = (share, 1 - share)
    return -sum(probability * math.log2(probability) for probability in probabilities if probability > 0)

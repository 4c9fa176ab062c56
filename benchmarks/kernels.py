"""How fast each kernel is, beside the device's own copy in the same run.

Run: python benchmarks/kernels.py [--device cuda|cpu] [--mib 1,8,64,512] [--format bf16|fp16|fp32] [--reference]
                                  [--threads 1] [--rounds 7] [--json PATH] [--plot PATH] [--sha]

Runs on CUDA where there is a device, otherwise on the host build, one core. Rates count the bytes that the algorithm must read
and write, whatever the kernel does beyond that; the copy counts both its reads and its writes. What is counted is in the table:

    values, out     all of them once, 2 bytes each for bf16
    planes          exponents, and signs with mantissas: together as much as the values
    bitmap          a bit for each value
    changes         a byte for each move, and each literal; of `apply` each changed value of the cache too
    octets          on CUDA: the eight values around each change, which are read and written together
    nibbles         on CUDA: exponents as symbols, half a byte for each value; tops and escapes are what is beside them

On CUDA launches are queued behind a kernel that sleeps, and timed by events on the device, so that no time of the host is in
it; a batch goes round buffers that together are larger than twice the L2 cache. The functions are the tile kernels
(kernels/cuda.py), of one peer and one run, sums and sizes included: `find` is scan, change_sizes, section_table and pack,
`scan symbols` the same of symbols. On CPU times are the process's CPU seconds (with --threads other than 1, wall time), each
case in turn with the copy; buffers smaller than the CPU's caches stay there. All are medians.

Values are normal numbers, a share of which changed between two gathers, most by one unit in the last place; kernels go forth
and back between both. --reference times the torch reference too; on CUDA that waits for the device, as it must.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fsdp_ciera.kernels import cuda, host, reference, reference_tiles
from fsdp_ciera.kernels.changes import BYTE_ESCAPE, Form, Received
from fsdp_ciera.kernels.dispatch import Kernels, chosen_for, kernels_of
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.heads import TILES
from fsdp_ciera.kernels.launch import PTX_FILE
from fsdp_ciera.kernels.tiles import Payloads, SectionRoom, TileKernels, Tiles, make_tiles

BLOCK_SIZE = 512
SHARES = (0.012, 0.08)  # what AdamW changes at an LR of 1e-5, and of 1e-4
DEVICE_MIB = (1, 8, 64, 512)
HOST_MIB = (64,)
COPY_GOALS = {"merge": 80.0, "apply": 80.0, "hash": 70.0, "scan": 70.0}
EVERY_GOAL = 50.0
"""Percent of the copy, above GOAL_MIB, on GOAL_DEVICE."""
GOAL_MIB, GOAL_DEVICE = 8, "H200"
HOST_GOALS = {"hash": 4.0, "merge": 2.0, "find + apply": 4.0}
"""Times the torch reference, one core, HOST_GOAL_MIB of bf16."""
HOST_GOAL_MIB = 64

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A kernel on several sets of buffers, a call for each."""

    kernel: str
    changed: float | None
    counted: str
    num_bytes: int
    calls: list[Call]
    is_right: Callable[[], bool]
    """Whether the results of the last call are right, where that shows in a tensor."""

    @property
    def name(self) -> str:
        return self.kernel if self.changed is None else f"{self.kernel}, {100 * self.changed:g} % changed"


@dataclass(frozen=True)
class Rate:
    """One measured case. `share` is of the copy's rate, in percent."""

    kernel: str
    changed: float | None
    implementation: str
    format: str
    mib: int
    counted: str
    num_bytes: int
    seconds: float
    copy_seconds: float
    gb_per_s: float
    copy_gb_per_s: float
    share: float
    waited_for_host: bool
    """The device ran dry between launches: the rate is the host's."""

    @property
    def name(self) -> str:
        return self.kernel if self.changed is None else f"{self.kernel} {100 * self.changed:g} %"


@dataclass(frozen=True)
class Goal:
    """The figure to reach (`wanted`) and the one that was reached (`found`), `None` where this run did not measure it."""

    text: str
    wanted: float
    found: float | None

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured here"
        return "reached" if self.found >= self.wanted else "not reached"


# ---- timing


class Timer(Protocol):
    def seconds(self, calls: Sequence[Call], copies: Sequence[Call], may_queue: bool) -> tuple[float, float, bool]:
        """Median seconds of a call and of a copy, and whether the device waited for the host."""
        ...

    def num_sets(self, num_bytes: int) -> int:
        """How many sets of buffers to go round, if a call touches so many bytes."""
        ...


class HostTimer:
    """CPU seconds of single calls, in turn with the copy."""

    def __init__(self, num_rounds: int, num_threads: int) -> None:
        self._num_rounds = num_rounds
        self._clock = time.process_time if num_threads == 1 else time.perf_counter

    def num_sets(self, num_bytes: int) -> int:
        return 1

    def seconds(self, calls: Sequence[Call], copies: Sequence[Call], may_queue: bool) -> tuple[float, float, bool]:
        taken: tuple[list[float], list[float]] = ([], [])
        number = max(1, round(2e-3 / self._once(copies[0])))  # small ones several times: clocks are coarse
        for _ in range(self._num_rounds):
            for times, (call,) in zip(taken, (calls, copies), strict=True):
                start = self._clock()
                for _ in range(number):
                    call()
                times.append((self._clock() - start) / number)
        return max(statistics.median(taken[0]), 1e-9), max(statistics.median(taken[1]), 1e-9), False

    def _once(self, call: Call) -> float:
        call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class DeviceTimer:
    """CUDA events around batches of calls that wait behind a sleeping kernel until all of them are queued."""

    MIN_CALLS, MOST_SETS, MOST_CYCLES = 20, 256, 1 << 29

    def __init__(self, num_rounds: int, device: torch.device) -> None:
        self._num_rounds = num_rounds
        self._l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._cycles = 1 << 23

    def num_sets(self, num_bytes: int) -> int:
        return min(self.MOST_SETS, max(2, -(-2 * self._l2_bytes // num_bytes)))

    def seconds(self, calls: Sequence[Call], copies: Sequence[Call], may_queue: bool) -> tuple[float, float, bool]:
        taken: tuple[list[float], list[float]] = ([], [])
        waited = False
        for _ in range(self._num_rounds):
            seconds, has_waited = self._batch(calls, may_queue)
            taken[0].append(seconds)
            taken[1].append(self._batch(copies, True)[0])
            waited |= has_waited and may_queue
        return statistics.median(taken[0]), statistics.median(taken[1]), waited

    def _batch(self, calls: Sequence[Call], may_queue: bool) -> tuple[float, bool]:
        number = max(len(calls), self.MIN_CALLS if may_queue else 1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while True:
            torch.cuda.synchronize()
            if may_queue:
                torch.cuda._sleep(self._cycles)
            start.record()
            for turn in range(number):
                calls[turn % len(calls)]()
            end.record()
            waited = start.query()  # then the device did not sleep until all were queued
            end.synchronize()
            if not waited or not may_queue or self._cycles >= self.MOST_CYCLES:
                return start.elapsed_time(end) / 1e3 / number, waited
            self._cycles *= 2


# ---- cases


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def make_values(fmt: FloatFormat, num_values: int, device: torch.device) -> torch.Tensor:
    """Normal numbers as weights are, made in parts, so that fp32 of all of them is never there."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.empty(num_values, dtype=fmt.dtype, device=device)
    for part in values.split(1 << 24):
        part.copy_(0.02 * torch.randn(len(part), generator=generator, device=device))
    return values


def make_changed(values: torch.Tensor, fmt: FloatFormat, share: float) -> torch.Tensor:
    """A copy with `share` of its values changed: 90 % of them by one unit in the last place, 8 % by up to 100, 2 % by 3000."""
    generator = torch.Generator(values.device).manual_seed(1)
    changed = values.clone().view(fmt.int_dtype)
    for part in changed.split(1 << 24):
        random = torch.rand(len(part), generator=generator, device=part.device)
        units = (torch.rand(len(part), generator=generator, device=part.device) * 100).to(fmt.int_dtype)
        step = torch.where(random < 0.9 * share, 1, torch.where(random < 0.98 * share, units + 1, 3000))
        part.copy_(torch.where(random < share, part + step, part))
    return changed.view(fmt.dtype)


def plane_cases(kernels: Kernels, fmt: FloatFormat, values: torch.Tensor, timer: Timer) -> Iterator[Case]:
    """hash, split, merge and checksum."""
    num_values, value_bytes = len(values), values.nbytes
    sizes = (num_values, num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits))
    plane_bytes = sum(sizes)

    def planes() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        exponents, low, top = (torch.empty(size, dtype=torch.uint8, device=values.device) for size in sizes)
        return exponents, low, top if fmt.top_bits else None

    sets = [values.clone() for _ in range(timer.num_sets(value_bytes))]
    hash_bytes = 16 * -(-num_values // BLOCK_SIZE)
    hashes: list[Call] = [partial(kernels.hash_blocks, own, fmt, BLOCK_SIZE) for own in sets]
    yield Case("hash", None, "values, hashes", value_bytes + hash_bytes, hashes, lambda: True)
    sums: list[Call] = [partial(kernels.checksum, own.view(1, -1)) for own in sets]
    yield Case("checksum", None, "values", value_bytes, sums, lambda: True)
    sets = sets[: timer.num_sets(value_bytes + plane_bytes)]
    planes_of = [planes() for _ in sets]
    pairs = list(zip(sets, planes_of, strict=True))
    splits: list[Call] = [partial(kernels.split_planes, own, fmt, *to) for own, to in pairs]
    yield Case("split", None, "values, planes", value_bytes + plane_bytes, splits, lambda: True)
    for own, to in pairs:
        kernels.split_planes(own, fmt, *to)
        own.zero_()
    merges: list[Call] = [partial(kernels.merge_planes, *of, fmt, own) for own, of in pairs]
    yield Case("merge", None, "planes, out", value_bytes + plane_bytes, merges, lambda: same_bits(sets[0], values))


class Changing:
    """One set of buffers for find and apply: two states of the values, between which every call goes forth or back."""

    def __init__(self, kernels: Kernels, fmt: FloatFormat, before: torch.Tensor, after: torch.Tensor) -> None:
        self._kernels, self._fmt = kernels, fmt
        self.states = (before, after)
        self.last = before.clone()
        self.out = torch.empty_like(before)
        self.turn = 0
        self.changes = [
            kernels.find_changes(now, last.clone(), fmt, Form()) for now, last in ((before, after), (after, before))
        ]

    def find(self) -> None:
        self.turn += 1
        now = self.turn % 2
        self.changes[now] = self._kernels.find_changes(self.states[now], self.states[1 - now], self._fmt, Form())

    def apply(self) -> None:
        self.turn += 1
        changes = self.changes[self.turn % 2]
        assert changes.changed is not None
        received = Received(Form(), changes.changed, None, changes.small_moves, changes.moves, changes.literals)
        self._kernels.apply_changes(self.last, self._fmt, received, self.out)

    def has_found(self) -> bool:
        """Whether the changes that the last call of find found lead from one state to the other."""
        self.last = self.states[1 - self.turn % 2].clone()
        self.turn -= 1
        self.apply()
        return self.is_right()

    def is_right(self) -> bool:
        """Whether the cache, and what was written out, are what the last call of apply should have made of them."""
        now = self.states[self.turn % 2]
        return same_bits(self.last, now) and same_bits(self.out, now)


def scan_cases(kernels: Kernels, fmt: FloatFormat, values: torch.Tensor, timer: Timer) -> Iterator[Case]:
    """Looking for changes where there are none."""
    num_bytes = 2 * values.nbytes + packed_bytes(len(values), 1)
    pairs = [(values.clone(), values.clone()) for _ in range(timer.num_sets(num_bytes))]

    calls: list[Call] = [partial(kernels.find_changes, *pair, fmt, Form()) for pair in pairs]
    yield Case("scan", None, "2 x values, bitmap", num_bytes, calls, lambda: same_bits(*pairs[0]))


def change_cases(kernels: Kernels, fmt: FloatFormat, values: torch.Tensor, timer: Timer) -> Iterator[Case]:
    """find and apply."""
    value_bytes, bitmap_bytes = values.nbytes, packed_bytes(len(values), 1)
    num_sets = timer.num_sets(2 * value_bytes)
    for share in SHARES:
        after = make_changed(values, fmt, share)
        sets = [Changing(kernels, fmt, values.clone(), after.clone()) for _ in range(num_sets)]
        del after
        changes = sets[0].changes[1]
        num_bytes = 2 * value_bytes + bitmap_bytes + len(changes.moves) + changes.literals.nbytes
        calls: list[Call] = [buffers.find for buffers in sets]
        yield Case("find", share, "2 x values, bitmap, changes", num_bytes, calls, sets[0].has_found)
        for buffers in sets:
            buffers.last = buffers.states[buffers.turn % 2].clone()
        calls = [buffers.apply for buffers in sets]
        num_bytes += len(changes.moves) * fmt.item_bytes
        yield Case("apply", share, "values, out, bitmap, changes", num_bytes, calls, sets[0].is_right)


def host_cases(kernels: Kernels, fmt: FloatFormat, values: torch.Tensor, timer: Timer) -> Iterator[Case]:
    """The cases of the kernels that work on one run on CPU."""
    for cases in (plane_cases, scan_cases, change_cases):
        yield from cases(kernels, fmt, values, timer)


# ---- the same of tile kernels: one peer, one run


def tile_cases(kernels: TileKernels, fmt: FloatFormat, values: torch.Tensor, timer: Timer) -> Iterator[Case]:
    """The cases of the kernels that work on all runs of all peers: those of `host_cases`, then three of symbols."""
    num_values, value_bytes, device = len(values), values.nbytes, values.device
    tiles = make_tiles([(0, num_values)], device, block_size=BLOCK_SIZE)
    sets = [values.clone() for _ in range(timer.num_sets(value_bytes))]
    hashes: list[Call] = [partial(kernels.hash_blocks, own, tiles, fmt, None) for own in sets]
    yield Case("hash", None, "values, hashes", value_bytes + 16 * tiles.num_blocks, hashes, lambda: True)
    sums: list[Call] = [partial(kernels.checksum, own.view(1, -1)) for own in sets]
    yield Case("checksum", None, "values", value_bytes, sums, lambda: True)

    plane_bytes = num_values + fmt.remainder_bytes(num_values)
    sets = sets[: timer.num_sets(value_bytes + plane_bytes)]
    planes = [SentPlanes(tiles, fmt, device) for _ in sets]
    splits: list[Call] = [partial(to.split, kernels, own) for own, to in zip(sets, planes, strict=True)]
    yield Case("split", None, "values, planes", value_bytes + plane_bytes, splits, lambda: True)
    for own, to in zip(sets, planes, strict=True):
        to.split(kernels, own)
        own.zero_()
    merges: list[Call] = [partial(of.merge, kernels, own) for own, of in zip(sets, planes, strict=True)]
    yield Case("merge", None, "planes, out", value_bytes + plane_bytes, merges, lambda: same_bits(sets[0], values))

    flat = make_tiles([(0, num_values)], device, state_is_flat=True)
    num_bytes = 2 * value_bytes + packed_bytes(num_values, 1)
    pairs = [(values.clone(), values.clone()) for _ in range(timer.num_sets(num_bytes))]
    scans: list[Call] = [partial(kernels.scan_values, *pair, flat, fmt, BYTE_ESCAPE) for pair in pairs]
    yield Case("scan", None, "2 x values, bitmap", num_bytes, scans, lambda: same_bits(*pairs[0]))
    for share in SHARES:
        after = make_changed(values, fmt, share)
        changing = [
            TileChanging(kernels, fmt, flat, values.clone(), after.clone()) for _ in range(timer.num_sets(num_bytes))
        ]
        del after
        sent_bytes, octet_bytes = changing[0].sent_bytes(), changing[0].octet_bytes()
        finds: list[Call] = [buffers.find for buffers in changing]
        yield Case("find", share, "2 x values, bitmap, changes", num_bytes + sent_bytes, finds, changing[0].has_found)
        applies: list[Call] = [buffers.apply for buffers in changing]
        yield Case(
            "apply", share, "bitmap, changes, octets", sent_bytes + octet_bytes, applies, changing[0].has_applied
        )

    nibble_bytes, sent_bytes = (
        packed_bytes(num_values, 4),
        fmt.remainder_bytes(num_values) + packed_bytes(num_values, 4),
    )
    symbols = [SentSymbols(kernels, tiles, fmt, own) for own in sets[: timer.num_sets(value_bytes + sent_bytes)]]
    side_bytes = symbols[0].side_bytes()
    scanned: list[Call] = [payload.scan for payload in symbols]
    put: list[Call] = [payload.put for payload in symbols]
    merged: list[Call] = [payload.merge for payload in symbols]
    is_right = symbols[0].is_right
    yield Case("scan symbols", None, "values, tops, escapes", value_bytes + side_bytes, scanned, is_right)
    yield Case("put nibbles", None, "values, nibbles", value_bytes + nibble_bytes, put, is_right)
    counted = "planes, nibbles, tops, escapes, out"
    yield Case("merge symbols", None, counted, value_bytes + sent_bytes + side_bytes, merged, is_right)


class SentSymbols:
    """A payload of one rank with exponents as symbols."""

    TABLE_BYTES = 24

    def __init__(self, kernels: TileKernels, tiles: Tiles, fmt: FloatFormat, values: torch.Tensor) -> None:
        self._kernels, self._tiles, self._fmt, self._values = kernels, tiles, fmt, values
        num_values, device = tiles.num_plane_values, values.device
        self._sizes = (num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits), num_values // 2)
        self._sections_at = -(-(self.TABLE_BYTES + sum(self._sizes)) // 16) * 16
        num_bytes = self._sections_at + 8 * tiles.num_tiles + num_values + 64 & ~15
        self._data = torch.zeros(1, num_bytes, dtype=torch.uint8, device=device)
        self._row_ok = torch.ones(1, dtype=torch.int32, device=device)
        self._damage = torch.zeros(1, dtype=torch.int32, device=device)
        self._out = torch.zeros_like(values)
        low, top, self._nibbles = self._data[0, self.TABLE_BYTES :][: sum(self._sizes)].split(self._sizes)
        kernels.split_tiles(values, tiles, fmt, low, top if fmt.top_bits else None, None)
        self.scan()
        self.put()
        self.merge()

    def scan(self) -> None:
        kernels, values, tiles, fmt = self._kernels, self._values, self._tiles, self._fmt
        scan = kernels.scan_symbols(values, tiles, fmt)
        self._tops = scan.tops
        table = kernels.section_table(kernels.symbol_sizes(scan, tiles), self._sections_at, TILES)
        self._data[0, : self.TABLE_BYTES].copy_(table.view(torch.uint8))
        room = SectionRoom(self._data[0, self._sections_at :], table, self._sections_at, 0)
        kernels.pack_symbols(values, tiles, fmt, scan, room)

    def put(self) -> None:
        self._kernels.put_nibbles(self._values, self._tiles, self._fmt, self._tops, self._nibbles)

    def merge(self) -> None:
        payloads = Payloads(self._data, 1, self._row_ok, 0, self._sections_at, 0)
        self._kernels.merge_symbols(payloads, self.TABLE_BYTES, self._tiles, self._fmt, self._out[None], self._damage)

    def side_bytes(self) -> int:
        """Bytes of the sections."""
        return (int(self._data[0, 16:24].view(torch.int64)) & (1 << 56) - 1) - self._sections_at

    def is_right(self) -> bool:
        """Whether the payload decodes to the values."""
        self._out.zero_()
        self.merge()
        return same_bits(self._out, self._values) and not self._damage.item()


class SentPlanes:
    """A payload with the planes of one rank, and the exponents that a receiver keeps of it."""

    def __init__(self, tiles: Tiles, fmt: FloatFormat, device: torch.device) -> None:
        self.tiles, self.fmt = tiles, fmt
        self.low_bytes = tiles.num_plane_values * fmt.low_bytes
        num_bytes = self.low_bytes + packed_bytes(tiles.num_plane_values, fmt.top_bits)
        self.data = torch.empty(1, num_bytes, dtype=torch.uint8, device=device)
        self.exponents = torch.empty(1, tiles.num_state_values, dtype=torch.uint8, device=device)
        row_ok = torch.ones(1, dtype=torch.int32, device=device)
        self.payloads = Payloads(self.data, 1, row_ok, 0, 0, 0)

    def split(self, kernels: TileKernels, values: torch.Tensor) -> None:
        low, top = self.data[0, : self.low_bytes], self.data[0, self.low_bytes :]
        kernels.split_tiles(values, self.tiles, self.fmt, low, top if self.fmt.top_bits else None, self.exponents[0])

    def merge(self, kernels: TileKernels, out: torch.Tensor) -> None:
        kernels.merge_rows(self.exponents, self.payloads, 0, self.tiles, self.fmt, out[None])


class TileChanging:
    """One set of buffers for find and apply: two states of the values, between which every call goes forth or back."""

    TABLE_BYTES, ARENA_AT = 40, 48

    def __init__(
        self, kernels: TileKernels, fmt: FloatFormat, tiles: Tiles, before: torch.Tensor, after: torch.Tensor
    ) -> None:
        self._kernels, self._fmt, self._tiles = kernels, fmt, tiles
        self.states, self._rows = (before, after), before.clone()[None]
        device = before.device
        self._damage = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_ok = torch.ones(1, dtype=torch.int32, device=device)
        room = 2 * before.nbytes + 4096
        self._arenas = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(2)]
        self._tables = [torch.empty(0)] * 2
        self._found_state = self._applied_state = 0  # the numbers of the states that the last calls led to
        for _ in range(2):
            self.find()
        self._sent = [self._payload(number) for number in range(2)]

    def find(self) -> None:
        self._found_state = number = 1 - self._found_state
        fresh, last, tiles, fmt = self.states[number], self.states[1 - number], self._tiles, self._fmt
        scan = self._kernels.scan_values(fresh, last, tiles, fmt, BYTE_ESCAPE)
        sizes = self._kernels.change_sizes(scan, tiles, fmt.item_bytes)
        table = self._tables[number] = self._kernels.section_table(sizes, self.TABLE_BYTES, TILES)
        room = SectionRoom(self._arenas[number], table, self.ARENA_AT, 0, self.TABLE_BYTES)
        self._kernels.pack_values(fresh, last, tiles, fmt, BYTE_ESCAPE, scan, room)

    def apply(self) -> None:
        self._applied_state = 1 - self._applied_state
        self._apply(self._sent[self._applied_state], self._rows)

    def _apply(self, payloads: Payloads, rows: torch.Tensor) -> None:
        self._kernels.apply_values(payloads, self._tiles, self._fmt, BYTE_ESCAPE, rows, self._damage)

    def _payload(self, number: int) -> Payloads:
        """The payload that leads to a state."""
        arena = self._arenas[number]
        data = torch.zeros(1, self.ARENA_AT + len(arena), dtype=torch.uint8, device=arena.device)
        data[0, : self.TABLE_BYTES] = self._tables[number].view(torch.uint8)
        data[0, self.ARENA_AT :] = arena
        return Payloads(data, 1, self._row_ok, 0, self.TABLE_BYTES, 0)

    def sent_bytes(self) -> int:
        """Bytes of all sections."""
        return (int(self._tables[1][-1]) & (1 << 56) - 1) - self.ARENA_AT

    def octet_bytes(self) -> int:
        """Bytes of the octets in which a value changed, counted twice: read and written."""
        before, after = (state.view(self._fmt.int_dtype) for state in self.states)
        differs = torch.nn.functional.pad(before != after, (0, -len(before) % 8)).view(-1, 8)
        return 2 * 8 * self._fmt.item_bytes * int(differs.any(dim=1).sum())

    def has_found(self) -> bool:
        """Whether the payload that the last call of find packed leads from one state to the other."""
        rows = self.states[1 - self._found_state].clone()[None]
        self._apply(self._payload(self._found_state), rows)
        return same_bits(rows[0], self.states[self._found_state]) and not self._damage.item()

    def has_applied(self) -> bool:
        """Whether the row is in the state that the last call of apply led to."""
        return same_bits(self._rows[0], self.states[self._applied_state]) and not self._damage.item()


def measure(
    device: torch.device,
    fmt: FloatFormat,
    sizes_mib: Sequence[int],
    with_reference: bool,
    timer: Timer,
    console: Console,
) -> list[Rate]:
    """Measures all cases, with a progress bar. Sizes are in MiB of bf16, so of half as many values in 2**20."""
    implementations: dict[str, Callable[[FloatFormat, torch.Tensor, Timer], Iterator[Case]]]
    if chosen_for(device) == "cuda":
        implementations = {"cuda": partial(tile_cases, cuda)}
        if with_reference:
            implementations["reference"] = partial(tile_cases, reference_tiles)
    else:
        implementations = {chosen_for(device): partial(host_cases, kernels_of(torch.empty(0, device=device)))}
        if with_reference:
            implementations["reference"] = partial(host_cases, reference)
    rates: list[Rate] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    num_of_symbols = 3 * (chosen_for(device) == "cuda")
    num_cases = (5 + 2 * len(SHARES) + num_of_symbols) * len(sizes_mib) * len(implementations)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=num_cases)
        for mib in sizes_mib:
            values = make_values(fmt, mib << 19, device)
            copied_bytes = 2 * values.nbytes
            copies: list[Call] = []
            for _ in range(timer.num_sets(copied_bytes)):
                source, target = values.clone(), values.clone()
                copies.append(partial(target.copy_, source))
            for implementation, cases in implementations.items():
                for case in cases(fmt, values, timer):
                    progress.update(task, description=f"{mib} MiB, {implementation}: {case.name}")
                    for call in (*case.calls, *case.calls):
                        call()
                    assert case.is_right(), f"{case.name} of {implementation} gives wrong results"
                    may_queue = implementation == "cuda"
                    seconds, copy_seconds, waited = timer.seconds(case.calls, copies, may_queue)
                    assert case.is_right(), f"{case.name} of {implementation} gives wrong results"
                    speed, copy_speed = case.num_bytes / seconds / 1e9, copied_bytes / copy_seconds / 1e9
                    rates.append(Rate(
                        case.kernel, case.changed, implementation, fmt.name, mib, case.counted, case.num_bytes,
                        seconds, copy_seconds, speed, copy_speed, 100 * speed / copy_speed, waited,
                    ))  # fmt: skip
                    progress.advance(task)
    return rates


# ---- what ran


def identity(device: torch.device) -> dict[str, str]:
    """What was measured, and on what: PTX file, host sources, device, driver, torch."""
    return {
        "ptx_sha256": hashlib.sha256(PTX_FILE.read_bytes()).hexdigest(),
        "host_sources": host.source_digest(host.FOLDER),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "driver": driver_version() if device.type == "cuda" else "none",
        "torch": torch.__version__,
    }


def identity_line(about: dict[str, str]) -> str:
    return "PTX SHA-256 {ptx_sha256}, {device}, driver {driver}, torch {torch}".format(**about)


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver_version() -> str:
    """The version of the NVIDIA driver, where nvidia-smi tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return f"unknown (torch for CUDA {torch.version.cuda})"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split("\n")[0].strip() or "unknown"


# ---- goals, table, picture


def goals_of(rates: Sequence[Rate], device_name: str, num_threads: int) -> list[Goal]:
    """The goals, each with the worst figure that counts for it."""
    on_device = [
        rate for rate in rates if rate.implementation == "cuda" and rate.mib > GOAL_MIB and GOAL_DEVICE in device_name
    ]
    goals = []
    for kernel, wanted in COPY_GOALS.items():
        shares = [rate.share for rate in on_device if rate.kernel == kernel]
        text = f"{GOAL_DEVICE}, above {GOAL_MIB} MiB: {kernel} in % of the copy"
        goals.append(Goal(text, wanted, min(shares, default=None)))
    shares = [rate.share for rate in on_device]
    text = f"{GOAL_DEVICE}, above {GOAL_MIB} MiB: every kernel in % of the copy"
    goals.append(Goal(text, EVERY_GOAL, min(shares, default=None)))
    counts = {
        (rate.kernel, rate.changed, rate.implementation): rate.seconds
        for rate in rates
        if rate.mib == HOST_GOAL_MIB and rate.format == "bf16" and num_threads == 1
    }
    for name, wanted in HOST_GOALS.items():
        speedups = []
        for changed in SHARES if name == "find + apply" else (None,):
            parts = [(kernel, changed) for kernel in name.split(" + ")]
            if all((*part, build) in counts for part in parts for build in ("host", "reference")):
                slow, fast = (sum(counts[*part, build] for part in parts) for build in ("reference", "host"))
                speedups.append(slow / fast)
        text = f"CPU, one core, {HOST_GOAL_MIB} MiB of bf16: {name}, times the torch reference"
        goals.append(Goal(text, wanted, min(speedups, default=None)))
    return goals


def reference_of(rate: Rate, rates: Sequence[Rate]) -> Rate | None:
    """The torch reference of the same case."""
    for other in rates:
        if other.implementation == "reference" and (other.name, other.mib) == (rate.name, rate.mib):
            return other
    return None


def compared(rates: Sequence[Rate]) -> list[Rate]:
    """The rates to show: all but those of the torch reference, if there are others."""
    chosen = [rate for rate in rates if rate.implementation != "reference"]
    return chosen or list(rates)


def table_of(rates: Sequence[Rate], title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption)
    shown = compared(rates)
    has_reference = any(rate.implementation == "reference" for rate in rates) and shown[0].implementation != "reference"
    right = {"justify": "right", "no_wrap": True}
    table.add_column("kernel", no_wrap=True)
    table.add_column("MiB", **right)  # type: ignore[arg-type]
    table.add_column("bytes counted", no_wrap=True)
    for heading in ("time", "GB/s", "copy GB/s", "of copy", *(("reference", "times") if has_reference else ())):
        table.add_column(heading, **right)  # type: ignore[arg-type]
    size = shown[0].mib if shown else 0
    for rate in shown:
        if rate.mib != size:
            table.add_section()
            size = rate.mib
        beside = reference_of(rate, rates) if has_reference else None
        dry = " *" if rate.waited_for_host else ""
        table.add_row(
            rate.name, str(rate.mib), rate.counted, readable(rate.seconds), f"{rate.gb_per_s:,.2f}",
            f"{rate.copy_gb_per_s:,.2f}", f"{rate.share:.1f} %{dry}",
            *((f"{beside.gb_per_s:,.2f}", f"{beside.seconds / rate.seconds:.1f}x") if beside else ()),
        )  # fmt: skip
    return table


def readable(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"


def goal_table(goals: Sequence[Goal]) -> Table:
    table = Table(title="goals (the worst figure that counts)")
    for heading in ("goal", "wanted", "found", ""):
        table.add_column(heading, justify="right" if heading in ("wanted", "found") else "left", no_wrap=True)
    colours = {"reached": "green", "not reached": "red", "not measured here": "dim"}
    for goal in goals:
        reached = "" if goal.found is None else f"{goal.found:.1f}"
        colour = colours[goal.verdict]
        table.add_row(goal.text, f"{goal.wanted:g}", reached, f"[{colour}]{goal.verdict}[/{colour}]")
    return table


BLUES = ("#9ecae1", "#5ba3cf", "#2f78b4", "#0b4a8a")  # from the smallest size to the largest
GREY, GOAL_COLOUR = "#b5b5b5", "#c44e52"


def draw(rates: Sequence[Rate], title: str, path: str) -> None:
    """A row of bars for each kernel, a bar for each size, in percent of the copy; goals where the device has some."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = compared(rates)
    names, sizes = list(dict.fromkeys(r.name for r in shown)), list(dict.fromkeys(r.mib for r in shown))
    colours = dict(zip(sizes, BLUES[-len(sizes) :] if len(sizes) <= len(BLUES) else BLUES * len(sizes), strict=False))
    largest = max(sizes)
    has_reference = shown[0].implementation != "reference" and any(r.implementation == "reference" for r in rates)
    num_bars = len(sizes) + has_reference
    figure, axis = plt.subplots(figsize=(9, (0.2 * num_bars + 0.25) * len(names) + 1.7), layout="constrained")
    most = max([100.0, *(rate.share for rate in rates)])
    for row, name in enumerate(names):
        bars: list[tuple[Rate, str]] = [(rate, colours[rate.mib]) for rate in shown if rate.name == name]
        beside = reference_of(next(rate for rate, _ in bars if rate.mib == largest), rates) if has_reference else None
        if beside is not None:
            bars.append((beside, GREY))
        height = 0.8 / num_bars
        for number, (rate, colour) in enumerate(bars):
            position = row - 0.4 + (number + 0.5) * height
            axis.barh(position, rate.share, height=0.9 * height, color=colour)
            speed = f"{rate.gb_per_s:,.0f}" if rate.gb_per_s >= 100 else f"{rate.gb_per_s:.3g}"
            text = f"{rate.share:.0f} %, {speed} GB/s"
            if beside is not None and rate is not beside and rate.mib == largest:
                text += f", {beside.seconds / rate.seconds:.1f}x the reference"
            background = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
            axis.text(rate.share + 0.008 * most, position, text, va="center", fontsize=7.5, bbox=background, zorder=4)
        if shown[0].implementation == "cuda":
            goal = COPY_GOALS.get(name.split()[0], EVERY_GOAL)
            axis.plot([goal, goal], [row - 0.44, row + 0.44], color=GOAL_COLOUR, linewidth=1.6, zorder=3)
    axis.set_xlim(0, 1.4 * most)
    axis.set_xticks(range(0, int(most) + 1, 20))
    axis.set_xlabel("% of the device's own copy, in bytes read and written a second")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.spines[["top", "right"]].set_visible(False)
    marks: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=colours[size]) for size in sizes]
    labels = [f"{size} MiB" for size in sizes]
    if has_reference:
        marks.append(plt.Rectangle((0, 0), 1, 1, color=GREY))
        labels.append(f"torch reference, {largest} MiB")
    if shown[0].implementation == "cuda":
        marks.append(plt.Line2D([0], [0], color=GOAL_COLOUR, linewidth=1.6))
        labels.append(f"goal on {GOAL_DEVICE}, above {GOAL_MIB} MiB")
    figure.legend(marks, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    parser.add_argument("--mib", help="MiB of bf16 weights, comma-separated; other formats have as many values")
    parser.add_argument("--format", choices=[fmt.name for fmt in FORMATS.values()], default="bf16")
    parser.add_argument("--reference", action="store_true", help="time the torch reference too")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="PATH", help="write all rates and goals there")
    parser.add_argument("--plot", metavar="PATH", help="draw the rates there (needs matplotlib)")
    parser.add_argument(
        "--sha", action="store_true", help="only print what would be measured: PTX file, device, versions"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda" or (arguments.device is None and torch.cuda.is_available()):
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    console = Console()
    console.width = max(console.width, 120)  # where there is no terminal, rich assumes 80
    about = identity(device)
    if arguments.sha:
        console.print(identity_line(about), soft_wrap=True, highlight=False)
        return
    default_sizes = DEVICE_MIB if device.type == "cuda" else HOST_MIB
    sizes = [int(size) for size in arguments.mib.split(",")] if arguments.mib else list(default_sizes)
    fmt = next(fmt for fmt in FORMATS.values() if fmt.name == arguments.format)
    timer: Timer
    if device.type == "cuda":
        timer, caches = (
            DeviceTimer(arguments.rounds, device),
            "each batch goes round buffers larger than twice the L2 cache",
        )
    else:
        timer = HostTimer(arguments.rounds, arguments.threads)
        caches = f"{arguments.threads} thread(s); buffers that fit the CPU's caches stay there"
    rates = measure(device, fmt, sizes, arguments.reference, timer, console)
    title = f"{compared(rates)[0].implementation} kernels, {fmt.name}, {about['device']}, torch {about['torch']}"
    caption = f"{identity_line(about)}; medians of {arguments.rounds}; {caches}"
    if any(rate.waited_for_host for rate in rates):
        caption += "; * the device waited for the host between launches"
    goals = goals_of(rates, about["device"], arguments.threads)
    console.print(table_of(rates, title, caption))
    console.print(goal_table(goals))
    if arguments.json:
        summary = {
            "title": title,
            "identity": about,
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "rates": [asdict(rate) for rate in rates],
            "goals": [{**asdict(goal), "verdict": goal.verdict} for goal in goals],
        }
        with open(arguments.json, "w") as file:
            json.dump(summary, file, indent=1)
    if arguments.plot:
        draw(rates, f"{title}\nPTX {about['ptx_sha256'][:12]}, driver {about['driver']}", arguments.plot)
        console.print(f"picture: {arguments.plot}")


if __name__ == "__main__":
    main()

"""Cases for the CUDA kernels: the functions of kernels/cuda.py, compared with those of kernels/reference_tiles.py.

A case runs on any `Executor`, which lends memory and launches kernels: the PTX interpreter (test_kernels_ptx.py), the source
under sanitizers (test_kernels_shim.py), the shim in this process (test_shim_device.py), a device (tests/gpu). Results have to
have the same bits, and what a kernel should not touch stays as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.kernels import cuda, reference
from fsdp_ciera.kernels import reference_tiles as expected
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.heads import ALIGNMENT, BROKEN_PROMISE, FAILED, HEAD, HEAD_BYTES, TILES, Damage
from fsdp_ciera.kernels.tiles import (
    CTA_VALUES,
    FAR,
    Payloads,
    Scan,
    SectionRoom,
    SymbolScan,
    TileKernels,
    Tiles,
    make_tiles,
)

OCTET, WARP_VALUES, THREADS = 8, 256, 256
FLOATS = list(FORMATS.values())
BF16, FP16, FP32 = FLOATS
SIZES = [*range(1, 18), 63, 64, 65, 255, 256, 257, 263, 2040, 2047, 2048, 2049, 2056, 4096, 4301]
ALIGNMENTS = ["16", "8", "odd", "mixed"]
FILLS = (0x5A, 0xA5)
"""What is written is what is the same in memory that was full of either."""

Array = npt.NDArray[Any]
Runs = tuple[tuple[int, int], ...]
Put = Callable[[torch.Tensor], torch.Tensor]
Damaging = Callable[[Payloads], Payloads]
Change = Callable[[torch.Tensor], Any]
"""In place."""


class Executor(Protocol):
    """Memory and launches of a device. Buffers are flat; they begin `misalignment` bytes behind a multiple of 256."""

    pattern: int
    """The byte that `alloc` fills memory with."""

    def serving(self) -> AbstractContextManager[None]:
        """In it, kernels/cuda.py launches here, and has its results in memory of `alloc`."""
        ...

    def upload(self, data: torch.Tensor, misalignment: int = 0) -> torch.Tensor:
        """A copy of a flat tensor."""
        ...

    def alloc(self, num_bytes: int, misalignment: int = 0) -> torch.Tensor:
        """uint8 [num_bytes], which count as never written."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on CPU, contiguous."""
        ...

    def written(self, room: torch.Tensor) -> torch.Tensor | None:
        """Which bytes of an `alloc` kernels have written, bool; `None` where nobody knows."""
        ...


@dataclass(frozen=True)
class Case:
    """`run` raises AssertionError where a result differs. The quick ones together try all that the kernel does."""

    name: str
    kernels: tuple[str, ...]
    run: Callable[[Executor], None]
    quick: bool = False

    def __str__(self) -> str:
        return self.name


def run_case(case: Case, executor: Executor) -> None:
    """Says which case it was when it fails."""
    try:
        with executor.serving():
            case.run(executor)
    except Exception as error:
        error.add_note(f"in case {case.name}")
        raise


class GuardedMemory:
    """An executor on a torch device, whose launches go where they go: buffers lie between guard bytes, and are filled before
    with one pattern. Run with the pattern's complement too, a byte that should be written and is not shows in one of them."""

    GUARD_BYTES = 512

    def __init__(self, device: torch.device, pattern: int) -> None:
        self.device, self.pattern = device, pattern
        self.buffers: list[tuple[torch.Tensor, int, int]] = []
        """Memory, and where in it a buffer begins and ends."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        with patch.object(cuda, "_room", self._room):
            yield

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == self.device.type
        return self.alloc(int(np.prod(shape)) * dtype.itemsize).view(dtype).view(shape)

    def upload(self, data: torch.Tensor, misalignment: int = 0) -> torch.Tensor:
        buffer = self.alloc(data.nbytes, misalignment).view(data.dtype)
        words_of(buffer).copy_(words_of(data))
        return buffer

    def alloc(self, num_bytes: int, misalignment: int = 0) -> torch.Tensor:
        size = 256 + misalignment + num_bytes + 2 * self.GUARD_BYTES
        memory = torch.full((size,), self.pattern, dtype=torch.uint8, device=self.device)
        first = self.GUARD_BYTES + -(memory.data_ptr() + self.GUARD_BYTES) % 256 + misalignment
        self.buffers.append((memory, first, first + num_bytes))
        return memory[first : first + num_bytes]

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return words_of(tensor.contiguous()).cpu().clone().view(tensor.dtype)

    def written(self, room: torch.Tensor) -> torch.Tensor | None:
        return None

    def check_guards(self) -> None:
        """Fails where a byte beside a buffer was written."""
        for number, (memory, first, end) in enumerate(self.buffers):
            around = memory.cpu().clone()
            around[first:end] = self.pattern
            wrong = (around != self.pattern).nonzero().view(-1) - first
            assert not len(wrong), f"buffer {number} of {end - first} bytes: bytes {wrong[:8].tolist()} were written"


class Buffers:
    """Buffers of one case, all aligned to 16 or 8 bytes, to no more than their elements ("odd"), or by chance ("mixed")."""

    def __init__(self, executor: Executor, alignment: str) -> None:
        self.executor, self.alignment = executor, alignment
        self.random = random.Random(alignment)

    def misalignment(self, element_bytes: int) -> int:
        alignment = self.random.choice(["16", "8", "odd"]) if self.alignment == "mixed" else self.alignment
        odd = element_bytes * self.random.choice([1, 3, 5])
        return {"16": 0, "8": 8, "odd": odd}[alignment]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = self.executor.upload(tensor.contiguous().view(-1), self.misalignment(tensor.element_size()))
        return flat.view(tensor.shape)

    def room(self, num_values: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        num_bytes = num_values * dtype.itemsize
        return self.executor.alloc(num_bytes, self.misalignment(dtype.itemsize)).view(dtype)

    def tiles(self, tiles: Tiles) -> Tiles:
        return replace(
            tiles, table=self.put(tiles.table), blocks=None if tiles.blocks is None else self.put(tiles.blocks)
        )

    def payloads(self, payloads: Payloads, gap: int = 16) -> Payloads:
        """Payloads have the alignment that they are promised, and a gap behind each but the last."""
        num_bytes = payloads.data.shape[1]
        padded = rows_in(num_bytes, -num_bytes % ALIGNMENT + gap, payloads.data)
        data = as_rows(self.executor.upload(padded), len(payloads.data), num_bytes, -num_bytes % ALIGNMENT + gap)
        return replace(payloads, data=data, row_ok=self.put(payloads.row_ok))

    def expect(self, found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        """The bits of a tensor. What is in an `alloc` must have been written."""
        is_written = self.executor.written(found)
        assert is_written is None or bool(is_written.all()), f"{what}: {int((~is_written).sum())} bytes are not written"
        compare(self.executor.download(found), wanted, what)

    def expect_filled(self, room: torch.Tensor, fill: Callable[[torch.Tensor], None], what: str) -> None:
        """The bits that `fill` writes into a flat tensor like `room`, and that nothing else was written."""
        one, other = (torch.full((room.nbytes,), byte, dtype=torch.uint8) for byte in FILLS)
        for full in (one, other):
            fill(full.view(room.dtype))
        is_written = one == other
        wanted = torch.where(is_written, one, self.executor.pattern)
        compare(self.executor.download(room).view(torch.uint8), wanted, what)
        known = self.executor.written(room)
        assert known is None or torch.equal(known, is_written), f"{what}: other bytes are written"


def as_rows(flat: torch.Tensor, num_rows: int, num_values: int, gap: int) -> torch.Tensor:
    """Rows [num_rows, num_values] in a flat tensor, with a gap behind each but the last."""
    return flat.as_strided((num_rows, num_values), (num_values + gap, 1), flat.storage_offset())


def rows_in(num_values: int, gap: int, rows: torch.Tensor) -> torch.Tensor:
    """The inverse: a flat tensor, with FILLS[0] in the gaps."""
    size = max(0, len(rows) * (num_values + gap) - gap)
    flat = torch.full((size * rows.element_size(),), FILLS[0], dtype=torch.uint8).view(rows.dtype)
    as_rows(flat, len(rows), num_values, gap).copy_(rows)
    return flat


def compare(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Bit for bit."""
    one, other = words(found).reshape(-1), words(wanted).reshape(-1)
    assert found.shape == wanted.shape and one.dtype == other.dtype, (what, found.shape, wanted.shape, one.dtype)
    wrong = np.flatnonzero(one != other)
    if len(wrong):
        first = wrong[0]
        raise AssertionError(
            f"{what}: {len(wrong)} of {one.size} are wrong, the first is number {first}: {one[first]:#x} in place of "
            f"{other[first]:#x}"
        )


# ---- values


def words(tensor: torch.Tensor) -> Array:
    """Bit patterns, unsigned; integers of more than a byte stay what they are."""
    if tensor.dtype in (torch.int32, torch.int64):
        return tensor.contiguous().numpy()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(integers).numpy().view(f"u{tensor.element_size()}")


def tensor_of(patterns: Array, fmt: FloatFormat | None) -> torch.Tensor:
    """The inverse."""
    integers = torch.from_numpy(patterns.view(patterns.dtype.str.replace("u", "i") if fmt else np.uint8).copy())
    return integers if fmt is None else integers.view(fmt.dtype)


def word_dtype(fmt: FloatFormat | None) -> np.dtype[Any]:
    return np.dtype(f"u{fmt.item_bytes if fmt else 1}")


def some_values(fmt: FloatFormat | None, num_values: int, seed: int = 0) -> torch.Tensor:
    """Random bit patterns, normal numbers, and special ones: zeros, denormals, infinities, NaNs with payloads."""
    generator = np.random.default_rng([seed, num_values])
    dtype = word_dtype(fmt)
    patterns = generator.integers(0, 256, num_values * dtype.itemsize, np.uint8).view(dtype)
    if fmt is None:
        return tensor_of(patterns, fmt)
    infinity = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    least, quiet = 1 << fmt.mantissa_bits, 1 << (fmt.mantissa_bits - 1)
    magnitudes = [0, 1, 2, least - 1, least, infinity - 1, infinity, infinity + 1, infinity + quiet + 5]
    special = np.array([magnitude | sign << fmt.sign_bit for magnitude in magnitudes for sign in (0, 1)], dtype)
    normal = words(torch.from_numpy(generator.normal(0, 0.02, num_values)).to(fmt.dtype))
    kind = generator.integers(0, 8, num_values)
    mixed = np.where(kind < 4, patterns, np.where(kind < 7, normal, generator.choice(special, num_values)))
    return tensor_of(mixed.astype(dtype), fmt)


def nonzero_values(fmt: FloatFormat | None, num_values: int) -> torch.Tensor:
    """Random ones without a zero, exponent or mantissa, which a value that was not loaded would look like."""
    patterns = words(some_values(fmt, num_values, 2))
    return tensor_of(patterns | patterns.dtype.type(1 | (1 << fmt.mantissa_bits if fmt else 0)), fmt)


def symbol_values(fmt: FloatFormat, num_values: int, seed: int = 0, most_below: int = 255) -> torch.Tensor:
    """Exponents around `FAR` below one of several tops, at most `most_below`; signs and mantissas by chance."""
    generator = np.random.default_rng([seed, num_values, most_below])
    most = (1 << fmt.exponent_bits) - 1
    tops = np.array([most, most // 2 + 1, FAR + 2, 3] if most_below > FAR else [FAR + 2])
    below = generator.choice([0, 1, 7, FAR - 2, FAR - 1, FAR, FAR + 1, 40], num_values)
    exponents = np.maximum(0, tops[np.arange(num_values) // 700 % len(tops)] - np.minimum(below, most_below))
    rest = words(some_values(fmt, num_values, seed)) & word_dtype(fmt).type(
        ~(most << fmt.mantissa_bits) % (2 << fmt.sign_bit)
    )
    return tensor_of(rest | (exponents << fmt.mantissa_bits).astype(word_dtype(fmt)), fmt)


def all_values(fmt: FloatFormat | None) -> torch.Tensor:
    """Every bit pattern of 8 or 16 bits, once."""
    return tensor_of(np.arange(1 << 8 * word_dtype(fmt).itemsize).astype(word_dtype(fmt)), fmt)


def in_order(patterns: Array) -> Array:
    """Bit patterns <-> integers in the order of the numbers, as unsigned ones: the lower bits of negatives flip."""
    sign = 8 * patterns.itemsize - 1
    lower = patterns.dtype.type((1 << sign) - 1)
    return np.where(patterns >> patterns.dtype.type(sign), patterns ^ lower, patterns)


def moved(patterns: Array, symbols: Array, fmt: FloatFormat | None) -> Array:
    """Patterns after these moves, of up to the patterns' width."""
    if fmt is None:
        return patterns + symbols.astype(np.uint8)
    numbers = symbols.astype(np.int64)
    return in_order(in_order(patterns) + ((numbers >> 1) ^ -(numbers & 1)).astype(patterns.dtype))


def changed_values(
    last: torch.Tensor, fmt: FloatFormat | None, share: float, escape: int, seed: int = 1
) -> torch.Tensor:
    """A share of them changed: by little, by moves around the escape, and to anywhere."""
    patterns = words(last)
    generator = np.random.default_rng([seed, len(patterns)])
    symbols = generator.choice([1, 2, 3, 7, 8, 12, max(1, escape - 1), escape, escape + 1, escape + 2], len(patterns))
    anywhere = generator.integers(0, 256, patterns.nbytes, np.uint8).view(patterns.dtype)
    fresh = np.where(generator.random(len(patterns)) < 0.9, moved(patterns, symbols, fmt), anywhere)
    is_changed = generator.random(len(patterns)) < share
    return tensor_of(np.where(is_changed, fresh, patterns).astype(patterns.dtype), fmt)


# ---- units


@dataclass(frozen=True)
class Unit:
    """What the ranks have of a unit: shards that they remember and shards of now, with values between the runs too."""

    fmt: FloatFormat
    runs: Runs
    share: float = 0.3
    escape: int = 255
    world_size: int = 2
    block_size: int = 0
    state_is_flat: bool = False
    shards: tuple[torch.Tensor, ...] = ()
    """Shards of now, in place of random ones."""
    past: tuple[torch.Tensor, ...] = ()
    """Shards that are remembered, in place of random ones."""

    @property
    def num_values(self) -> int:
        """Of a shard: some more than the runs have."""
        return max((start + count for start, count in self.runs), default=0) + 3

    @cached_property
    def tiles(self) -> Tiles:
        return make_tiles(self.runs, "cpu", block_size=self.block_size, state_is_flat=self.state_is_flat)

    @cached_property
    def last(self) -> list[torch.Tensor]:
        noise = [some_values(self.fmt, self.num_values, rank) for rank in range(self.world_size)]
        return [torch.cat([shard, noise[0]])[: self.num_values] for shard in self.past] or noise

    @cached_property
    def fresh(self) -> list[torch.Tensor]:
        if self.shards:
            return [torch.cat([shard, self.last[0]])[: self.num_values] for shard in self.shards]
        return [changed_values(last, self.fmt, self.share, self.escape, rank) for rank, last in enumerate(self.last, 1)]

    @cached_property
    def sent(self) -> dict[Any, Any]:
        """What the reference sent, so that it does it once."""
        return {}

    def state(self, values: torch.Tensor) -> torch.Tensor:
        """Values as they lie in the state, with noise in the padding."""
        if self.state_is_flat:
            return values.clone()
        state = some_values(self.fmt, self.tiles.num_state_values, 99)
        for start, at, _, count in self.tiles.table.tolist():
            words_of(state)[at : at + count] = words_of(values)[start : start + count]
        return state

    def exponents(self, values: torch.Tensor) -> torch.Tensor:
        """The same of exponents."""
        exponents = torch.empty(len(self.state(values)), dtype=torch.uint8)
        reference.split_planes(self.state(values), self.fmt, exponents)
        return exponents


def words_of(values: torch.Tensor) -> torch.Tensor:
    """Bit patterns, as a view that can be written to."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


NUM_SECTIONS = {"values": 5, "exponents": 4, "blocks": 3, "symbols": 3}


class Encoded:
    """What a rank sends of a unit, by some kernels: sizes of its sections, and the sections once there is a room for them."""

    def __init__(self, kernels: TileKernels, kind: str, unit: Unit, rank: int) -> None:
        self.kind, self.unit, self.fresh, self.last = kind, unit, unit.fresh[rank], remembered(unit, kind, rank)
        tiles, fmt = unit.tiles, unit.fmt
        if kind == "blocks":
            last_hashes, _ = kernels.hash_blocks(self.last, tiles, fmt, None)
            _, self.changed = kernels.hash_blocks(self.fresh, tiles, fmt, last_hashes)
            self.sizes, self.ranks = kernels.block_sizes(self.changed, tiles)
        elif kind == "symbols":
            self.symbols = kernels.scan_symbols(self.fresh, tiles, fmt)
            self.sizes = kernels.symbol_sizes(self.symbols, tiles)
        elif kind == "exponents":
            self.scan = kernels.scan_exponents(self.fresh, self.last, tiles, fmt)
            self.sizes = kernels.change_sizes(self.scan, tiles, 0)
        else:
            self.scan = kernels.scan_values(self.fresh, self.last, tiles, fmt, unit.escape)
            self.sizes = kernels.change_sizes(self.scan, tiles, fmt.item_bytes)

    def pack(self, kernels: TileKernels, room: SectionRoom, tiles: Tiles, put: Put = torch.clone) -> None:
        """put: brings what was found to where the kernels work."""
        fmt = self.unit.fmt
        if self.kind == "blocks":
            kernels.pack_blocks(put(self.fresh), tiles, fmt, put(self.changed), put(self.ranks), room)
            return
        if self.kind == "symbols":
            found = SymbolScan(put(self.symbols.tops), put(self.symbols.up_to))
            kernels.pack_symbols(put(self.fresh), tiles, fmt, found, room)
            return
        scan = Scan(put(self.scan.bits), put(self.scan.up_to))
        if self.kind == "exponents":
            kernels.pack_exponents(put(self.fresh), put(self.last), tiles, fmt, scan, room)
        else:
            kernels.pack_values(put(self.fresh), put(self.last), tiles, fmt, self.unit.escape, scan, room)


def remembered(unit: Unit, kind: str, rank: int) -> torch.Tensor:
    """What `Encoded` calls last."""
    last = unit.last[rank]
    keep = {
        "values": unit.state,
        "exponents": unit.exponents,
        "blocks": torch.Tensor.clone,
        "symbols": torch.Tensor.clone,
    }
    return keep[kind](last)


@dataclass(frozen=True)
class Layout:
    """Where a unit is in payloads: behind a section of 13 bytes or first, and before one of 7 bytes. Planes, where symbols have
    them, are the last bytes of the fixed part."""

    kind: str
    first: int = 1
    fixed_bytes: int = 27

    @property
    def num_sections(self) -> int:
        return self.first + NUM_SECTIONS[self.kind] + 1

    @property
    def sections_at(self) -> int:
        return HEAD_BYTES + 8 * self.num_sections + self.fixed_bytes

    @property
    def arena_at(self) -> int:
        return -(-self.sections_at // ALIGNMENT) * ALIGNMENT

    def table(self, sizes: torch.Tensor) -> torch.Tensor:
        around = [torch.tensor([13] * self.first), sizes, torch.tensor([7])]
        return expected.section_table(torch.cat(around).to(torch.int64), self.sections_at, TILES)

    def end(self, table: torch.Tensor) -> int:
        return int(table[-1]) & (1 << 56) - 1


def layout_of(unit: Unit, kind: str, first: int = 1, alignment: str = "16") -> Layout:
    """With room for the planes of symbols, at any byte. They have no better alignment than 8."""
    if kind != "symbols":
        return Layout(kind, first)
    lead = {"16": 0, "8": 4, "odd": 3, "mixed": 18}[alignment]
    return Layout(kind, first, lead + sum(symbol_plane_bytes(unit)))


def symbol_plane_bytes(unit: Unit) -> tuple[int, int, int]:
    """Of the planes low, top and nibbles."""
    num_values, fmt = unit.tiles.num_plane_values, unit.fmt
    return num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits), num_values // 2


def encoded(unit: Unit, kind: str, rank: int) -> Encoded:
    """By the reference."""
    if (kind, rank) not in unit.sent:
        unit.sent[kind, rank] = Encoded(expected, kind, unit, rank)
    found: Encoded = unit.sent[kind, rank]
    return found


def sent_payloads(unit: Unit, layout: Layout, own: int) -> Payloads:
    """What the reference sends of all ranks, as they receive it. Not to be written to."""
    if layout not in unit.sent:
        payloads = [payload_of(unit, layout, rank) for rank in range(unit.world_size)]
        num_bytes = max(map(len, payloads))
        data = torch.full((len(payloads), num_bytes), 0x77, dtype=torch.uint8)
        for row, payload in zip(data, payloads, strict=True):
            row[: len(payload)] = payload
        unit.sent[layout] = padded_rows(data)
    row_ok = torch.ones(unit.world_size, dtype=torch.int32)
    return Payloads(unit.sent[layout], own, row_ok, HEAD_BYTES, layout.sections_at, layout.first)


def payload_of(unit: Unit, layout: Layout, rank: int) -> torch.Tensor:
    found = encoded(unit, layout.kind, rank)
    table = layout.table(found.sizes)
    payload = torch.full((layout.end(table),), 0x77, dtype=torch.uint8)
    payload[HEAD_BYTES : HEAD_BYTES + 8 * len(table)] = table.view(torch.uint8)
    if layout.kind == "symbols":
        sizes = symbol_plane_bytes(unit)
        low, top, nibbles = payload[layout.sections_at - sum(sizes) : layout.sections_at].split(sizes)
        expected.split_tiles(found.fresh, unit.tiles, unit.fmt, low, top if unit.fmt.top_bits else None, None)
        expected.put_nibbles(found.fresh, unit.tiles, unit.fmt, found.symbols.tops, nibbles)
    arena = torch.full((layout.end(table) - layout.arena_at,), 0x77, dtype=torch.uint8)
    found.pack(expected, SectionRoom(arena, table, layout.arena_at, layout.first), unit.tiles)
    payload[layout.arena_at :] = arena
    return payload


def peers_of(world_size: int, own: int) -> list[int]:
    return [rank for rank in range(world_size) if rank != own]


def one_by_one(runs: Iterable[Callable[[Executor], None]]) -> Callable[[Executor], None]:
    """One case of several."""
    several = list(runs)

    def run(executor: Executor) -> None:
        for each in several:
            each(executor)

    return run


# ---- sender


def scan_case(unit: Unit, kind: str, alignment: str = "16") -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, fresh, last = Buffers(executor, alignment), unit.fresh[0], remembered(unit, kind, 0)
        tiles = buffers.tiles(unit.tiles)
        if kind == "values":
            found = cuda.scan_values(buffers.put(fresh), buffers.put(last), tiles, unit.fmt, unit.escape)
        else:
            found = cuda.scan_exponents(buffers.put(fresh), buffers.put(last), tiles, unit.fmt)
        wanted = encoded(unit, kind, 0)
        buffers.expect(found.bits, wanted.scan.bits, "bits")
        buffers.expect(found.up_to, wanted.scan.up_to, "up_to")
        item_bytes = unit.fmt.item_bytes if kind == "values" else 0
        buffers.expect(cuda.change_sizes(found, tiles, item_bytes), wanted.sizes, "sizes")

    return run


def scan_symbols_case(unit: Unit, alignment: str = "16") -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, wanted = Buffers(executor, alignment), encoded(unit, "symbols", 0)
        found = cuda.scan_symbols(buffers.put(wanted.fresh), buffers.tiles(unit.tiles), unit.fmt)
        buffers.expect(found.tops, wanted.symbols.tops, "tops")
        buffers.expect(found.up_to, wanted.symbols.up_to, "up_to")
        buffers.expect(cuda.symbol_sizes(found, unit.tiles), wanted.sizes, "sizes")

    return run


def nibbles_case(unit: Unit, alignment: str = "16") -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, fresh = Buffers(executor, alignment), unit.fresh[0]
        tops, room = encoded(unit, "symbols", 0).symbols.tops, buffers.room(symbol_plane_bytes(unit)[2])
        cuda.put_nibbles(buffers.put(fresh), buffers.tiles(unit.tiles), unit.fmt, buffers.put(tops), room)
        buffers.expect_filled(
            room, lambda flat: expected.put_nibbles(fresh, unit.tiles, unit.fmt, tops, flat), "nibbles"
        )

    return run


def pack_case(
    unit: Unit, kind: str, alignment: str = "16", first: int = 1, missing: int = 0, arena_at: int | None = None
) -> Callable[[Executor], None]:
    """Sections from what the reference found. missing: bytes that the arena lacks; then nothing must be written.
    arena_at: another byte of the payload than that of the first section."""

    def run(executor: Executor) -> None:
        buffers, layout = Buffers(executor, alignment), layout_of(unit, kind, first)
        wanted = encoded(unit, kind, 0)
        table = layout.table(wanted.sizes)
        at = layout.arena_at if arena_at is None else arena_at
        sections_at = None if arena_at is None else layout.sections_at
        arena = executor.alloc(max(0, layout.end(table) - at - missing))
        room = SectionRoom(arena, buffers.put(table), at, first, sections_at)
        wanted.pack(cuda, room, buffers.tiles(unit.tiles), buffers.put)
        buffers.expect_filled(
            arena,
            lambda flat: wanted.pack(expected, SectionRoom(flat, table, at, first, sections_at), unit.tiles),
            "arena",
        )
        is_untouched = bool((executor.download(arena) == executor.pattern).all())
        assert is_untouched == (missing > 0 or not wanted.sizes.any())

    return run


# ---- receiver


def receive_case(
    unit: Unit,
    kind: str,
    own: int,
    alignment: str = "16",
    first: int = 1,
    gap: int = 8,
    damage: Damaging | None = None,
    must_tell: bool = False,
) -> Callable[[Executor], None]:
    """All ranks' payloads -> their rows. damage: what becomes of the payloads on the way; then the reference says what the rest
    makes of it. must_tell: that it is noticed."""

    def run(executor: Executor) -> None:
        buffers, layout = Buffers(executor, alignment), layout_of(unit, kind, first, alignment)
        payloads = sent_payloads(unit, layout, own)
        if damage is not None:
            payloads = damage(payloads)
        peers = peers_of(unit.world_size, own)
        if kind == "symbols":
            before, after = torch.stack(unit.last), torch.stack(unit.fresh)
        elif kind == "values":
            before = torch.stack([unit.state(last) for last in unit.last])
            after = torch.stack([unit.state(fresh) for fresh in unit.fresh])
        else:
            before = torch.stack([unit.exponents(unit.last[rank]) for rank in peers])
            after = torch.stack([unit.exponents(unit.fresh[rank]) for rank in peers])
        flat = rows_in(before.shape[1], gap, before)
        on_device = buffers.put(flat)
        flags = [torch.full((1,), 64, dtype=torch.int32) for _ in range(2)]
        of_device = buffers.put(flags[1])
        rows = as_rows(on_device, len(before), before.shape[1], gap)
        receive(cuda, kind, buffers.payloads(payloads), unit, buffers.tiles(unit.tiles), rows, of_device)
        wanted = as_rows(flat, len(before), before.shape[1], gap)
        receive(expected, kind, payloads, unit, unit.tiles, wanted, flags[0])
        if damage is None:
            check_rows(unit, kind, wanted, after, own)
        assert not must_tell or flags[0].item() == 64 | Damage.DAMAGED, "the reference has noticed nothing"
        buffers.expect(on_device, flat, "rows")
        buffers.expect(of_device, flags[0], "damage")

    return run


def receive(
    kernels: TileKernels,
    kind: str,
    payloads: Payloads,
    unit: Unit,
    tiles: Tiles,
    rows: torch.Tensor,
    damage: torch.Tensor,
) -> None:
    """Into states; for symbols, which have none, into shards."""
    if kind == "symbols":
        fixed_at = payloads.sections_at - sum(symbol_plane_bytes(unit))
        kernels.merge_symbols(payloads, fixed_at, tiles, unit.fmt, rows, damage)
    elif kind == "values":
        kernels.apply_values(payloads, tiles, unit.fmt, unit.escape, rows, damage)
    elif kind == "exponents":
        kernels.apply_exponents(payloads, tiles, rows, damage)
    else:
        kernels.put_blocks(payloads, tiles, rows, damage)


def check_rows(unit: Unit, kind: str, rows: torch.Tensor, fresh: torch.Tensor, own: int) -> None:
    """The reference itself: rows have what was sent, in all places of the runs."""
    has_own = kind in ("values", "symbols")
    ranks = range(unit.world_size) if has_own else peers_of(unit.world_size, own)
    for row, wanted, rank in zip(rows, fresh, ranks, strict=True):
        for start, in_state, _, count in unit.tiles.table.tolist():
            at = start if kind == "symbols" else in_state
            if not has_own or rank != own:
                compare(row[at : at + count], wanted[at : at + count], f"the reference's row of rank {rank}")


# ---- damage


def edit(rank: int, change: Change) -> Damaging:
    """Changes the bytes of one rank's payload."""

    def damage(payloads: Payloads) -> Payloads:
        data = padded_rows(payloads.data)
        change(data[rank])
        return replace(payloads, data=data)

    return damage


def cut(num_bytes: int) -> Damaging:
    """All payloads are shorter."""
    return lambda payloads: replace(payloads, data=padded_rows(payloads.data[:, :-num_bytes]))


def cut_to(num_bytes: int) -> Damaging:
    """All payloads end there."""
    return lambda payloads: replace(payloads, data=padded_rows(payloads.data[:, :num_bytes]))


def padded_rows(rows: torch.Tensor) -> torch.Tensor:
    """A copy of the rows, from multiples of 16 bytes on."""
    padded = torch.zeros(len(rows), -(-rows.shape[1] // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8)
    padded[:, : rows.shape[1]] = rows
    return padded[:, : rows.shape[1]]


def entry(payload: torch.Tensor, number: int) -> torch.Tensor:
    """A table entry, int64 [1], to be written to."""
    return payload[HEAD_BYTES + 8 * number :][:8].view(torch.int64)


def sections_in(payload: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The unit's sections, to be written to."""
    found, end = [], layout.sections_at
    for number in range(layout.num_sections):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = int(entry(payload, number)) & (1 << 56) - 1
        found.append(payload[start:end])
    return found[layout.first : -1]


class Damages:
    """What may happen to the payload of a rank, by name. It has a unit of several tiles (or groups of blocks), in all of which
    something changed. `noticed`: what must be; the others may only lead to other values."""

    def __init__(self, unit: Unit, kind: str, rank: int, first: int = 1) -> None:
        self.rank, self.layout = rank, layout_of(unit, kind, first)
        self._num_nibble_bytes = symbol_plane_bytes(unit)[2]
        self.noticed: dict[str, Damaging] = {}
        self.others: dict[str, Damaging] = {}
        self._of_the_table()
        self._of_offsets()
        if kind == "symbols":
            self._of_symbols()
        else:
            self._of_bits()
        self._of_everything()

    def _add(self, name: str, change: Change, is_noticed: bool = True) -> None:
        (self.noticed if is_noticed else self.others)[name] = edit(self.rank, change)

    def _in_section(self, number: int, change: Change) -> Change:
        return lambda payload: change(sections_in(payload, self.layout)[number])

    def _of_the_table(self) -> None:
        first, count = self.layout.first, NUM_SECTIONS[self.layout.kind]
        far = TILES << 56 | (1 << 56) - 1
        for k in range(first, first + count):
            self._add(f"section {k} ends a byte later", lambda payload, k=k: entry(payload, k).add_(1))
            self._add(f"section {k} ends 16 bytes earlier", lambda payload, k=k: entry(payload, k).sub_(16))
            self._add(f"section {k} ends at 0", lambda payload, k=k: entry(payload, k).fill_(TILES << 56))
            self._add(f"section {k} ends behind", lambda payload, k=k: entry(payload, k).add_(1 << 20))
            self._add(f"section {k} ends far behind", lambda payload, k=k: entry(payload, k).fill_(far))
            self._add(f"section {k} is coded", lambda payload, k=k: entry(payload, k).bitwise_xor_(1 << 56))
            self._add(f"section {k} has the top bit", lambda payload, k=k: entry(payload, k).bitwise_or_(-(1 << 63)))
        if first:
            self._add("the section before ends far behind", lambda payload: entry(payload, first - 1).fill_(far))
            self._add("the section before ends earlier", lambda payload: entry(payload, first - 1).sub_(16))
        table = slice(HEAD_BYTES, HEAD_BYTES + 8 * self.layout.num_sections)
        self._add("all sections end far behind", lambda payload: payload[table].fill_(TILES))
        self._add("all sections are far behind", lambda payload: payload[table].view(torch.int64).add_(1 << 40))
        self._add(
            "all sections are empty",
            lambda payload: payload[table].view(torch.int64).fill_(TILES << 56),
            self.layout.kind == "symbols",
        )

    def _of_offsets(self) -> None:
        kind = self.layout.kind
        section, columns = {"blocks": (1, 1), "symbols": (0, 1)}.get(kind, (0, 3))

        def at(row: int, column: int, change: Change) -> Change:
            return self._in_section(
                section, lambda raw: change(raw.view(torch.int32).view(-1, columns)[row, column : column + 1])
            )

        for column in range(columns):
            for row, where in ((0, "first"), (1, "second"), (-1, "last")):
                self._add(f"{where} offset {column} is one more", at(row, column, lambda number: number.add_(1)))
                self._add(f"{where} offset {column} is the largest", at(row, column, lambda number: number.fill_(-1)))
            is_wrong = (kind, column) != ("exponents", 2)  # of literals, which they do not have
            self._add(f"second offset {column} is 0", at(1, column, lambda number: number.fill_(0)), is_wrong)
        self._add(
            "all offsets are 2**30 more", self._in_section(section, lambda raw: raw.view(torch.int32).add_(1 << 30))
        )
        self._add("all offsets are the largest", self._in_section(section, lambda raw: raw.fill_(255)))
        self._add("all offsets are 0", self._in_section(section, lambda raw: raw.fill_(0)))

    def _of_bits(self) -> None:
        kind = self.layout.kind
        bits = 0 if kind == "blocks" else 1
        self._add("a bit more is set", self._in_section(bits, set_lowest_clear_bit))
        self._add("bits are cleared", self._in_section(bits, lambda raw: raw.bitwise_and_(raw - 1)))
        self._add("all bits are set", self._in_section(bits, lambda raw: raw.fill_(255)))
        self._add("no bit is set", self._in_section(bits, lambda raw: raw.fill_(0)))
        if kind != "blocks":
            self._add("a byte of level 2 has all bits", self._in_section(2, lambda raw: raw[:1].fill_(255)))
            self._add("level 2 is 0", self._in_section(2, lambda raw: raw.fill_(0)))
        if kind == "values":
            self._add("all moves are escapes", self._in_section(3, lambda raw: raw.fill_(255)))
            self._add("no move is an escape", self._in_section(3, lambda raw: raw.fill_(1)))
            self._add("literals are others", self._in_section(4, lambda raw: raw.bitwise_xor_(255)), False)

    def _of_symbols(self) -> None:
        end = self.layout.sections_at
        nibbles = slice(end - self._num_nibble_bytes, end)

        def in_nibbles(change: Change) -> Change:
            return lambda payload: change(payload[nibbles])

        self._add("a nibble more is far", in_nibbles(set_lowest_clear_nibble))
        self._add("no nibble is far", in_nibbles(lambda raw: raw.bitwise_and_(0x77)))
        self._add("all nibbles are far", in_nibbles(lambda raw: raw.fill_(255)))
        self._add("all nibbles are 0", in_nibbles(lambda raw: raw.fill_(0)))
        self._add("tops are others", self._in_section(1, lambda raw: raw.bitwise_xor_(255)), False)
        self._add("tops are 0", self._in_section(1, lambda raw: raw.fill_(0)), False)
        self._add("escapes are others", self._in_section(2, lambda raw: raw.bitwise_xor_(255)), False)

    def _of_everything(self) -> None:
        layout = self.layout
        for seed in range(3):
            self._add(f"noise {seed}", lambda payload, seed=seed: noise(payload[layout.arena_at :], seed), False)
            self._add(f"all is noise {seed}", lambda payload, seed=seed: noise(payload[HEAD_BYTES:], seed), False)
            self._add(f"flipped bits {seed}", lambda payload, seed=seed: flip_bits(payload[HEAD_BYTES:], seed), False)
        for num_bytes in (1, 8, 40):
            self.others[f"{num_bytes} bytes are missing"] = cut(num_bytes)
        self.noticed["nearly all is missing"] = cut_to(layout.arena_at + 20)
        self.others["a row is not ok"] = lambda payloads: replace(
            payloads, row_ok=torch.where(torch.arange(len(payloads.row_ok)) == self.rank, 0, payloads.row_ok)
        )


def set_lowest_clear_bit(section: torch.Tensor) -> None:
    """In the first byte that has one."""
    place = int((section != 255).nonzero()[0])
    section[place] |= ~section[place] & (section[place] + 1)


def set_lowest_clear_nibble(section: torch.Tensor) -> None:
    """In the first byte whose lower half is not `FAR`."""
    place = int((section % 16 != FAR).nonzero()[0])
    section[place] |= FAR


def noise(section: torch.Tensor, seed: int) -> None:
    generator = np.random.default_rng(seed)
    section.copy_(torch.from_numpy(generator.integers(0, 256, len(section), np.uint8)))


def flip_bits(section: torch.Tensor, seed: int) -> None:
    """About one of 2000."""
    generator = np.random.default_rng([seed, 1])
    for place in generator.integers(0, 8 * len(section), 1 + len(section) // 250).tolist():
        section[place // 8] ^= 1 << place % 8


# ---- planes


def split_case(unit: Unit, wanted: str = "low top exponents", alignment: str = "16") -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, fmt, tiles = Buffers(executor, alignment), unit.fmt, unit.tiles
        sizes = {
            "low": tiles.num_plane_values * fmt.low_bytes,
            "top": packed_bytes(tiles.num_plane_values, fmt.top_bits),
            "exponents": tiles.num_state_values,
        }
        names = [name for name in sizes if name in wanted and sizes[name]]
        rooms = {name: buffers.room(sizes[name]) for name in names}
        values = buffers.put(unit.fresh[0])
        cuda.split_tiles(values, buffers.tiles(tiles), fmt, *map(rooms.get, sizes))

        def split_into(name: str) -> Callable[[torch.Tensor], None]:
            def fill(flat: torch.Tensor) -> None:
                others = {one: torch.zeros(sizes[one], dtype=torch.uint8) for one in names} | {name: flat}
                expected.split_tiles(unit.fresh[0], tiles, fmt, *map(others.get, sizes))

            return fill

        for name, room in rooms.items():
            buffers.expect_filled(room, split_into(name), name)

    return run


def split_rows_case(unit: Unit, own: int, alignment: str = "16", gap: int = 5) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, num_peers = Buffers(executor, alignment), len(peers_of(unit.world_size, own))
        rows, count = torch.stack(unit.fresh), unit.tiles.num_state_values
        there = as_rows(buffers.put(rows_in(unit.num_values, gap, rows)), unit.world_size, unit.num_values, gap)
        room = buffers.room(num_peers * (count + gap) - gap)
        tiles = buffers.tiles(unit.tiles)
        cuda.split_rows(there, own, tiles, unit.fmt, as_rows(room, num_peers, count, gap))
        buffers.expect_filled(
            room,
            lambda flat: expected.split_rows(rows, own, unit.tiles, unit.fmt, as_rows(flat, num_peers, count, gap)),
            "exponents",
        )

    return run


def merge_case(
    unit: Unit, own: int, alignment: str = "16", gap: int = 5, fixed_at: int = HEAD_BYTES, not_ok: int | None = None
) -> Callable[[Executor], None]:
    """Planes that the reference split, a payload each; and the values that come out."""

    def run(executor: Executor) -> None:
        buffers, fmt, tiles = Buffers(executor, alignment), unit.fmt, unit.tiles
        low_bytes, top_bytes = (
            tiles.num_plane_values * fmt.low_bytes,
            packed_bytes(tiles.num_plane_values, fmt.top_bits),
        )
        peers, world_size = peers_of(unit.world_size, own), unit.world_size
        data = torch.full((world_size, fixed_at + low_bytes + top_bytes), 0x77, dtype=torch.uint8)
        exponents = torch.zeros(world_size, tiles.num_state_values, dtype=torch.uint8)
        for payload, row, fresh in zip(data, exponents, unit.fresh, strict=True):
            low, top = payload[fixed_at:][:low_bytes], payload[fixed_at + low_bytes :]
            expected.split_tiles(fresh, tiles, fmt, low, top if fmt.top_bits else None, row)
        row_ok = torch.tensor([rank != not_ok for rank in range(world_size)], dtype=torch.int32)
        payloads = Payloads(padded_rows(data), own, row_ok, HEAD_BYTES, 0, 0)
        state = rows_in(tiles.num_state_values, gap, exponents[peers])
        there = as_rows(buffers.put(state), len(peers), tiles.num_state_values, gap)
        num_values = world_size * (unit.num_values + gap) - gap
        out = buffers.room(num_values, fmt.dtype)
        cuda.merge_rows(there, buffers.payloads(payloads), fixed_at, buffers.tiles(tiles), fmt,
                        as_rows(out, world_size, unit.num_values, gap))  # fmt: skip

        def fill(flat: torch.Tensor) -> None:
            rows = as_rows(flat, world_size, unit.num_values, gap)
            expected.merge_rows(exponents[peers], payloads, fixed_at, tiles, fmt, rows)
            for rank in peers:
                for start, count in unit.runs:
                    if rank != not_ok:
                        compare(
                            rows[rank, start : start + count], unit.fresh[rank][start : start + count], "the reference"
                        )

        buffers.expect_filled(out, fill, "out")

    return run


def copy_case(unit: Unit, own: int, alignment: str = "16", gap: int = 5) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, world_size, count = Buffers(executor, alignment), unit.world_size, unit.tiles.num_state_values
        rows = torch.stack([unit.state(fresh) for fresh in unit.fresh])
        there = as_rows(buffers.put(rows_in(count, gap, rows)), world_size, count, gap)
        out = buffers.room(world_size * (unit.num_values + gap) - gap, unit.fmt.dtype)
        cuda.copy_out(there, own, buffers.tiles(unit.tiles), as_rows(out, world_size, unit.num_values, gap))
        buffers.expect_filled(
            out,
            lambda flat: expected.copy_out(rows, own, unit.tiles, as_rows(flat, world_size, unit.num_values, gap)),
            "out",
        )

    return run


# ---- blocks


def hash_case(unit: Unit, with_last: bool = True, alignment: str = "16") -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, tiles, fmt = Buffers(executor, alignment), unit.tiles, unit.fmt
        last = expected.hash_blocks(unit.last[0], tiles, fmt, None)[0] if with_last else None
        if last is not None and len(last) > 1:
            last[0, 0], last[1, 1] = -1, -1  # one half differs is enough
        there = None if last is None else buffers.put(last)
        hashes, changed = cuda.hash_blocks(buffers.put(unit.fresh[0]), buffers.tiles(tiles), fmt, there)
        wanted = expected.hash_blocks(unit.fresh[0], tiles, fmt, last)
        buffers.expect(hashes, wanted[0], "hashes")
        buffers.expect(changed, wanted[1], "changed")
        sizes, ranks = cuda.block_sizes(changed, tiles)
        for found, right, what in zip(
            (sizes, ranks), expected.block_sizes(wanted[1], tiles), ("sizes", "ranks"), strict=True
        ):
            buffers.expect(found, right, what)

    return run


# ---- checksums and heads


def mixed(word: int, j: int) -> int:
    """What word number j adds to a checksum's sum, in plain integers."""
    mask = (1 << 64) - 1
    word ^= (j + 1) * 0x9E3779B97F4A7C15 & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


def checksum_case(
    num_rows: int,
    num_values: int,
    dtype: torch.dtype = torch.uint8,
    gap: int = 0,
    alignment: str = "16",
    most_ctas: int | None = None,
    zeros: bool = False,
) -> Callable[[Executor], None]:
    """most_ctas: in place of cuda.MOST_CHECKSUM_CTAS, so that a CTA has several turns. zeros: of the first half."""

    def run(executor: Executor) -> None:
        buffers = Buffers(executor, alignment)
        raw = np.random.default_rng(num_values).integers(0, 256, num_rows * num_values * dtype.itemsize, np.uint8)
        rows = torch.from_numpy(raw).view(dtype).view(num_rows, num_values)
        if zeros:
            words_of(rows)[:, : num_values // 2 // 8 * 8] = 0
        there = as_rows(buffers.put(rows_in(num_values, gap, rows)), num_rows, num_values, gap)
        before = cuda.MOST_CHECKSUM_CTAS
        cuda.MOST_CHECKSUM_CTAS = most_ctas or before
        try:
            buffers.expect(cuda.checksum(there), expected.checksum(rows), "checksums")
        finally:
            cuda.MOST_CHECKSUM_CTAS = before

    return run


def write_head_case(
    name: int, own: int, promised: int, payload_bytes: int, on_device: bool, alignment: str = "16"
) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers = Buffers(executor, alignment)
        one, other, num_bytes = (torch.tensor([number], dtype=torch.int64) for number in (own, promised, payload_bytes))
        payload = buffers.room(HEAD_BYTES + 5)
        known = buffers.put(num_bytes) if on_device else payload_bytes
        cuda.write_head(payload, name, buffers.put(one), buffers.put(other), known)
        buffers.expect_filled(payload, lambda flat: expected.write_head(flat, name, one, other, payload_bytes), "head")

    return run


NAME = 0xF123456789ABCDEF


def some_heads(num_ranks: int) -> torch.Tensor:
    """uint8 [num_ranks, 32]: right ones, and in turn one with each kind of fault."""
    heads = np.zeros(num_ranks, HEAD)
    for rank, head in enumerate(heads):
        head["name"], head["checksum"], head["payload_bytes"] = NAME, (rank + 1) * 0x9E3779B97F4A7C15 % 2**64, rank
        head["magic"], head["wire_version"], head["alignment"] = int.from_bytes(b"CIER", "little"), 5, 16
    faults: list[tuple[str, int]] = [
        ("name", BROKEN_PROMISE), ("name", FAILED), ("name", NAME ^ 1), ("name", NAME ^ 1 << 63), ("magic", 0),
        ("wire_version", 4), ("alignment", 1), ("magic", int.from_bytes(b"CIES", "little")), ("name", 2),
    ]  # fmt: skip
    for rank, (field, value) in zip(range(1, num_ranks, 2), faults * num_ranks, strict=False):
        heads[rank][field] = value
    return torch.from_numpy(heads.view(np.uint8).reshape(num_ranks, HEAD_BYTES).copy())


def check_heads_case(
    heads: torch.Tensor, own: int, decoded: str = "", alignment: str = "16", gap: int = 7, name: int = NAME
) -> Callable[[Executor], None]:
    """decoded: "" for none, "right", or "wrong" for every third and the own one."""

    def run(executor: Executor) -> None:
        buffers, num_ranks = Buffers(executor, alignment), len(heads)
        checksums = heads[:, 8:16].clone().view(torch.int64).view(-1)
        if decoded == "wrong":
            checksums[::3] ^= 1 << 62
            if own < num_ranks:
                checksums[own] = 5
        there = as_rows(buffers.put(rows_in(HEAD_BYTES, gap, heads)), num_ranks, HEAD_BYTES, gap)
        flags = [torch.full((1,), 64, dtype=torch.int32) for _ in range(2)]
        damage = buffers.put(flags[0])
        found = cuda.check_heads(there, own, name, damage, buffers.put(checksums) if decoded else None)
        row_ok = expected.check_heads(heads, own, name, flags[1], checksums if decoded else None)
        buffers.expect(found, row_ok, "row_ok")
        buffers.expect(damage, flags[1], "damage")

    return run


# ---- all of them

RAGGED: Runs = ((0, 2047), (2050, 17), (2100, 2049), (4200, 1))
SMALL: Runs = ((1, 261), (270, 7), (280, 64), (350, 9))
TAILS = {"16": ((0, 1), (8, 2), (16, 3), (24, 4)), "odd": ((1, 5), (11, 6), (21, 7), (31, 8))}
KINDS = ("values", "exponents")


def every_size() -> Runs:
    """A run of each of SIZES, some with a gap before."""
    runs, end = [], 0
    for number, size in enumerate(SIZES):
        runs.append((end + number % 4, size))
        end = sum(runs[-1])
    return tuple(runs)


def whole(size: int) -> Runs:
    return ((0, size),)


def change_cases() -> Iterator[Case]:
    for fmt in FLOATS:
        for kind in KINDS:
            yield from sender_cases(fmt, kind)
        yield from receiver_cases(fmt, "values", f"apply_values_{fmt.name}")
    for fmt in FLOATS:
        yield from receiver_cases(fmt, "exponents", "apply_exponents")


def sender_cases(fmt: FloatFormat, kind: str) -> Iterator[Case]:
    scan, pack, name = (f"scan_{kind}_{fmt.name}",), (f"pack_{kind}_{fmt.name}",), f"{kind}-{fmt.name}"

    def both(label: str, unit: Unit, alignment: str = "16", quick: bool = False) -> Iterator[Case]:
        yield Case(f"scan-{name}-{label}", scan, scan_case(unit, kind, alignment), quick)
        yield Case(f"pack-{name}-{label}", pack, pack_case(unit, kind, alignment), quick)

    for number, alignment in enumerate(ALIGNMENTS):
        share, escape = (0.3, 1.0, 0.02, 0.6)[number], (255, 15, 1, 127)[number]
        yield from both(f"sizes-{alignment}", Unit(fmt, every_size(), share, escape), alignment)
        unit = Unit(fmt, SMALL, (0.5, 1.0, 0.4, 0.1)[number], (255, 15, 7, 0)[number], state_is_flat=number % 2 > 0)
        yield from both(f"small-{alignment}", unit, alignment, quick=True)
    for alignment, runs in TAILS.items():
        shards = (nonzero_values(fmt, 40),)
        yield from both(f"tails-{alignment}", Unit(fmt, runs, 1.0, 3, shards=shards), alignment, quick=True)
    yield from both("ragged", Unit(fmt, RAGGED, 0.4, 15), quick=True)
    yield from both("in-blocks", Unit(fmt, RAGGED, 0.1, block_size=512), "mixed")
    for share in (0.0, 0.002):
        yield from both(f"share-{share}", Unit(fmt, RAGGED, share), quick=share == 0.0)
    if fmt.item_bytes == 2:
        unit = Unit(fmt, whole(1 << 16), shards=(changed_values(all_values(fmt), fmt, 0.9, 255),))
        yield from both("all", unit)
    unit = Unit(fmt, SMALL, 0.5, 15)
    for missing in (1, 300):
        yield Case(f"pack-{name}-{missing}-missing", pack, pack_case(unit, kind, missing=missing), quick=missing == 1)
    yield Case(f"pack-{name}-first", pack, pack_case(unit, kind, first=0), quick=True)
    yield Case(f"pack-{name}-from-0", pack, pack_case(unit, kind, arena_at=0))
    yield Case(f"pack-{name}-first-from-0", pack, pack_case(unit, kind, first=0, arena_at=0), quick=True)


def receiver_cases(fmt: FloatFormat, kind: str, kernel: str) -> Iterator[Case]:
    name = f"{kernel}-{fmt.name}" if kind == "exponents" else kernel

    def case(label: str, run: Callable[[Executor], None], quick: bool = False) -> Case:
        return Case(f"{name}-{label}", (kernel,), run, quick)

    for number, alignment in enumerate(ALIGNMENTS):
        share, escape = (0.3, 1.0, 0.02, 0.6)[number], (255, 15, 1, 127)[number]
        unit = Unit(fmt, every_size(), share, escape, state_is_flat=number % 2 > 0)
        yield case(f"sizes-{alignment}", receive_case(unit, kind, 0, alignment))
        unit = Unit(fmt, SMALL, (0.5, 1.0, 0.4, 0.1)[number], (255, 15, 7, 0)[number], 3, state_is_flat=number % 2 > 0)
        yield case(f"small-{alignment}", receive_case(unit, kind, 1, alignment), quick=kind == "values" or fmt is BF16)
    for alignment, runs in TAILS.items():
        unit = Unit(fmt, runs, 1.0, 3, shards=(nonzero_values(fmt, 40),) * 2)
        yield case(f"tails-{alignment}", receive_case(unit, kind, 0, alignment, first=0), quick=True)
    for world_size, own in ((1, 1), (2, 1), (4, 0), (5, 4), (5, 5), (3, 1)):
        unit = Unit(fmt, RAGGED, 0.2, 15, world_size)
        yield case(f"{world_size}-ranks-{own}", receive_case(unit, kind, own), quick=(world_size, own) == (1, 1))
    yield case("in-blocks", receive_case(Unit(fmt, RAGGED, 0.1, block_size=512), kind, 0, "mixed"))
    for share in (0.0, 0.002):
        yield case(f"share-{share}", receive_case(Unit(fmt, RAGGED, share), kind, 0), quick=share == 0.0)
    if fmt.item_bytes == 2:
        fresh = changed_values(all_values(fmt), fmt, 0.9, 255)
        yield case("all", receive_case(Unit(fmt, whole(1 << 16), shards=(fresh, fresh)), kind, 0))
    if kind == "values" or fmt is BF16:
        unit = Unit(fmt, ((0, 2048), (2050, 37)), 0.3, world_size=3)
        yield from damaged_cases(unit, kind, kernel)


# What makes a receiver leave, in each of the ways that there are.
QUICK_DAMAGE = {
    "section 1 ends far behind", "section 2 ends 16 bytes earlier", "section 2 is coded", "second offset 0 is one more",
    "second offset 1 is one more", "second offset 2 is one more", "last offset 0 is one more", "last offset 1 is one more",
    "first offset 0 is one more", "all sections are empty", "a bit more is set", "bits are cleared",
    "a byte of level 2 has all bits", "all moves are escapes", "a row is not ok", "nearly all is missing",
    "second offset 0 is the largest", "section 2 ends a byte later", "section 3 ends a byte later", "a nibble more is far",
}  # fmt: skip


def damaged_cases(unit: Unit, kind: str, kernel: str) -> Iterator[Case]:
    for first in (0, 1):
        damages = Damages(unit, kind, 2, first)
        for name, damage in (damages.noticed | damages.others).items():
            must_tell = name in damages.noticed
            run = receive_case(unit, kind, 0, first=first, damage=damage, must_tell=must_tell)
            is_quick = first == 1 and name in QUICK_DAMAGE
            if is_quick or (unit.fmt is BF16 and (first == 1 or "section" in name)):
                yield Case(f"{kernel}-damaged-{first}-{name.replace(' ', '-')}", (kernel,), run, is_quick)


def plane_cases() -> Iterator[Case]:
    for fmt in FLOATS:
        split, merge = (f"split_{fmt.name}",), (f"merge_rows_{fmt.name}",)
        for number, alignment in enumerate(ALIGNMENTS):
            unit, name = Unit(fmt, every_size(), block_size=64 * (number % 2)), f"{fmt.name}-sizes-{alignment}"
            yield Case(f"split-{name}", split, split_case(unit, alignment=alignment))
            yield Case(f"merge-{name}", merge, merge_case(unit, 1, alignment, fixed_at=HEAD_BYTES + number))
            unit, name = Unit(fmt, SMALL, world_size=3, block_size=8 * number), f"{fmt.name}-small-{alignment}"
            yield Case(f"split-{name}", split, split_case(unit, alignment=alignment), quick=True)
            yield Case(f"split-rows-{name}", split, split_rows_case(unit, number, alignment), quick=True)
            fixed_at = HEAD_BYTES + (0, 8, 0, 3)[number]
            yield Case(f"merge-{name}", merge, merge_case(unit, number, alignment, fixed_at=fixed_at), quick=True)
        for alignment, runs in TAILS.items():
            unit, name = Unit(fmt, runs, shards=(nonzero_values(fmt, 40),) * 2), f"{fmt.name}-tails-{alignment}"
            yield Case(f"split-{name}", split, split_case(unit, alignment=alignment), quick=True)
            yield Case(f"merge-{name}", merge, merge_case(unit, 0, alignment), quick=True)
        for block_size in (512, 4096):
            unit, name = Unit(fmt, RAGGED, block_size=block_size, world_size=4), f"{fmt.name}-blocks-{block_size}"
            yield Case(f"split-{name}", split, split_case(unit), quick=block_size == 4096)
            yield Case(f"split-rows-{name}", split, split_rows_case(unit, 2))
            yield Case(f"merge-{name}", merge, merge_case(unit, 4, not_ok=1), quick=block_size == 512)
        for wanted in ("exponents", "low top", "low"):
            name = f"split-{fmt.name}-only-{wanted.replace(' ', '-')}"
            yield Case(name, split, split_case(Unit(fmt, SMALL), wanted), quick=True)
        if fmt.item_bytes == 2:
            unit = Unit(fmt, whole(1 << 16), shards=(all_values(fmt),) * 2)
            yield Case(f"split-{fmt.name}-all", split, split_case(unit))
            yield Case(f"merge-{fmt.name}-all", merge, merge_case(unit, 0))
    for fmt, kernel in ((BF16, "copy_out_16"), (FP32, "copy_out_32")):
        for number, alignment in enumerate(ALIGNMENTS):
            unit = Unit(fmt, every_size(), block_size=64 * (number % 2))
            yield Case(f"copy-{fmt.name}-sizes-{alignment}", (kernel,), copy_case(unit, number % 3, alignment))
            unit = Unit(fmt, SMALL, world_size=3)
            run = copy_case(unit, number, alignment, gap=number)
            yield Case(f"copy-{fmt.name}-small-{alignment}", (kernel,), run, quick=True)
        for alignment, runs in TAILS.items():
            unit = Unit(fmt, runs, shards=(nonzero_values(fmt, 40),) * 2)
            yield Case(f"copy-{fmt.name}-tails-{alignment}", (kernel,), copy_case(unit, 0, alignment), quick=True)
        unit = Unit(fmt, RAGGED, block_size=512, world_size=5)
        yield Case(f"copy-{fmt.name}-blocks", (kernel,), copy_case(unit, 3))


def block_runs(block_size: int) -> Runs:
    """Runs of lengths around a block, and of some more blocks."""
    runs, end = [], 1
    for size in (1, 9, block_size - 1, block_size, block_size + 5, 9 * block_size, 9 * block_size + 23):
        runs.append((end, size))
        end += size + 2
    return tuple(runs)


def block_cases() -> Iterator[Case]:
    for fmt in FLOATS:
        hashes, pack = (f"hash_blocks_{fmt.name}",), (f"pack_blocks_{fmt.name}",)
        for block_size in (8, 64, 264, 512, 1024):
            for alignment in ("16", "mixed", "odd"):
                unit = Unit(fmt, block_runs(block_size), 0.003, block_size=block_size)
                name = f"{fmt.name}-{block_size}-{alignment}"
                yield Case(f"hash-{name}", hashes, hash_case(unit, alignment=alignment))
                yield Case(f"pack-blocks-{name}", pack, pack_case(unit, "blocks", alignment))
        for number, alignment in enumerate(ALIGNMENTS):
            unit = Unit(fmt, SMALL, 0.02, block_size=(512, 64, 8, 16)[number])
            name = f"{fmt.name}-small-{alignment}"
            yield Case(f"hash-{name}", hashes, hash_case(unit, number != 1, alignment), quick=True)
            yield Case(f"pack-blocks-{name}", pack, pack_case(unit, "blocks", alignment), quick=True)
        for alignment, runs in TAILS.items():
            unit = Unit(fmt, runs, block_size=8, shards=(nonzero_values(fmt, 40),))
            yield Case(f"hash-{fmt.name}-tails-{alignment}", hashes, hash_case(unit, alignment=alignment), quick=True)
            yield Case(
                f"pack-blocks-{fmt.name}-tails-{alignment}", pack, pack_case(unit, "blocks", alignment), quick=True
            )
        for num_blocks in (63, 64, 65, 130):
            unit = Unit(fmt, ((0, 24), (30, 8 * (num_blocks - 3) - 5)), 0.1, block_size=8)
            name, is_quick = f"{fmt.name}-{num_blocks}-blocks", num_blocks == 130
            yield Case(f"hash-{name}", hashes, hash_case(unit), quick=is_quick)
            yield Case(f"pack-blocks-{name}", pack, pack_case(unit, "blocks"), quick=is_quick)
            yield Case(
                f"pack-blocks-{name}-first", pack, pack_case(unit, "blocks", first=0, arena_at=0), quick=is_quick
            )
        for share in (0.0, 1.0):
            unit = Unit(fmt, SMALL, share, block_size=64)
            yield Case(f"pack-blocks-{fmt.name}-share-{share}", pack, pack_case(unit, "blocks"), quick=True)
        run = pack_case(Unit(fmt, SMALL, 0.1, block_size=64), "blocks", missing=1)
        yield Case(f"pack-blocks-{fmt.name}-1-missing", pack, run, quick=True)
        if fmt.item_bytes == 2:
            unit = Unit(fmt, whole(1 << 16), block_size=512, shards=(all_values(fmt),))
            yield Case(f"hash-{fmt.name}-all", hashes, hash_case(unit))
            yield Case(f"pack-blocks-{fmt.name}-all", pack, pack_case(unit, "blocks"))
        for block_size in (8, 64, 264, 512, 1024):
            unit = Unit(fmt, block_runs(block_size), 0.003, block_size=block_size)
            for alignment in ("16", "mixed", "odd"):
                name = f"put-{fmt.name}-{block_size}-{alignment}"
                yield Case(name, ("put_blocks",), receive_case(unit, "blocks", 0, alignment, gap=block_size % 100))
    yield from put_cases()


def put_cases() -> Iterator[Case]:
    for number, alignment in enumerate(ALIGNMENTS):
        unit = Unit(BF16, SMALL, 0.02, 255, 3, (512, 64, 8, 16)[number])
        yield Case(
            f"put-small-{alignment}", ("put_blocks",), receive_case(unit, "blocks", number, alignment), quick=True
        )
    for num_blocks in (31, 32, 33, 63, 64, 65, 95, 96, 97, 130):
        for share in (0.1, 1.0):
            unit = Unit(BF16, ((0, 24), (30, 8 * (num_blocks - 3) - 5)), share, block_size=8)
            run = receive_case(unit, "blocks", 1, first=num_blocks % 2)
            yield Case(f"put-{num_blocks}-blocks-{share}", ("put_blocks",), run, quick=num_blocks in (33, 130))
    for share in (0.0, 1.0):
        run = receive_case(Unit(BF16, SMALL, share, block_size=64), "blocks", 0)
        yield Case(f"put-share-{share}", ("put_blocks",), run, quick=True)
    for world_size, own in ((1, 1), (2, 1), (4, 0), (5, 4), (5, 5), (3, 1)):
        unit = Unit(BF16, SMALL, 0.05, world_size=world_size, block_size=64)
        yield Case(f"put-{world_size}-ranks-{own}", ("put_blocks",), receive_case(unit, "blocks", own))
    unit = Unit(BF16, ((0, 1200), (1300, 37)), 0.1, world_size=3, block_size=16)  # two groups
    yield from damaged_cases(unit, "blocks", "put_blocks")


def symbol_cases() -> Iterator[Case]:
    for fmt in FLOATS:
        yield from symbol_cases_of(fmt)


def symbol_cases_of(fmt: FloatFormat) -> Iterator[Case]:
    kernels = tuple(
        (f"{kernel}_{fmt.name}",) for kernel in ("scan_symbols", "pack_symbols", "put_nibbles", "merge_symbols")
    )
    scan, pack, put, merge = kernels

    def every(label: str, unit: Unit, own: int, alignment: str = "16", quick: bool = False) -> Iterator[Case]:
        name = f"{fmt.name}-{label}"
        yield Case(f"scan-symbols-{name}", scan, scan_symbols_case(unit, alignment), quick)
        yield Case(f"pack-symbols-{name}", pack, pack_case(unit, "symbols", alignment), quick)
        yield Case(f"put-nibbles-{name}", put, nibbles_case(unit, alignment), quick)
        yield Case(f"merge-symbols-{name}", merge, receive_case(unit, "symbols", own, alignment), quick)

    def some(runs: Runs, world_size: int, **options: Any) -> Unit:
        end = sum(runs[-1])
        shards = tuple(symbol_values(fmt, end, rank, **options) for rank in range(world_size))
        return Unit(fmt, runs, world_size=world_size, shards=shards)

    for number, alignment in enumerate(ALIGNMENTS):
        yield from every(f"sizes-{alignment}", some(every_size(), 2), number % 2, alignment)
        yield from every(f"small-{alignment}", some(SMALL, 3), number, alignment, quick=True)
    for alignment, runs in TAILS.items():
        unit = Unit(fmt, runs, shards=(nonzero_values(fmt, 40),) * 2)
        yield from every(f"tails-{alignment}", unit, 0, alignment, quick=True)
    near = symbol_values(fmt, CTA_VALUES, 5, FAR - 1)
    mixed = torch.cat([near, symbol_values(fmt, 2200)])
    yield from every("some-tiles-without-escapes", Unit(fmt, RAGGED, shards=(mixed,) * 2), 1, quick=True)
    yield from every("no-escapes", some(SMALL, 2, most_below=FAR - 1), 2, quick=True)
    yield from every("any-values", Unit(fmt, RAGGED, world_size=4), 4)
    yield from every("zeros", Unit(fmt, SMALL, shards=(torch.zeros(400, dtype=fmt.dtype),) * 2), 0)
    yield from every("all-escapes-but-one", Unit(fmt, whole(2100), shards=(lonely(fmt, 2100),) * 2), 0)
    if fmt.item_bytes == 2:
        yield from every("all", Unit(fmt, whole(1 << 16), shards=(all_values(fmt),) * 2), 0)
    unit = some(SMALL, 2)
    for missing in (1, 300):
        run = pack_case(unit, "symbols", missing=missing)
        yield Case(f"pack-symbols-{fmt.name}-{missing}-missing", pack, run, quick=missing == 1)
    for first, arena_at in ((0, None), (1, 0), (0, 0)):
        run = pack_case(unit, "symbols", first=first, arena_at=arena_at)
        yield Case(f"pack-symbols-{fmt.name}-{first}-from-{arena_at}", pack, run, quick=first == 0)
    run = receive_case(unit, "symbols", 0, first=0)
    yield Case(f"merge-symbols-{fmt.name}-first", merge, run, quick=True)
    for world_size, own in ((1, 1), (2, 1), (4, 0), (5, 4), (5, 5), (3, 1)):
        run = receive_case(some(SMALL, world_size), "symbols", own)
        yield Case(f"merge-symbols-{fmt.name}-{world_size}-ranks-{own}", merge, run, quick=world_size == 1)
    yield from damaged_cases(some(((0, 2048), (2050, 37)), 3), "symbols", *merge)


def lonely(fmt: FloatFormat, num_values: int) -> torch.Tensor:
    """One large number, the others 0."""
    values = torch.zeros(num_values, dtype=fmt.dtype)
    values[num_values // 3] = 2.0
    return values


def head_cases() -> Iterator[Case]:
    both = ("checksum", "finish_checksums")
    for num_bytes in (0, 1, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049, 5000):
        for alignment in ("16", "odd"):
            yield Case(f"checksum-{num_bytes}-{alignment}", both, checksum_case(1, num_bytes, alignment=alignment))
    for rows, num_bytes, gap, alignment, ctas in (
        (3, 4099, 8, "16", 1), (3, 4096, 5, "odd", 2), (2, 20003, 13, "mixed", 3), (4, 16, 0, "16", None),
        (300, 5, 2, "odd", None), (2, 12301, 3, "8", 1), (1, 20480, 0, "16", 2), (1000, 9, 0, "16", None),
    ):  # fmt: skip
        run = checksum_case(rows, num_bytes, gap=gap, alignment=alignment, most_ctas=ctas)
        yield Case(f"checksum-{rows}-rows-{num_bytes}", both, run, quick=rows != 1000)
    for alignment, tails in (("16", (1, 2, 3, 4)), ("odd", (5, 6, 7, 8))):
        runs = [checksum_case(2, 2048 * 3 + tail, gap=4, alignment=alignment, most_ctas=1) for tail in tails]
        yield Case(f"checksum-tails-{alignment}", both, one_by_one(runs), quick=True)
    yield Case("checksum-zeros", both, checksum_case(2, 4100, gap=3, most_ctas=2, zeros=True), quick=True)
    for fmt in FLOATS:
        yield Case(f"checksum-{fmt.name}", both, checksum_case(2, 1237, fmt.dtype, 3, "mixed"))
    for number, alignment in enumerate(ALIGNMENTS):
        large = 0x1122334455667788  # no byte is 0, and no two are the same
        own, promised = ((5, 5), (-5, -6), (large, large), (3, 3 - (1 << 63)))[number]
        payload_bytes = (12345, (1 << 40) + 7, 0x0102030405060708, 32)[number]
        for on_device in (False, True):
            run = write_head_case(NAME - number, own, promised, payload_bytes, on_device, alignment)
            yield Case(f"write-head-{alignment}-{on_device}", ("write_head",), run, quick=True)
    yield Case("write-head-large-name", ("write_head",), write_head_case((1 << 64) - 1, 0, 0, 1, False))
    for number, alignment in enumerate(ALIGNMENTS):
        for decoded in ("", "right", "wrong"):
            num_ranks, own = (20, 20, 7, 13)[number], (3, 20, 0, 12)[number]
            gap = (0, 16, 5, 24)[number]
            run = check_heads_case(some_heads(num_ranks), own, decoded, alignment, gap)
            yield Case(f"check-heads-{alignment}-{decoded or 'none'}", ("check_heads",), run, quick=True)
    for num_ranks in (1, 255, 256, 257, 600):
        run = check_heads_case(some_heads(num_ranks), num_ranks - 1, "right", "odd")
        yield Case(f"check-heads-{num_ranks}", ("check_heads",), run, quick=num_ranks == 257)
    right = some_heads(1).expand(5, -1)
    yield Case("check-heads-all-right", ("check_heads",), check_heads_case(right, 2), quick=True)
    yield Case("check-heads-of-another", ("check_heads",), check_heads_case(right, 2, name=NAME + 1))


@cache
def all_cases() -> list[Case]:
    cases = [*plane_cases(), *block_cases(), *change_cases(), *symbol_cases(), *head_cases()]
    assert len({case.name for case in cases}) == len(cases)
    return cases

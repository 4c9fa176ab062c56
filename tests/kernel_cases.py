"""Cases for the CUDA kernels: buffers, launches as the codecs make them, and the results of the torch reference.

A case runs on any `Executor`: the PTX interpreter (test_kernels_ptx.py) or a device. Each has inputs of its own for one
kernel, or is a pipeline of several. Results have to have the same bits, and what a kernel should not touch stays as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.kernels import reference
from fsdp_ciera.kernels.changes import Changes, Form, Received
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes

TILE, WARP_VALUES, THREADS = 8, 256, 256
CTA_VALUES, CTA_WARPS = TILE * THREADS, THREADS // 32
FLOATS = list(FORMATS.values())
BF16, FP16, FP32 = FLOATS
EVERY: list[FloatFormat | None] = [*FLOATS, None]  # None: bytes, the exponents of exponent_delta
SIZES = [*range(18), 255, 256, 257, 263, 2040, 2047, 2048, 2049, 2056, 4096, 4301]
ALIGNMENTS = ["16", "8", "odd", "mixed"]

TAILS = {"16": (1, 2, 3, 4), "odd": (5, 6, 7, 8)}  # lengths of quick cases with short tails, by alignment

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


class Executor(Protocol):
    """Memory and launches of a device; addresses are plain integers. A buffer begins `misalignment` bytes behind a multiple
    of 256."""

    def upload(self, array: Array, misalignment: int = 0) -> int: ...

    def alloc(self, num_bytes: int, misalignment: int = 0) -> int:
        """Room that counts as never written."""
        ...

    def flag(self) -> int:
        """A 32-bit word, 0. Several threads may set it to 1 with plain stores, which is the same whoever comes first."""
        ...

    def launch(self, kernel: str, grid: tuple[int, int], *args: int) -> None:
        """With THREADS threads a CTA. An argument has its parameter's size, whatever its value."""
        ...

    def download(self, address: int, dtype: npt.DTypeLike, count: int) -> Array:
        """Fails where some byte was never written."""
        ...

    def untouched(self, address: int, num_bytes: int) -> bool:
        """Whether no kernel has written any of these bytes of an `alloc`."""
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


class Buffers:
    """Buffers of one case, all aligned to 16 or 8 bytes, to no more than their elements ("odd"), or by chance ("mixed")."""

    def __init__(self, executor: Executor, alignment: str) -> None:
        self.executor, self.alignment = executor, alignment
        self.random = random.Random(alignment)

    def misalignment(self, element_bytes: int) -> int:
        alignment = self.random.choice(["16", "8", "odd"]) if self.alignment == "mixed" else self.alignment
        odd = element_bytes * self.random.choice([1, 3, 5])
        return {"16": 0, "8": 8, "odd": odd}[alignment]

    def put(self, data: Array | torch.Tensor) -> int:
        array = words(data) if isinstance(data, torch.Tensor) else data
        return self.executor.upload(array, self.misalignment(array.itemsize))

    def room(self, dtype: npt.DTypeLike, count: int) -> int:
        element_bytes = np.dtype(dtype).itemsize
        return self.executor.alloc(count * element_bytes, self.misalignment(element_bytes))

    def expect(self, address: int, expected: Array | torch.Tensor, what: str) -> None:
        """The bits at an address."""
        array = words(expected) if isinstance(expected, torch.Tensor) else expected
        found = self.executor.download(address, array.dtype, array.size)
        wrong = np.flatnonzero(found != array.reshape(-1))
        if len(wrong):
            first = wrong[0]
            raise AssertionError(f"{what}: {len(wrong)} of {array.size} are wrong, the first is number {first}: "
                                 f"{found[first]:#x} in place of {array.reshape(-1)[first]:#x}")  # fmt: skip


# ---- values


def words(tensor: torch.Tensor) -> Array:
    """Bit patterns, unsigned; int64 stays what it is."""
    if tensor.dtype == torch.int64:
        return tensor.numpy()
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


# ---- what the reference says


@dataclass(frozen=True)
class Found:
    """Changes of a run as the kernels give and take them. `up_to`: of all CTAs up to and with each."""

    bitmap: Bytes
    moves: Bytes
    literals: Array
    num_changed: npt.NDArray[np.int64]
    num_literals: npt.NDArray[np.int64]

    @property
    def changes_up_to(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.num_changed)

    @property
    def literals_up_to(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.num_literals)


def num_ctas(num_values: int) -> int:
    """At least one, so that a launch for nothing is tried too."""
    return max(1, -(-num_values // CTA_VALUES))


def per_cta(flags: Array, at_least: int = 1) -> npt.NDArray[np.int64]:
    """How many flags, one a value, are set in each CTA."""
    ctas = max(at_least, num_ctas(len(flags)))
    padded = np.pad(flags.astype(np.int64), (0, ctas * CTA_VALUES - len(flags)))
    return padded.reshape(ctas, CTA_VALUES).sum(1, dtype=np.int64)


def found_by_reference(
    fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat | None, escape: int, ctas: int = 1
) -> Found:
    changes: Changes = reference.find_changes(fresh.clone(), last.clone(), fmt, Form(escape=escape))
    assert changes.changed is not None
    bitmap, moves = changes.changed.numpy(), changes.moves.numpy()
    flags = np.unpackbits(bitmap, bitorder="little")[: len(last)].astype(bool)
    is_literal = np.zeros(len(last), bool)
    is_literal[flags] = (moves == escape) & (fmt is not None)
    literals = words(changes.literals) if fmt else np.zeros(0, np.uint8)
    return Found(bitmap, moves, literals, per_cta(flags, ctas), per_cta(is_literal, ctas))


def applied_in_part(
    last: Array, fmt: FloatFormat | None, escape: int, flags: Array, changes_up_to: Array, literals_up_to: Array,
    moves: Array, literals: Array,
) -> tuple[Array, int]:  # fmt: skip
    """What apply makes of data that may be damaged, a tile at a time in plain Python -> (values, damage)."""
    values, damage = last.copy(), 0
    for cta, first in enumerate(range(0, len(last), CTA_VALUES)):
        stop = min(first + CTA_VALUES, len(last))
        tiles = [np.arange(start, min(start + TILE, stop)) for start in range(first, stop, TILE)]
        chosen = [tile[flags[tile]] for tile in tiles]
        place = int(changes_up_to[cta]) - sum(map(len, chosen))
        found: list[tuple[Array, Array]] = []
        for places in chosen:
            inside = place >= 0 and place + len(places) <= len(moves)
            damage |= len(places) > 0 and not inside
            found.append((places, moves[place : place + len(places)]) if inside else (places[:0], moves[:0]))
            place += len(places)
        counts = [int((symbols == escape).sum()) if fmt else 0 for _, symbols in found]
        place = int(literals_up_to[cta]) - sum(counts)
        for (places, symbols), count in zip(found, counts, strict=True):
            fresh = moved(last[places], symbols, fmt)
            if count and not 0 <= place <= len(literals) - count:
                damage = 1
            else:
                if count:
                    fresh[symbols == escape] = literals[place : place + count]
                values[places] = fresh
            place += count
    return values, int(damage)


def one_by_one(runs: Iterable[Callable[[Executor], None]]) -> Callable[[Executor], None]:
    """One case of several."""
    several = list(runs)

    def run(executor: Executor) -> None:
        for each in several:
            each(executor)

    return run


# ---- planes


def split_case(
    fmt: FloatFormat, values: torch.Tensor, alignment: str = "16", wanted: str = "exponents low top", more_ctas: int = 0
) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, count = Buffers(executor, alignment), len(values)
        sizes = {"exponents": count, "low": count * fmt.low_bytes, "top": packed_bytes(count, fmt.top_bits)}
        planes = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
        reference.split_planes(values, fmt, planes["exponents"], planes["low"], planes["top"])
        rooms = {name: buffers.room(np.uint8, size) if name in wanted else 0 for name, size in sizes.items()}
        executor.launch(
            f"split_{fmt.name}", (num_ctas(count) + more_ctas, 1), buffers.put(values), count, *rooms.values()
        )
        for name, room in rooms.items():
            if room:
                buffers.expect(room, planes[name], name)

    return run


def merge_case(
    fmt: FloatFormat, values: torch.Tensor, alignment: str = "16", rows: int = 1, gap: int = 0, more_ctas: int = 0
) -> Callable[[Executor], None]:
    """`values` [rows * n]; every row of every buffer is followed by a gap."""

    def run(executor: Executor) -> None:
        buffers, count = Buffers(executor, alignment), len(values) // rows
        exponents_stride, out_stride = count + gap, count + gap
        planes_stride = fmt.remainder_bytes(count) + gap
        exponents = np.full((rows, exponents_stride), 0x55, np.uint8)
        planes = np.full((rows, planes_stride), 0x55, np.uint8)
        for row in range(rows):
            part, low_bytes = values[row * count : (row + 1) * count], count * fmt.low_bytes
            one = [
                torch.empty(size, dtype=torch.uint8) for size in (count, low_bytes, packed_bytes(count, fmt.top_bits))
            ]
            reference.split_planes(part, fmt, *one)
            exponents[row, :count] = one[0].numpy()
            planes[row, : planes_stride - gap] = torch.cat(one[1:]).numpy()
        low = buffers.put(planes.reshape(-1)[: planes.size - gap])
        out = buffers.room(word_dtype(fmt), rows * out_stride - gap)
        executor.launch(
            f"merge_{fmt.name}", (num_ctas(count) + more_ctas, rows),
            buffers.put(exponents.reshape(-1)[: exponents.size - gap]), exponents_stride,
            low, low + count * fmt.low_bytes, planes_stride, count, out, out_stride,
        )  # fmt: skip
        for row in range(rows):
            start = out + row * out_stride * fmt.item_bytes
            buffers.expect(start, values[row * count : (row + 1) * count], f"row {row}")
            if row + 1 < rows:
                assert executor.untouched(start + count * fmt.item_bytes, gap * fmt.item_bytes)

    return run


def far_rows_case(fmt: FloatFormat) -> Callable[[Executor], None]:
    """Each row of each buffer has an allocation of its own, so that strides are what lies between these."""

    def run(executor: Executor) -> None:
        count, rows, starts = 261, [], []
        for seed in range(2):
            values = some_values(fmt, count, seed)
            one = [torch.empty(size, dtype=torch.uint8) for size in (count, fmt.remainder_bytes(count))]
            low, top = one[1][: count * fmt.low_bytes], one[1][count * fmt.low_bytes :]
            reference.split_planes(values, fmt, one[0], low, top)
            rows.append(values)
            starts.append([*(executor.upload(plane.numpy()) for plane in one), executor.alloc(values.nbytes)])
        (exponents, low_start, out), strides = starts[0], [b - a for a, b in zip(*starts, strict=True)]
        executor.launch(f"merge_{fmt.name}", (1, 2), exponents, strides[0], low_start, low_start + count * fmt.low_bytes,
                        strides[1], count, out, strides[2] // fmt.item_bytes)  # fmt: skip
        buffers = Buffers(executor, "16")
        for row, (_, _, start) in enumerate(starts):
            buffers.expect(start, rows[row], f"row {row}")

    return run


# ---- blocks


def hash_case(
    fmt: FloatFormat, values: torch.Tensor, block_size: int, alignment: str = "16", more_ctas: int = 0
) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, count = Buffers(executor, alignment), len(values)
        hashes = reference.hash_blocks(values, fmt, block_size)
        room = buffers.room(np.int64, hashes.numel())
        ctas = max(1, -(-len(hashes) // CTA_WARPS)) + more_ctas
        executor.launch(f"hash_{fmt.name}", (ctas, 1), buffers.put(values), count, block_size, room)
        buffers.expect(room, hashes, "hashes")

    return run


def some_ranks(num_blocks: int, share: float, seed: int = 2) -> npt.NDArray[np.int64]:
    """The rank of each chosen block among the chosen ones, -1 of the others; the last block is chosen if any is."""
    chosen = np.random.default_rng(seed).random(num_blocks) < share
    chosen[-1:] = share > 0
    return np.where(chosen, np.cumsum(chosen) - 1, -1)


def exponents_of(values: torch.Tensor, fmt: FloatFormat) -> Bytes:
    exponents = torch.empty(len(values), dtype=torch.uint8)
    reference.split_planes(values, fmt, exponents)
    return exponents.numpy()


def taken(values: torch.Tensor, fmt: FloatFormat, block_size: int, ranks: Array) -> Bytes:
    """The chosen blocks' exponents, side by side."""
    exponents = exponents_of(values, fmt)
    blocks = [exponents[k * block_size : (k + 1) * block_size] for k in np.flatnonzero(ranks >= 0)]
    return np.concatenate([*blocks, exponents[:0]])


def take_case(
    fmt: FloatFormat, values: torch.Tensor, block_size: int, share: float, alignment: str = "16", more_ctas: int = 0
) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, count = Buffers(executor, alignment), len(values)
        ranks = some_ranks(-(-count // block_size), share)
        expected = taken(values, fmt, block_size, ranks)
        room = buffers.room(np.uint8, len(expected))
        ctas = max(1, -(-len(ranks) // CTA_WARPS)) + more_ctas
        executor.launch(
            f"take_blocks_{fmt.name}", (ctas, 1), buffers.put(values), count, block_size, buffers.put(ranks), room
        )
        buffers.expect(room, expected, "exponents")

    return run


def put_case(
    num_blocks: int, block_size: int, missing: int, share: float, alignment: str = "16", more_ctas: int = 0
) -> Callable[[Executor], None]:
    """`missing`: how many exponents of the last block are not there."""

    def run(executor: Executor) -> None:
        buffers = Buffers(executor, alignment)
        ranks = some_ranks(num_blocks, share)
        generator = np.random.default_rng(num_blocks)
        fresh = generator.integers(1, 256, max(0, int((ranks >= 0).sum()) * block_size - missing), np.uint8)
        cache = generator.integers(1, 256, num_blocks * block_size, np.uint8)
        expected = cache.reshape(num_blocks, block_size).copy()
        expected[ranks >= 0] = np.pad(fresh, (0, -len(fresh) % block_size)).reshape(-1, block_size)
        room = buffers.put(cache)
        ctas = max(1, -(-num_blocks // CTA_WARPS)) + more_ctas
        executor.launch(
            "put_blocks", (ctas, 1), buffers.put(fresh), len(fresh), block_size, buffers.put(ranks), num_blocks, room
        )
        buffers.expect(room, expected, "cache")

    return run


def blocks_pipeline(fmt: FloatFormat, num_values: int, block_size: int) -> Callable[[Executor], None]:
    """hash of both -> ranks of the blocks that differ -> take -> put, after which the caches are equal."""

    def run(executor: Executor) -> None:
        buffers = Buffers(executor, "mixed")
        last = some_values(fmt, num_values)
        fresh = last.clone()
        fresh[block_size // 2 :: 3 * block_size] = 1.5
        fresh[-1] = 0.75
        num_blocks = -(-num_values // block_size)
        ctas = -(-num_blocks // CTA_WARPS)
        hashes = []
        for values in (last, fresh):
            room = buffers.room(np.int64, 2 * num_blocks)
            executor.launch(f"hash_{fmt.name}", (ctas, 1), buffers.put(values), num_values, block_size, room)
            hashes.append(torch.from_numpy(executor.download(room, np.int64, 2 * num_blocks)).view(-1, 2))
        differs = (hashes[0] != hashes[1]).any(1)
        ranks = torch.where(differs, differs.cumsum(0) - 1, -1)
        sent = int(differs.sum()) * block_size
        if differs[-1]:
            sent -= num_blocks * block_size - num_values
        exponents = buffers.room(np.uint8, sent)
        executor.launch(f"take_blocks_{fmt.name}", (ctas, 1), buffers.put(fresh), num_values, block_size,
                        buffers.put(ranks), exponents)  # fmt: skip
        padding = num_blocks * block_size - num_values
        caches = [np.pad(exponents_of(values, fmt), (0, padding)) for values in (last, fresh)]
        cache = buffers.put(caches[0])
        executor.launch("put_blocks", (ctas, 1), exponents, sent, block_size, buffers.put(ranks), num_blocks, cache)
        buffers.expect(cache, caches[1], "cache")

    return run


# ---- changes


@dataclass(frozen=True)
class Change:
    """Inputs of the change kernels."""

    fmt: FloatFormat | None
    last: torch.Tensor
    fresh: torch.Tensor
    escape: int
    alignment: str = "16"
    more_ctas: int = 0

    @property
    def name(self) -> str:
        return self.fmt.name if self.fmt else "byte"

    @property
    def ctas(self) -> int:
        return num_ctas(len(self.last)) + self.more_ctas

    def found(self) -> Found:
        return found_by_reference(self.fresh, self.last, self.fmt, self.escape, self.ctas)

    def bitmap_with_tail(self) -> Bytes:
        """Bits behind the last value mean nothing, so here they are set."""
        bitmap = self.found().bitmap.copy()
        if len(self.last) % 8:
            bitmap[-1] |= 0xFF << len(self.last) % 8 & 0xFF
        return bitmap


def scan_case(change: Change) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, found = Buffers(executor, change.alignment), change.found()
        bitmap = buffers.room(np.uint8, len(found.bitmap))
        counts = [buffers.room(np.int64, change.ctas) for _ in range(2)]
        executor.launch(f"scan_{change.name}", (change.ctas, 1), buffers.put(change.fresh), buffers.put(change.last),
                        len(change.last), change.escape, bitmap, *counts)  # fmt: skip
        buffers.expect(bitmap, found.bitmap, "bitmap")
        buffers.expect(counts[0], found.num_changed, "num_changed")
        buffers.expect(counts[1], found.num_literals, "num_literals")

    return run


def compact_case(change: Change) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, found = Buffers(executor, change.alignment), change.found()
        last = buffers.put(change.last)
        moves, literals = (
            buffers.room(np.uint8, len(found.moves)),
            buffers.room(found.literals.dtype, len(found.literals)),
        )
        executor.launch(
            f"compact_{change.name}", (change.ctas, 1), buffers.put(change.fresh), last, len(change.last), change.escape,
            buffers.put(found.bitmap), buffers.put(found.changes_up_to), buffers.put(found.literals_up_to), moves, literals,
        )  # fmt: skip
        buffers.expect(moves, found.moves, "moves")
        buffers.expect(literals, found.literals, "literals")
        buffers.expect(last, change.fresh, "last")

    return run


def count_changes_case(change: Change) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers = Buffers(executor, change.alignment)
        counts = buffers.room(np.int64, change.ctas)
        bitmap = buffers.put(change.bitmap_with_tail())
        executor.launch("count_changes", (change.ctas, 1), bitmap, len(change.last), counts)
        buffers.expect(counts, change.found().num_changed, "num_changed")

    return run


def count_escapes_case(change: Change, num_moves: int | None = None) -> Callable[[Executor], None]:
    """`num_moves`: fewer moves than the offsets say."""

    def run(executor: Executor) -> None:
        buffers, found = Buffers(executor, change.alignment), change.found()
        moves, ends = found.moves[:num_moves], found.changes_up_to
        starts = [0, *ends.tolist()][:-1]
        expected = np.array([(moves[a:b] == change.escape).sum() for a, b in zip(starts, ends, strict=True)], np.int64)
        counts = buffers.room(np.int64, len(ends))
        executor.launch("count_escapes", (-(-len(ends) // CTA_WARPS), 1), buffers.put(moves), len(moves), buffers.put(ends),
                        len(ends), change.escape, counts)  # fmt: skip
        buffers.expect(counts, expected, "num_literals")

    return run


def apply_case(change: Change, with_out: bool = True) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, found = Buffers(executor, change.alignment), change.found()
        values, damage = buffers.put(change.last), executor.flag()
        out = buffers.room(word_dtype(change.fmt), len(change.last)) if with_out else 0
        executor.launch(
            f"apply_{change.name}", (change.ctas, 1), values, len(change.last), change.escape,
            buffers.put(change.bitmap_with_tail()), buffers.put(found.changes_up_to), buffers.put(found.literals_up_to),
            buffers.put(found.moves), len(found.moves), buffers.put(found.literals), len(found.literals), out, damage,
        )  # fmt: skip
        bits, moves = torch.from_numpy(found.bitmap), torch.from_numpy(found.moves)
        literals = torch.from_numpy(
            found.literals.view(found.literals.dtype.str.replace("u", "i" if change.fmt else "u"))
        )
        received = Received(Form(escape=change.escape), bits, None, moves[:0], moves, literals)
        expected = change.last.clone()
        reference.apply_changes(expected, change.fmt, received)
        assert (words(expected) == words(change.fresh)).all(), "the reference itself"
        buffers.expect(values, expected, "values")
        if out:
            buffers.expect(out, expected, "out")
        buffers.expect(damage, np.zeros(1, np.uint32), "damage")

    return run


def damaged_case(
    change: Change, num_moves: int | None = None, num_literals: int | None = None, offsets: str = "right"
) -> Callable[[Executor], None]:
    """apply with too few moves or literals, or with offsets that are all 0 or of moves and literals that are not there."""

    def run(executor: Executor) -> None:
        buffers, found = Buffers(executor, change.alignment), change.found()
        moves, literals = found.moves[:num_moves], found.literals[:num_literals]
        changes_up_to, literals_up_to = found.changes_up_to, found.literals_up_to
        if offsets == "no moves":
            changes_up_to = np.zeros_like(changes_up_to)
        if offsets == "no literals":
            literals_up_to = np.zeros_like(literals_up_to)
        if offsets == "far":
            changes_up_to, literals_up_to = changes_up_to + (1 << 40), literals_up_to + (1 << 40)
        flags = np.unpackbits(found.bitmap, bitorder="little")[: len(change.last)].astype(bool)
        expected, damage = applied_in_part(words(change.last), change.fmt, change.escape, flags, changes_up_to,
                                           literals_up_to, moves, literals)  # fmt: skip
        assert damage or not len(found.moves)
        values, flag = buffers.put(change.last), executor.flag()
        out = buffers.room(word_dtype(change.fmt), len(change.last))
        executor.launch(
            f"apply_{change.name}", (change.ctas, 1), values, len(change.last), change.escape, buffers.put(found.bitmap),
            buffers.put(changes_up_to), buffers.put(literals_up_to), buffers.put(moves), len(moves), buffers.put(literals),
            len(literals), out, flag,
        )  # fmt: skip
        buffers.expect(values, expected, "values")
        buffers.expect(out, expected, "out")
        buffers.expect(flag, np.array([damage], np.uint32), "damage")

    return run


def changes_pipeline(change: Change) -> Callable[[Executor], None]:
    """scan -> cumsum -> compact, sent as they are; count_changes -> cumsum -> count_escapes -> cumsum -> apply."""

    def run(executor: Executor) -> None:
        buffers, count, grid = Buffers(executor, change.alignment), len(change.last), (change.ctas, 1)
        escape, name, item_dtype = change.escape, change.name, word_dtype(change.fmt)

        def summed(address: int) -> torch.Tensor:
            return torch.from_numpy(executor.download(address, np.int64, change.ctas)).cumsum(0)

        fresh, last = buffers.put(change.fresh), buffers.put(change.last)
        bitmap = buffers.room(np.uint8, packed_bytes(count, 1))
        counts = [buffers.room(np.int64, change.ctas) for _ in range(2)]
        executor.launch(f"scan_{name}", grid, fresh, last, count, escape, bitmap, *counts)
        up_to = [summed(address) for address in counts]
        num_moves, num_literals = (int(offsets[-1]) for offsets in up_to)
        moves, literals = buffers.room(np.uint8, num_moves), buffers.room(item_dtype, num_literals)
        executor.launch(
            f"compact_{name}", grid, fresh, last, count, escape, bitmap, *map(buffers.put, up_to), moves, literals
        )
        buffers.expect(last, change.fresh, "last")

        values, damage = buffers.put(change.last), executor.flag()
        executor.launch("count_changes", grid, bitmap, count, num_changed := buffers.room(np.int64, change.ctas))
        changes_up_to = buffers.put(summed(num_changed))
        num_escapes = buffers.room(np.int64, change.ctas)
        executor.launch("count_escapes", (-(-change.ctas // CTA_WARPS), 1), moves, num_moves, changes_up_to, change.ctas,
                        escape, num_escapes)  # fmt: skip
        # bytes have no literals, but moves that look like an escape; apply takes no notice of them
        literals_up_to = buffers.put(summed(num_escapes))
        out = buffers.room(item_dtype, count)
        executor.launch(f"apply_{name}", grid, values, count, escape, bitmap, changes_up_to, literals_up_to, moves, num_moves,
                        literals, num_literals, out, damage)  # fmt: skip
        buffers.expect(values, change.fresh, "values")
        buffers.expect(out, change.fresh, "out")
        buffers.expect(damage, np.zeros(1, np.uint32), "damage")

    return run


# ---- checksums


def mixed(word: int, j: int) -> int:
    """What word number j adds to a checksum's sum, in plain integers."""
    mask = (1 << 64) - 1
    word ^= (j + 1) * 0x9E3779B97F4A7C15 & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


def checksum_case(
    rows: int, num_bytes: int, gap: int = 0, ctas: int = 1, alignment: str = "16", zeros: bool = False
) -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers, stride = Buffers(executor, alignment), num_bytes + gap
        data = np.random.default_rng(num_bytes).integers(0, 256, (rows, stride), np.uint8)
        if zeros:
            data[:, : num_bytes // 2 // 8 * 8] = 0
        sums = buffers.put(np.zeros(rows, np.uint64))
        executor.launch(
            "checksum", (ctas, rows), buffers.put(data.reshape(-1)[: data.size - gap]), stride, num_bytes, sums
        )
        executor.launch("finish_checksums", (-(-rows // THREADS), 1), sums, rows)
        expected = reference.checksum(torch.from_numpy(data[:, :num_bytes].copy()))
        buffers.expect(sums, expected.numpy(), "checksums")

    return run


def sums_case(rows: int, num_bytes: int, ctas: int, alignment: str, gap: int = 0) -> Callable[[Executor], None]:
    """checksum alone, added to what is in the sums."""

    def run(executor: Executor) -> None:
        buffers, stride = Buffers(executor, alignment), num_bytes + gap
        generator = np.random.default_rng(num_bytes)
        data = generator.integers(0, 256, (rows, stride), np.uint8)
        before = generator.integers(0, 1 << 63, rows, np.uint64)
        sums = buffers.put(before)
        executor.launch(
            "checksum", (ctas, rows), buffers.put(data.reshape(-1)[: data.size - gap]), stride, num_bytes, sums
        )
        padded = np.pad(data[:, :num_bytes], ((0, 0), (0, -num_bytes % 8)))
        numbers = padded.reshape(rows, -1).view(np.uint64)
        terms = [[mixed(word, j) for j, word in enumerate(row)] for row in numbers.tolist()]
        buffers.expect(sums, before + np.array(terms, np.uint64).reshape(rows, -1).sum(1, dtype=np.uint64), "sums")

    return run


def far_sums_case() -> Callable[[Executor], None]:
    """Each row has an allocation of its own, so that the stride is what lies between them."""

    def run(executor: Executor) -> None:
        buffers = Buffers(executor, "16")
        data = np.random.default_rng(0).integers(0, 256, (2, 2056), np.uint8)
        first, second = (executor.upload(row) for row in data)
        sums = buffers.put(np.zeros(2, np.uint64))
        executor.launch("checksum", (2, 2), first, second - first, 2056, sums)
        executor.launch("finish_checksums", (1, 1), sums, 2)
        buffers.expect(sums, reference.checksum(torch.from_numpy(data)).numpy(), "checksums")

    return run


def finish_case(rows: int, alignment: str = "16") -> Callable[[Executor], None]:
    def run(executor: Executor) -> None:
        buffers = Buffers(executor, alignment)
        sums = np.random.default_rng(rows).integers(-(1 << 63), 1 << 63, rows, np.int64)
        room = buffers.put(sums)
        executor.launch("finish_checksums", (-(-rows // THREADS), 1), room, rows)
        buffers.expect(room, reference.splitmix64(torch.from_numpy(sums.copy())).numpy(), "checksums")

    return run


# ---- all of them


def plane_cases() -> Iterator[Case]:
    for fmt in FLOATS:
        split, merge = (f"split_{fmt.name}",), (f"merge_{fmt.name}",)
        for size in SIZES:
            for alignment in ("16", "mixed"):
                values, name = some_values(fmt, size), f"{fmt.name}-{size}-{alignment}"
                yield Case(f"split-{name}", split, split_case(fmt, values, alignment))
                yield Case(f"merge-{name}", merge, merge_case(fmt, values, alignment))
        for alignment in ALIGNMENTS:
            size = {"16": 261, "8": 2056, "odd": 523, "mixed": 2059}[alignment]
            values, name = some_values(fmt, size, 1), f"{fmt.name}-quick-{alignment}"
            yield Case(f"split-{name}", split, split_case(fmt, values, alignment, more_ctas=1), quick=True)
            values = some_values(fmt, 2 * size, 1)
            yield Case(f"merge-{name}", merge, merge_case(fmt, values, alignment, 2, 3, more_ctas=1), quick=True)
        for alignment, tails in TAILS.items():
            of_tails = [nonzero_values(fmt, tail) for tail in tails]
            run = one_by_one(split_case(fmt, values, alignment) for values in of_tails)
            yield Case(f"split-{fmt.name}-tails-{alignment}", split, run, quick=True)
            run = one_by_one(merge_case(fmt, values, alignment) for values in of_tails)
            yield Case(f"merge-{fmt.name}-tails-{alignment}", merge, run, quick=True)
        for wanted in ("exponents", "low top", "low", "top", ""):
            name = f"split-{fmt.name}-only-{wanted.replace(' ', '-') or 'nothing'}"
            yield Case(name, split, split_case(fmt, some_values(fmt, 275), wanted=wanted), quick=True)
        for rows, gap in ((3, 0), (3, 8), (5, 16)):
            values = some_values(fmt, rows * 271)
            for alignment in ("16", "odd"):
                name = f"merge-{fmt.name}-{rows}-rows-gap-{gap}-{alignment}"
                yield Case(name, merge, merge_case(fmt, values, alignment, rows, gap))
        yield Case(f"merge-{fmt.name}-far-rows", merge, far_rows_case(fmt))
        if fmt.item_bytes == 2:
            yield Case(f"split-{fmt.name}-all", split, split_case(fmt, all_values(fmt)))
            yield Case(f"merge-{fmt.name}-all", merge, merge_case(fmt, all_values(fmt)))


def block_cases() -> Iterator[Case]:
    for fmt in FLOATS:
        hashes, take = (f"hash_{fmt.name}",), (f"take_blocks_{fmt.name}",)
        for block_size in (64, 512, 1024):
            for size in (0, 1, 9, block_size - 1, block_size, block_size + 5, 9 * block_size, 9 * block_size + 23):
                for alignment in ("16", "mixed"):
                    values, name = some_values(fmt, size), f"{fmt.name}-{block_size}-{size}-{alignment}"
                    yield Case(f"hash-{name}", hashes, hash_case(fmt, values, block_size, alignment))
                    yield Case(f"take-{name}", take, take_case(fmt, values, block_size, 0.6, alignment))
            name = f"blocks-{fmt.name}-{block_size}"
            kernels = (*hashes, *take, "put_blocks")
            yield Case(name, kernels, blocks_pipeline(fmt, 11 * block_size + 37, block_size))
        for alignment in ALIGNMENTS:
            block_size = {"16": 512, "8": 64, "odd": 512, "mixed": 64}[alignment]
            values, name = some_values(fmt, 3 * block_size - 5), f"{fmt.name}-quick-{alignment}"
            yield Case(f"hash-{name}", hashes, hash_case(fmt, values, block_size, alignment, more_ctas=1), quick=True)
            yield Case(
                f"take-{name}", take, take_case(fmt, values, block_size, 0.6, alignment, more_ctas=1), quick=True
            )
        for alignment, tails in TAILS.items():
            of_tails = [nonzero_values(fmt, 64 + tail) for tail in tails]
            run = one_by_one(hash_case(fmt, values, 64, alignment) for values in of_tails)
            yield Case(f"hash-{fmt.name}-tails-{alignment}", hashes, run, quick=True)
            run = one_by_one(take_case(fmt, values, 64, 1.0, alignment) for values in of_tails)
            yield Case(f"take-{fmt.name}-tails-{alignment}", take, run, quick=True)
        values = some_values(fmt, 20 * 64 - 3)
        yield Case(f"hash-{fmt.name}-quick-many", hashes, hash_case(fmt, values, 64), quick=True)
        yield Case(f"take-{fmt.name}-quick-many", take, take_case(fmt, values, 64, 0.5), quick=True)
        values = some_values(fmt, 2 * 1024)
        yield Case(f"hash-{fmt.name}-quick-whole", hashes, hash_case(fmt, values, 1024), quick=True)
        yield Case(f"take-{fmt.name}-quick-whole", take, take_case(fmt, values, 1024, 1.0), quick=True)
        yield Case(f"take-{fmt.name}-none", take, take_case(fmt, values, 512, 0.0))
        if fmt.item_bytes == 2:
            yield Case(f"hash-{fmt.name}-all", hashes, hash_case(fmt, all_values(fmt), 512))
            yield Case(f"take-{fmt.name}-all", take, take_case(fmt, all_values(fmt), 512, 0.7))
    for block_size in (64, 512, 1024):
        for num_blocks, missing in ((1, 0), (1, 63), (8, 5), (9, 8), (17, 21)):
            for alignment in ("16", "mixed"):
                name = f"put-{block_size}-{num_blocks}-{missing}-{alignment}"
                yield Case(name, ("put_blocks",), put_case(num_blocks, block_size, missing, 0.6, alignment))
    for alignment, tails in TAILS.items():
        run = one_by_one(put_case(1, 64, 64 - tail, 1.0, alignment) for tail in tails)
        yield Case(f"put-tails-{alignment}", ("put_blocks",), run, quick=True)
    yield Case("put-quick-many", ("put_blocks",), put_case(20, 64, 3, 0.5), quick=True)
    yield Case("put-none", ("put_blocks",), put_case(9, 64, 0, 0.0))
    for alignment in ALIGNMENTS:
        block_size = {"16": 512, "8": 64, "odd": 512, "mixed": 64}[alignment]
        run = put_case(5, block_size, 11, 0.6, alignment, more_ctas=1)
        yield Case(f"put-quick-{alignment}", ("put_blocks",), run, quick=True)


def change_of(
    fmt: FloatFormat | None, size: int, share: float, escape: int, alignment: str = "16", more_ctas: int = 0
) -> Change:
    last = some_values(fmt, size)
    return Change(fmt, last, changed_values(last, fmt, share, escape), escape, alignment, more_ctas)


def change_cases() -> Iterator[Case]:
    for fmt in EVERY:
        name = fmt.name if fmt else "byte"
        scan, compact, apply = (f"scan_{name}",), (f"compact_{name}",), (f"apply_{name}",)
        everything = (*scan, *compact, "count_changes", "count_escapes", *apply)
        for index, size in enumerate(SIZES):
            share, escape = (0.3, 1.0, 0.02)[index % 3], (255, 15, 1, 127)[index % 4]
            for alignment in ("16", "mixed"):
                change = change_of(fmt, size, share, escape, alignment)
                label = f"{name}-{size}-{alignment}"
                yield Case(f"scan-{label}", scan, scan_case(change))
                yield Case(f"compact-{label}", compact, compact_case(change))
                yield Case(f"apply-{label}", apply, apply_case(change, with_out=alignment == "mixed"))
        quick = [(261, 1.0, 255, "16"), (2059, 0.5, 15, "8"), (523, 0.4, 7, "odd"), (4301, 0.1, 0, "mixed")]
        for size, share, escape, alignment in quick:
            change = change_of(fmt, size, share, escape, alignment, more_ctas=1)
            label = f"{name}-quick-{alignment}"
            yield Case(f"scan-{label}", scan, scan_case(change), quick=True)
            yield Case(f"compact-{label}", compact, compact_case(change), quick=True)
            yield Case(f"apply-{label}", apply, apply_case(change, with_out=alignment != "odd"), quick=True)
        for alignment, tails in TAILS.items():  # with escape 0 every change is a literal
            changes = []
            for tail in tails:
                last, escape = nonzero_values(fmt, tail), (0, 3, 15, 255)[tail % 4]
                for share in (0.0, 1.0):
                    changes.append(Change(fmt, last, changed_values(last, fmt, share, escape), escape, alignment))
            label = f"{name}-tails-{alignment}"
            yield Case(f"scan-{label}", scan, one_by_one(map(scan_case, changes)), quick=True)
            yield Case(f"compact-{label}", compact, one_by_one(map(compact_case, changes)), quick=True)
            yield Case(f"apply-{label}", apply, one_by_one(map(apply_case, changes)), quick=True)
        for share in (0.0, 0.002):
            for size in (2048, 4301):
                change = change_of(fmt, size, share, 15)
                yield Case(f"scan-{name}-{size}-share-{share}", scan, scan_case(change))
                yield Case(f"compact-{name}-{size}-share-{share}", compact, compact_case(change))
                yield Case(f"apply-{name}-{size}-share-{share}", apply, apply_case(change))
        for size, share, escape, alignment in (
            (4301, 0.3, 255, "16"),
            (2049, 1.0, 15, "mixed"),
            (20000, 0.05, 31, "16"),
        ):
            change = change_of(fmt, size, share, escape, alignment)
            yield Case(f"changes-{name}-{size}-{alignment}", everything, changes_pipeline(change))
        for alignment in ("16", "odd"):
            change = change_of(fmt, 4301, 0.4, 15, alignment)
            found = change.found()
            num_moves, num_literals = len(found.moves), len(found.literals)
            of_first = int(found.changes_up_to[0])
            label = f"damaged-{name}-{alignment}"
            for cut in (0, 1, of_first // 2, of_first, num_moves - 1):
                yield Case(
                    f"{label}-{cut}-moves", apply, damaged_case(change, num_moves=cut), quick=cut == of_first // 2
                )
            yield Case(f"{label}-no-offsets", apply, damaged_case(change, offsets="no moves"), quick=alignment == "16")
            yield Case(f"{label}-far-offsets", apply, damaged_case(change, offsets="far"))
            if fmt is not None:
                for cut in (0, num_literals // 2, num_literals - 1):
                    run = damaged_case(change, num_literals=cut)
                    yield Case(f"{label}-{cut}-literals", apply, run, quick=cut == num_literals // 2)
                yield Case(
                    f"{label}-no-literals", apply, damaged_case(change, offsets="no literals"), quick=alignment == "16"
                )
        if fmt is None or fmt.item_bytes == 2:
            last = all_values(fmt)
            change = Change(fmt, last, changed_values(last, fmt, 0.9, 255), 255)
            yield Case(f"scan-{name}-all", scan, scan_case(change))
            yield Case(f"compact-{name}-all", compact, compact_case(change))
            yield Case(f"apply-{name}-all", apply, apply_case(change))


def count_cases() -> Iterator[Case]:
    for index, size in enumerate(SIZES):
        change = change_of(BF16, size, (0.3, 1.0, 0.02)[index % 3], 15, "mixed")
        yield Case(f"count-changes-{size}", ("count_changes",), count_changes_case(change))
        yield Case(f"count-escapes-{size}", ("count_escapes",), count_escapes_case(change))
    for index, size in enumerate((2059, 20000)):
        change = change_of(BF16, size, (0.95, 0.3)[index], 15, "mixed", more_ctas=1)
        yield Case(f"count-changes-quick-{size}", ("count_changes",), count_changes_case(change), quick=True)
        for num_moves in (None, (0, 2300)[index], len(change.found().moves) - 1):
            name = f"count-escapes-quick-{size}-{num_moves}"
            yield Case(name, ("count_escapes",), count_escapes_case(change, num_moves), quick=True)


def checksum_cases() -> Iterator[Case]:
    both = ("checksum", "finish_checksums")
    for num_bytes in (0, 1, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049, 5000):
        for alignment in ("16", "odd"):
            yield Case(f"checksum-{num_bytes}-{alignment}", both, checksum_case(1, num_bytes, alignment=alignment))
    for rows, num_bytes, gap, ctas in (
        (3, 4099, 8, 1),
        (3, 4096, 5, 2),
        (2, 20003, 13, 3),
        (4, 16, 0, 4),
        (300, 5, 2, 1),
    ):
        yield Case(f"checksum-{rows}-rows-{num_bytes}", both, checksum_case(rows, num_bytes, gap, ctas))
    yield Case("checksum-zeros", both, checksum_case(2, 4100, 3, 2, zeros=True))
    yield Case("checksum-far-rows", both, far_sums_case())
    for rows, num_bytes, ctas, alignment, gap in (
        (2, 12301, 1, "8", 3),
        (2, 4111, 2, "odd", 0),
        (1, 20480, 2, "16", 0),
    ):
        run = sums_case(rows, num_bytes, ctas, alignment, gap)
        yield Case(f"sums-{num_bytes}-quick", ("checksum",), run, quick=True)
    for alignment, tails in TAILS.items():
        runs = [sums_case(2, 2048 * 3 + tail, 1, alignment, 4) for tail in tails]
        yield Case(f"sums-tails-{alignment}", ("checksum",), one_by_one(runs), quick=True)
    for rows in (1, 255, 256, 257, 1000):
        yield Case(f"finish-{rows}", ("finish_checksums",), finish_case(rows, "odd"), quick=rows == 257)


def all_cases() -> list[Case]:
    cases = [*plane_cases(), *block_cases(), *change_cases(), *count_cases(), *checksum_cases()]
    assert len({case.name for case in cases}) == len(cases)
    return cases

"""ld, st, atom and red: where an access goes, what is checked before it, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from .datatypes import UNSIGNED, Array, DataType, Select
from .errors import Fault, Misaligned, NonCoherentRead, OutOfBounds, Race, ReadOnlyWrite, UninitialisedRead
from .memory import (
    FORBIDDEN,
    INITIALISED,
    LOCAL_WINDOW,
    READ_ONLY_READ,
    SHARED_WINDOW,
    WRITTEN,
    Region,
    repeated,
)
from .operands import ADDRESS, Decoder, Operation, Reader, parse_number

if TYPE_CHECKING:
    from .batch import Batch

SPACES = ("global", "shared", "local", "const", "param")
VECTORS = {"v2": 2, "v4": 4}
CACHE_HINTS = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "weak", "nc", "volatile", "L2::64B", "L2::128B", "L2::256B"}
CACHE_HINTS |= {f"L1::{p}" for p in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")}
ATOMIC_SCOPES = {"relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys"}


@dataclass
class Part:
    """The accesses of one instruction that fall into one region."""

    region: Region
    threads: Array
    positions: Array
    addresses: Array
    chosen: Array | None  # which of the instruction's threads; None: all


class Access:
    """Size, space and checks of one memory instruction."""

    def __init__(self, decoder: Decoder, address: str, element: DataType, count: int) -> None:
        self.decoder, self.index = decoder, decoder.index
        self.element_bytes, self.size = element.num_bytes, element.num_bytes * count
        if self.size > 16:
            decoder.refuse("an access of more than 16 bytes")
        spaces = [s for s in decoder.modifiers if s in SPACES]
        self.space = spaces[0] if spaces else "generic"
        self.address: Reader = decoder.address(address)
        self.words = [(0, self.size)] if self.size <= 8 else [(0, 8), (8, 8)]  # the flags are looked at in words

    def parts(self, batch: Batch, threads: Array, select: Select) -> Iterator[Part]:
        """The accesses by region, after the checks of alignment and bounds."""
        addresses = np.broadcast_to(self.address(batch, select), threads.shape)
        wrong = addresses & np.uint64(self.size - 1)
        if wrong.any():
            self.fault(batch, Misaligned, f"misaligned access of {self.size} bytes", threads, addresses, wrong != 0)
        if self.space != "generic":
            yield from self._in_space(batch, self.space, threads, addresses, None)
            return
        local = addresses >= np.uint64(LOCAL_WINDOW)
        shared = (addresses >= np.uint64(SHARED_WINDOW)) & ~local
        for space, where, base in (("global", ~(shared | local), 0), ("shared", shared, SHARED_WINDOW),
                                   ("local", local, LOCAL_WINDOW)):  # fmt: skip
            if where.any():
                chosen = None if where.all() else np.flatnonzero(where)
                inside = addresses if chosen is None else addresses[chosen]
                of = threads if chosen is None else threads[chosen]
                yield from self._in_space(batch, space, of, inside - np.uint64(base), chosen)

    def _in_space(
        self, batch: Batch, space: str, threads: Array, addresses: Array, chosen: Array | None
    ) -> Iterator[Part]:
        coverage, warps = batch.coverage, batch.warp[threads]
        if space in ("shared", "local"):
            region = batch.shared if space == "shared" else batch.local
            stride = batch.shared_stride if space == "shared" else batch.local_stride
            outside = addresses > np.uint64(max(0, stride - self.size)) if stride else np.ones(len(threads), np.bool_)
            if outside.any():
                self.fault(batch, OutOfBounds, f"outside {space} memory,", threads, addresses, outside)
            offsets = addresses.astype(np.int64)
            if space == "shared" and batch.measure:
                coverage.count_bank_conflicts(self.index, warps, offsets, self.size)
            positions = offsets + (batch.cta[threads] if space == "shared" else threads) * stride
            yield Part(region, threads, positions, addresses, chosen)
            return
        for found, subset in batch.memory.find(addresses, self.size):
            if found is None:
                self.fault(batch, OutOfBounds, "outside every buffer,", threads, addresses, subset)
            of = threads if subset is None else threads[subset]
            where = addresses if subset is None else addresses[subset]
            positions = (where - np.uint64(found.start - found.lead)).astype(np.int64)
            if batch.measure:
                coverage.count_sectors(self.index, batch.warp[of], positions, self.size)
            if subset is not None:
                subset = subset if chosen is None else chosen[subset]
            yield Part(found, of, positions, where, subset if subset is not None else chosen)

    def check_initialised(self, batch: Batch, part: Part) -> None:
        for offset, num_bytes in self.words:
            flags = part.region.states(part.positions + offset, num_bytes)
            wanted = repeated(INITIALISED, num_bytes)
            missing = flags & wanted != wanted
            if missing.any():
                red = flags & repeated(FORBIDDEN, num_bytes) != 0
                if red.any():
                    self.fault(batch, OutOfBounds, "in a red zone,", part.threads, part.addresses, red)
                self.fault(
                    batch, UninitialisedRead, "read of bytes never written,", part.threads, part.addresses, missing
                )

    def check_writable(self, batch: Batch, part: Part) -> None:
        if part.region.read_only:
            self.fault(batch, ReadOnlyWrite, "write to constant memory,", part.threads, part.addresses, None)
        for offset, num_bytes in self.words:
            flags = part.region.states(part.positions + offset, num_bytes)
            for flag, kind, message in (
                (FORBIDDEN, OutOfBounds, "in a red zone,"),
                (READ_ONLY_READ, NonCoherentRead, "write to bytes that this launch has read through .nc,"),
            ):
                bad = flags & repeated(flag, num_bytes) != 0
                if bad.any():
                    self.fault(batch, kind, message, part.threads, part.addresses, bad)

    def check_not_written(self, batch: Batch, part: Part) -> None:
        for offset, num_bytes in self.words:
            written = part.region.states(part.positions + offset, num_bytes) & repeated(WRITTEN, num_bytes) != 0
            if written.any():
                message = "read through .nc of bytes that this launch writes,"
                self.fault(batch, NonCoherentRead, message, part.threads, part.addresses, written)

    def check_races(self, batch: Batch, part: Part, kind: str) -> None:
        if not batch.check_races or part.region is batch.local:
            return
        conflict = part.region.race_shadow().check(kind, batch.clocks, part.positions, self.size, part.threads)
        if conflict is not None:
            where = np.array([conflict.access])
            self.fault(batch, Race, conflict.message, part.threads, part.addresses, where)

    def mark(self, part: Part, flag: int) -> None:
        for offset, num_bytes in self.words:
            flags = part.region.states(part.positions + offset, num_bytes)
            part.region.set_states(part.positions + offset, num_bytes, flags | repeated(flag, num_bytes))

    def mark_written(self, part: Part) -> None:
        for offset, num_bytes in self.words:
            part.region.set_states(part.positions + offset, num_bytes, repeated(INITIALISED | WRITTEN, num_bytes))

    def fault(
        self, batch: Batch, kind: type[Fault], message: str, threads: Array, addresses: Array, bad: Array | None
    ) -> NoReturn:
        """For the first of the bad accesses; bad is a mask, or places in threads."""
        places = np.zeros(1, np.int64) if bad is None else np.flatnonzero(bad) if bad.dtype == np.bool_ else bad
        first = int(places[0])
        batch.fault(kind, message, self.decoder.instruction, int(threads[first]), int(addresses[first]))


def memory_modifiers(decoder: Decoder) -> tuple[DataType, int]:
    """(element type, number of elements). Ordered and relaxed accesses are refused: only barriers order here, and
    volatile counts as plain."""
    decoder.allow(*SPACES, *VECTORS, *CACHE_HINTS)
    count = next((VECTORS[m] for m in decoder.modifiers if m in VECTORS), 1)
    return decoder.type("usbf", (8, 16, 32, 64)), count


def decode_load(decoder: Decoder) -> Operation:
    decoder.expect_operands(2)
    element, count = memory_modifiers(decoder)
    destinations = [decoder.writer(text) for text in decoder.elements(decoder.operands[0])]
    if len(destinations) != count:
        decoder.refuse("the number of destinations")
    if "param" in decoder.modifiers:
        return decode_param_load(decoder, element, count)
    non_coherent = "nc" in decoder.modifiers
    access = Access(decoder, decoder.operands[1], element, count)

    def load(batch: Batch, select: Select) -> None:
        threads = batch.index(select)
        for part in access.parts(batch, threads, select):
            access.check_initialised(batch, part)
            if non_coherent:
                access.check_not_written(batch, part)
                access.mark(part, READ_ONLY_READ)
            access.check_races(batch, part, "read")
            into = select if part.chosen is None else part.threads
            for j, write in enumerate(destinations):
                values = part.region.read(part.positions + j * element.num_bytes, element.num_bytes)
                write(batch, into, values.view(element.dtype))

    return load


def decode_param_load(decoder: Decoder, element: DataType, count: int) -> Operation:
    """Parameters are the same for every thread, so this is a constant."""
    match = ADDRESS.match(decoder.operands[1])
    offset = parse_number(match.group(2) or "0") if match else None
    param = next((p for p in decoder.scope.kernel.params if match and p.name == match.group(1)), None)
    if param is None or offset is None or not 0 <= offset <= param.num_bytes - count * element.num_bytes:
        decoder.refuse("this parameter")
    writers = [decoder.writer(text) for text in decoder.elements(decoder.operands[0])]
    first = param.offset + offset

    def load_param(batch: Batch, select: Select) -> None:
        for j, write in enumerate(writers):
            start = first + j * element.num_bytes
            write(batch, select, batch.parameters[start : start + element.num_bytes].view(element.dtype))

    return load_param


def decode_store(decoder: Decoder) -> Operation:
    decoder.expect_operands(2)
    element, count = memory_modifiers(decoder)
    if {"param", "nc"} & set(decoder.modifiers):
        decoder.refuse("this store")
    word = UNSIGNED[element.bits]
    sources = [decoder.reader(text, word) for text in decoder.elements(decoder.operands[1])]
    if len(sources) != count:
        decoder.refuse("the number of sources")
    access = Access(decoder, decoder.operands[0], element, count)

    def store(batch: Batch, select: Select) -> None:
        threads = batch.index(select)
        for part in access.parts(batch, threads, select):
            access.check_writable(batch, part)
            access.check_races(batch, part, "write")
            for j, read in enumerate(sources):
                values = np.broadcast_to(read(batch, select), threads.shape)
                chosen = values if part.chosen is None else values[part.chosen]
                part.region.write(part.positions + j * element.num_bytes, chosen)
            access.mark_written(part)

    return store


Update = Callable[[Array, Array, Array], Array]  # (old values, first source, second source) -> new values
UPDATES: dict[str, Update] = {
    "add": lambda old, a, b: old + a,
    "and": lambda old, a, b: old & a,
    "or": lambda old, a, b: old | a,
    "xor": lambda old, a, b: old ^ a,
    "min": lambda old, a, b: np.minimum(old, a),
    "max": lambda old, a, b: np.maximum(old, a),
    "exch": lambda old, a, b: a,
    "cas": lambda old, a, b: np.where(old == a, b, old),
    "inc": lambda old, a, b: np.where(old >= a, 0, old + 1),
    "dec": lambda old, a, b: np.where((old == 0) | (old > a), a, old - 1),
}


def decode_atomic(decoder: Decoder) -> Operation:
    """atom, and red, which has no destination."""
    decoder.allow(*UPDATES, *ATOMIC_SCOPES, "global", "shared")
    names = [m for m in decoder.modifiers if m in UPDATES]
    element = decoder.type("usb", (32, 64))
    operands = list(decoder.operands)
    destination = decoder.writer(operands.pop(0)) if decoder.instruction.opcode == "atom" else None
    if len(names) != 1 or len(operands) != (3 if names[0] == "cas" else 2):
        decoder.refuse("this atomic")
    update = UPDATES[names[0]]
    access = Access(decoder, operands[0], element, 1)
    first, second = (decoder.reader(text, element.dtype) for text in (operands[1], operands[-1]))

    def atomic(batch: Batch, select: Select) -> None:
        threads = batch.index(select)
        a, b = (np.broadcast_to(read(batch, select), threads.shape) for read in (first, second))
        old = np.zeros(len(threads), element.dtype)
        for part in access.parts(batch, threads, select):
            access.check_writable(batch, part)
            access.check_initialised(batch, part)
            access.check_races(batch, part, "atomic")
            chosen = np.arange(len(threads)) if part.chosen is None else part.chosen
            for turn in turns(part.positions, batch.random):
                where, who = part.positions[turn], chosen[turn]
                old[who] = part.region.read(where, element.num_bytes).view(element.dtype)
                new = update(old[who], a[who], b[who]).astype(element.dtype)
                part.region.write(where, new.view(UNSIGNED[element.bits]))
            access.mark_written(part)
        if destination is not None:
            destination(batch, select, old)

    return atomic


def turns(positions: Array, random: np.random.Generator | None) -> Iterator[Array]:
    """Accesses in rounds without two to one place; who goes first is by thread number or by chance."""
    order = np.arange(len(positions)) if random is None else random.permutation(len(positions))
    order = order[np.argsort(positions[order], kind="stable")]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(positions[order]) != 0]))
    lengths = np.diff(np.append(starts, len(order)))
    rank = np.arange(len(order)) - starts.repeat(lengths)
    by_rank = order[np.argsort(rank, kind="stable")]
    yield from np.split(by_rank, np.cumsum(np.bincount(rank))[:-1])

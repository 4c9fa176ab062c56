"""Instructions that the threads of a warp execute together: shfl, vote, redux and bar.warp.sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .datatypes import UNSIGNED, Array
from .errors import InvalidMask
from .operands import Decoder, Reader

if TYPE_CHECKING:
    from .batch import Batch

LANES = np.arange(32, dtype=np.uint32)
SHUFFLES = ("up", "down", "bfly", "idx")
REDUCTIONS: dict[str, tuple[np.ufunc, int]] = {  # and what an absent lane counts as
    "add": (np.add, 0), "and": (np.bitwise_and, -1), "or": (np.bitwise_or, 0), "xor": (np.bitwise_xor, 0),
    "min": (np.minimum, 0), "max": (np.maximum, 0),
}  # fmt: skip


@dataclass
class WarpOperation:
    """run is called with threads whose masks are complete, and these masks."""

    mask: Reader
    run: Callable[[Batch, Array, Array], None]


def mask_bits(masks: Array) -> Array:
    """[thread, lane]"""
    return (masks[:, None] >> LANES & np.uint32(1)).astype(np.bool_)


def by_lane(batch: Batch, threads: Array, values: Array) -> Array:
    """[thread, lane]: the value in every lane of the thread's warp; zero where a lane takes no part."""
    table = np.zeros((batch.num_warps, 32), values.dtype)
    table[batch.warp[threads], batch.lane[threads]] = values
    rows: Array = table[batch.warp[threads]]
    return rows


def decode_warp(decoder: Decoder) -> WarpOperation:
    opcode = decoder.instruction.opcode
    builders = {"shfl": decode_shuffle, "vote": decode_vote, "redux": decode_reduction}
    if opcode in builders:
        if "sync" not in decoder.modifiers:
            decoder.refuse("no .sync")
        run = builders[opcode](decoder)
        return WarpOperation(decoder.reader(decoder.operands[-1], UNSIGNED[32]), run)
    if decoder.modifiers != ("warp", "sync"):
        decoder.refuse("this barrier")
    decoder.expect_operands(1)

    def meet(batch: Batch, threads: Array, masks: Array) -> None:
        if batch.check_races:
            batch.clocks.warp_barrier(threads, masks)

    return WarpOperation(decoder.reader(decoder.operands[0], UNSIGNED[32]), meet)


def decode_shuffle(decoder: Decoder) -> Callable[[Batch, Array, Array], None]:
    decoder.allow("sync", *SHUFFLES)
    decoder.type("b", (32,))
    decoder.expect_operands(5)
    mode = decoder.modifiers[1]
    if mode not in SHUFFLES:
        decoder.refuse("shuffle mode")
    target, *valid = decoder.operands[0].split("|")
    write, write_valid = decoder.writer(target), decoder.predicate_writer(valid[0] if valid else "_")
    source, offset, control = (decoder.reader(text, UNSIGNED[32]) for text in decoder.operands[1:4])

    def run(batch: Batch, threads: Array, masks: Array) -> None:
        lane = batch.lane[threads].astype(np.int64)
        step, c = (np.broadcast_to(read(batch, threads), threads.shape).astype(np.int64) for read in (offset, control))
        step, clamp, segment = step & 31, c & 31, c >> 8 & 31
        low, high = lane & segment, (lane & segment) | (clamp & ~segment)
        others = {"up": lane - step, "down": lane + step, "bfly": lane ^ step, "idx": low | (step & ~segment)}
        wanted = others[mode]
        inside = wanted >= high if mode == "up" else wanted <= high
        wanted = np.where(inside, wanted, lane)
        values = np.zeros((batch.num_warps, 32), np.uint32)
        warp = batch.warp[threads]
        values[warp, lane] = source(batch, threads)
        taking_part = masks & batch.lanes_present(threads)[warp]
        absent = np.flatnonzero(taking_part >> wanted.astype(np.uint32) & np.uint32(1) == 0)
        if len(absent):
            message = f"shfl reads lane {wanted[absent[0]]}, which takes no part,"
            batch.fault(InvalidMask, message, decoder.instruction, int(threads[absent[0]]))
        write(batch, threads, values[warp, wanted])
        write_valid(batch, threads, inside)

    return run


def decode_vote(decoder: Decoder) -> Callable[[Batch, Array, Array], None]:
    decoder.allow("sync", "ballot", "any", "all", "uni")
    decoder.expect_operands(3)
    mode = decoder.modifiers[1]
    ballot = mode == "ballot"
    if decoder.modifiers[2:] != (("b32",) if ballot else ("pred",)):
        decoder.refuse("vote")
    target = decoder.operands[0]
    write = decoder.writer(target) if ballot else decoder.predicate_writer(target)
    predicate = decoder.predicate(decoder.operands[1])

    def run(batch: Batch, threads: Array, masks: Array) -> None:
        votes = np.broadcast_to(predicate(batch, threads), threads.shape)
        warp = batch.warp[threads]
        yes, no = (batch.lanes_present(threads[wanted])[warp] & masks for wanted in (votes, ~votes))
        if ballot:
            write(batch, threads, yes)
        else:
            write(batch, threads, {"any": yes != 0, "all": no == 0, "uni": (yes == 0) | (no == 0)}[mode])

    return run


def decode_reduction(decoder: Decoder) -> Callable[[Batch, Array, Array], None]:
    decoder.allow("sync", *REDUCTIONS)
    decoder.expect_operands(3)
    mode = decoder.modifiers[1]
    kind = decoder.type("b" if mode in ("and", "or", "xor") else "us", (32,))
    if mode not in REDUCTIONS:
        decoder.refuse("reduction")
    write, source = decoder.writer(decoder.operands[0]), decoder.reader(decoder.operands[1], kind.dtype)
    operation, neutral = REDUCTIONS[mode]

    def run(batch: Batch, threads: Array, masks: Array) -> None:
        values = np.broadcast_to(source(batch, threads), threads.shape)
        present = by_lane(batch, threads, np.ones(len(threads), np.bool_)) & mask_bits(masks)
        own = values[:, None] if mode in ("min", "max") else np.array(neutral).astype(kind.dtype)
        table = np.where(present, by_lane(batch, threads, values), own)
        write(batch, threads, operation.reduce(table, axis=1, dtype=kind.dtype))

    return run

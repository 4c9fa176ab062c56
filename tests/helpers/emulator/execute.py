"""Opcodes that compute: each decoder checks its instruction when the module is loaded and returns what to do per launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import arithmetic
from .access import decode_atomic, decode_load, decode_store
from .datatypes import UNSIGNED, Array, DataType, Select
from .errors import DivisionByZero, Trap
from .memory import LOCAL_WINDOW, SHARED_WINDOW
from .operands import Decoder, Operation

if TYPE_CHECKING:
    from .batch import Batch

Unary = Callable[[Array], Array]
Binary = Callable[[Array, Array], Array]


def unary(decoder: Decoder, operation: Unary, kind: DataType) -> Operation:
    decoder.expect_operands(2)
    write, read = decoder.writer(decoder.operands[0]), decoder.reader(decoder.operands[1], kind.dtype)
    return lambda batch, select: write(batch, select, operation(read(batch, select)))


def binary(decoder: Decoder, operation: Binary, kind: DataType) -> Operation:
    decoder.expect_operands(3)
    write = decoder.writer(decoder.operands[0])
    a, b = (decoder.reader(text, kind.dtype) for text in decoder.operands[1:])
    return lambda batch, select: write(batch, select, operation(a(batch, select), b(batch, select)))


def decode_add_sub(decoder: Decoder) -> Operation:
    decoder.allow("sat")
    kind = decoder.type()
    operation: Binary = np.add if decoder.instruction.opcode == "add" else np.subtract
    if "sat" in decoder.modifiers:
        if str(kind) != "s32":
            decoder.refuse("saturation of this type")
        operation = arithmetic.saturating(operation)
    return binary(decoder, operation, kind)


def decode_min_max(decoder: Decoder) -> Operation:
    decoder.allow()
    return binary(decoder, np.minimum if decoder.instruction.opcode == "min" else np.maximum, decoder.type("us"))


def decode_logic(decoder: Decoder) -> Operation:
    decoder.allow()
    operation = arithmetic.LOGIC[decoder.instruction.opcode]
    if decoder.modifiers != ("pred",):
        return binary(decoder, operation, decoder.type("b"))
    decoder.expect_operands(3)
    write = decoder.predicate_writer(decoder.operands[0])
    a, b = (decoder.predicate(text) for text in decoder.operands[1:])
    return lambda batch, select: write(batch, select, operation(a(batch, select), b(batch, select)))


def decode_not(decoder: Decoder) -> Operation:
    decoder.allow()
    if decoder.modifiers != ("pred",):
        return unary(decoder, np.invert, decoder.type("b"))
    decoder.expect_operands(2)
    write, read = decoder.predicate_writer(decoder.operands[0]), decoder.predicate(decoder.operands[1])
    return lambda batch, select: write(batch, select, ~read(batch, select))


def decode_sign(decoder: Decoder) -> Operation:
    decoder.allow()
    return unary(decoder, np.negative if decoder.instruction.opcode == "neg" else np.abs, decoder.type("s"))


def decode_shift(decoder: Decoder) -> Operation:
    decoder.allow()
    left = decoder.instruction.opcode == "shl"
    kind = decoder.type("b" if left else "usb")
    decoder.expect_operands(3)
    write, value = decoder.writer(decoder.operands[0]), decoder.reader(decoder.operands[1], kind.dtype)
    amount = decoder.reader(decoder.operands[2], UNSIGNED[32])
    shift = arithmetic.shift_left if left else arithmetic.shift_right
    return lambda batch, select: write(batch, select, shift(value(batch, select), amount(batch, select)))


def decode_divide(decoder: Decoder) -> Operation:
    decoder.allow()
    kind = decoder.type("us")
    decoder.expect_operands(3)
    write = decoder.writer(decoder.operands[0])
    a, b = (decoder.reader(text, kind.dtype) for text in decoder.operands[1:])
    operation = arithmetic.divide if decoder.instruction.opcode == "div" else arithmetic.remainder

    def run(batch: Batch, select: Select) -> None:
        divisor = b(batch, select)
        if (divisor == 0).any():
            threads = batch.index(select)
            zero = np.flatnonzero(np.broadcast_to(divisor == 0, threads.shape))
            batch.fault(DivisionByZero, "division by zero", decoder.instruction, int(threads[zero[0]]))
        write(batch, select, operation(a(batch, select), divisor))

    return run


def decode_multiply(decoder: Decoder) -> Operation:
    """mul and mad, with .lo, .hi or .wide."""
    decoder.allow("lo", "hi", "wide")
    add = decoder.instruction.opcode == "mad"
    mode = decoder.modifiers[0]
    kind = decoder.type("us", (16, 32) if mode == "wide" else (16, 32, 64))
    products: dict[str, Binary] = {
        "lo": np.multiply, "hi": arithmetic.multiply_high, "wide": arithmetic.multiply_wide,
    }  # fmt: skip
    if mode not in products or len(decoder.modifiers) != 2:
        decoder.refuse("multiplication mode")
    product = products[mode]
    if not add:
        return binary(decoder, product, kind)
    decoder.expect_operands(4)
    write = decoder.writer(decoder.operands[0])
    a, b = (decoder.reader(text, kind.dtype) for text in decoder.operands[1:3])
    wide = DataType(kind.kind, 2 * kind.bits) if mode == "wide" else kind
    c = decoder.reader(decoder.operands[3], wide.dtype)
    return lambda batch, select: write(batch, select, product(a(batch, select), b(batch, select)) + c(batch, select))


def decode_unary_bits(decoder: Decoder) -> Operation:
    """popc, clz, brev and bfind."""
    opcode = decoder.instruction.opcode
    decoder.allow(*(["shiftamt"] if opcode == "bfind" else []))
    if opcode == "bfind":
        shift = "shiftamt" in decoder.modifiers
        operation = arithmetic.find_leading_shift if shift else arithmetic.find_leading
        return unary(decoder, operation, decoder.type("us", (32, 64)))
    operations: dict[str, Unary] = {
        "popc": arithmetic.population_count, "clz": arithmetic.count_leading_zeros, "brev": arithmetic.reverse_bits,
    }  # fmt: skip
    return unary(decoder, operations[opcode], decoder.type("b", (32, 64)))


def decode_fields(decoder: Decoder) -> Operation:
    """bfe and bfi."""
    decoder.allow()
    insert = decoder.instruction.opcode == "bfi"
    kind = decoder.type("b" if insert else "us", (32, 64))
    decoder.expect_operands(5 if insert else 4)
    write = decoder.writer(decoder.operands[0])
    values = [decoder.reader(text, kind.dtype) for text in decoder.operands[1:-2]]
    counts = [decoder.reader(text, UNSIGNED[32]) for text in decoder.operands[-2:]]
    operation = arithmetic.insert_bits if insert else arithmetic.extract_bits
    return lambda batch, select: write(batch, select, operation(*(read(batch, select) for read in [*values, *counts])))


def decode_permute(decoder: Decoder) -> Operation:
    """prmt without a mode, and shf."""
    funnel = decoder.instruction.opcode == "shf"
    decoder.allow(*(("l", "r", "wrap", "clamp") if funnel else ()))
    decoder.type("b", (32,))
    decoder.expect_operands(4)
    write = decoder.writer(decoder.operands[0])
    sources = [decoder.reader(text, UNSIGNED[32]) for text in decoder.operands[1:]]
    left, wrap = "l" in decoder.modifiers, "wrap" in decoder.modifiers

    def run(batch: Batch, select: Select) -> None:
        a, b, c = (read(batch, select) for read in sources)
        result = arithmetic.funnel_shift(a, b, c, left, wrap) if funnel else arithmetic.permute_bytes(a, b, c)
        write(batch, select, result)

    return run


def decode_lookup(decoder: Decoder) -> Operation:
    decoder.allow()
    decoder.type("b", (32,))
    decoder.expect_operands(5)
    write = decoder.writer(decoder.operands[0])
    a, b, c = (decoder.reader(text, UNSIGNED[32]) for text in decoder.operands[1:4])
    table = int(decoder.operands[4], 0)
    return lambda batch, select: write(
        batch, select, arithmetic.lookup3(a(batch, select), b(batch, select), c(batch, select), table)
    )


def decode_compare(decoder: Decoder) -> Operation:
    """setp, with a second predicate for the negation and a third source to combine both with."""
    comparison, *combine = decoder.modifiers[:-1]
    decoder.allow(comparison, *combine)
    kind = decoder.type()
    if comparison not in arithmetic.COMPARE or len(combine) > 1 or not set(combine) <= set(arithmetic.LOGIC):
        decoder.refuse("comparison")
    if kind.kind == "b" and comparison not in ("eq", "ne"):
        decoder.refuse("order of a bit type")
    if kind.kind == "s" and comparison in ("lo", "ls", "hi", "hs"):
        decoder.refuse("unsigned comparison of a signed type")
    decoder.expect_operands(4 if combine else 3)
    compare = arithmetic.COMPARE[comparison]
    a, b = (decoder.reader(text, kind.dtype) for text in decoder.operands[1:3])
    names = decoder.operands[0].split("|")
    writers = [decoder.predicate_writer(name) for name in names]
    if not combine:
        if len(writers) == 1:
            write = writers[0]
            return lambda batch, select: write(batch, select, compare(a(batch, select), b(batch, select)))
        third = decoder.predicate("1")
        logic = arithmetic.LOGIC["and"]
    else:
        third, logic = decoder.predicate(decoder.operands[3]), arithmetic.LOGIC[combine[0]]

    def run(batch: Batch, select: Select) -> None:
        result, other = compare(a(batch, select), b(batch, select)), third(batch, select)
        outcomes = (logic(result, other), logic(~result, other))
        for write, values in zip(writers, outcomes, strict=False):
            write(batch, select, values)

    return run


def decode_select(decoder: Decoder) -> Operation:
    decoder.allow()
    kind = decoder.type()
    decoder.expect_operands(4)
    write = decoder.writer(decoder.operands[0])
    a, b = (decoder.reader(text, kind.dtype) for text in decoder.operands[1:3])
    condition = decoder.predicate(decoder.operands[3])
    return lambda batch, select: write(
        batch, select, np.where(condition(batch, select), a(batch, select), b(batch, select))
    )


def decode_convert(decoder: Decoder) -> Operation:
    """Between integers. The result has the destination's type; its register may be wider."""
    decoder.allow("sat")
    target, source = (decoder.type("us", (8, 16, 32, 64), position) for position in (-2, -1))
    if "sat" not in decoder.modifiers:
        return unary(decoder, lambda values: values.astype(target.dtype), source)
    return unary(decoder, lambda values: arithmetic.saturate(values, target.dtype).astype(target.dtype), source)


def decode_convert_address(decoder: Decoder) -> Operation:
    """cvta: global addresses are generic ones already."""
    decoder.allow("to", "global", "shared", "local", "const", "param")
    space = decoder.modifiers[-2]
    kind = decoder.type("u", (64,))
    window = np.uint64({"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0))
    if space == "param":
        decoder.refuse("addresses of parameters")
    if "to" in decoder.modifiers:
        return unary(decoder, lambda values: values - window, kind)
    return unary(decoder, lambda values: values + window, kind)


def decode_move(decoder: Decoder) -> Operation:
    """mov: plain, or packing and unpacking a vector."""
    decoder.allow()
    decoder.expect_operands(2)
    target, source = decoder.operands
    if decoder.modifiers == ("pred",):
        write_predicate, read_predicate = decoder.predicate_writer(target), decoder.predicate(source)
        return lambda batch, select: write_predicate(batch, select, read_predicate(batch, select))
    kind = decoder.type("usbf", (16, 32, 64))
    if not target.startswith("{") and not source.startswith("{"):
        return unary(decoder, lambda values: values, kind)
    elements = decoder.elements(target if target.startswith("{") else source)
    bits = kind.bits // len(elements)
    if bits not in UNSIGNED:
        decoder.refuse("elements of this size")
    word, shifts = UNSIGNED[kind.bits], [UNSIGNED[kind.bits].type(bits * j) for j in range(len(elements))]
    if target.startswith("{"):
        writers, read = [decoder.writer(text) for text in elements], decoder.reader(source, word)

        def unpack(batch: Batch, select: Select) -> None:
            values = read(batch, select)
            for write, shift in zip(writers, shifts, strict=True):
                write(batch, select, (values >> shift).astype(UNSIGNED[bits]))

        return unpack
    write, readers = decoder.writer(target), [decoder.reader(text, UNSIGNED[bits]) for text in elements]

    def pack(batch: Batch, select: Select) -> None:
        packed: Array = np.zeros(1, word)
        for read, shift in zip(readers, shifts, strict=True):
            packed = packed | (read(batch, select).astype(word) << shift)
        write(batch, select, packed)

    return pack


def decode_active_mask(decoder: Decoder) -> Operation:
    """The lanes that execute this together, which the schedule decides."""
    decoder.type("b", (32,))
    decoder.expect_operands(1)
    write = decoder.writer(decoder.operands[0])

    def run(batch: Batch, select: Select) -> None:
        threads = batch.index(select)
        write(batch, select, batch.lanes_present(threads)[batch.warp[threads]])

    return run


def decode_trap(decoder: Decoder) -> Operation:
    def run(batch: Batch, select: Select) -> None:
        batch.fault(Trap, "trap", decoder.instruction, int(batch.index(select)[0]))

    return run


def decode_nothing(decoder: Decoder) -> Operation:
    """Fences order nothing that is modelled (barriers order by themselves); prefetches and sleeps have no result."""
    return lambda batch, select: None


DECODERS: dict[str, Callable[[Decoder], Operation]] = {
    "ld": decode_load, "st": decode_store, "atom": decode_atomic, "red": decode_atomic,
    "add": decode_add_sub, "sub": decode_add_sub, "min": decode_min_max, "max": decode_min_max,
    "and": decode_logic, "or": decode_logic, "xor": decode_logic, "not": decode_not, "neg": decode_sign,
    "abs": decode_sign, "shl": decode_shift, "shr": decode_shift, "div": decode_divide, "rem": decode_divide,
    "mul": decode_multiply, "mad": decode_multiply, "popc": decode_unary_bits, "clz": decode_unary_bits,
    "brev": decode_unary_bits, "bfind": decode_unary_bits, "bfe": decode_fields, "bfi": decode_fields,
    "prmt": decode_permute, "shf": decode_permute, "lop3": decode_lookup, "setp": decode_compare,
    "selp": decode_select, "cvt": decode_convert, "cvta": decode_convert_address, "mov": decode_move,
    "activemask": decode_active_mask, "trap": decode_trap, "membar": decode_nothing, "fence": decode_nothing,
    "prefetch": decode_nothing, "prefetchu": decode_nothing, "nanosleep": decode_nothing,
}  # fmt: skip


def decode(decoder: Decoder) -> Operation:
    if decoder.instruction.opcode not in DECODERS:
        decoder.refuse("opcode")
    if len(decoder.modifiers) == 0 and decoder.instruction.opcode not in ("trap", "membar", "fence"):
        decoder.refuse("no type")
    return DECODERS[decoder.instruction.opcode](decoder)

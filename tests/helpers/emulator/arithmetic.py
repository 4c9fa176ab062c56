"""Integer operations of PTX on NumPy arrays. All take and give arrays of the instruction's type; none raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .datatypes import SIGNED, UNSIGNED, Array


def bits_of(values: Array) -> int:
    return values.dtype.itemsize * 8


def unsigned(values: Array) -> Array:
    return values.view(UNSIGNED[bits_of(values)])


def contiguous(*arrays: Array) -> list[Array]:
    """Arrays of one shape that can be viewed as another type."""
    return [np.ascontiguousarray(a) for a in np.broadcast_arrays(*arrays)]


def shift_left(values: Array, amounts: Array) -> Array:
    """Amounts are u32; at the width and beyond the result is 0."""
    bits = bits_of(values)
    shifted: Array = values << np.minimum(amounts, bits - 1).astype(values.dtype)
    return shifted if (amounts < bits).all() else np.where(amounts < bits, shifted, 0).astype(values.dtype)


def shift_right(values: Array, amounts: Array) -> Array:
    """Arithmetic for signed values; at the width and beyond the result is 0 or the sign."""
    bits = bits_of(values)
    shifted: Array = values >> np.minimum(amounts, bits - 1).astype(values.dtype)
    if values.dtype.kind == "i" or (amounts < bits).all():
        return shifted
    return np.where(amounts < bits, shifted, 0).astype(values.dtype)


def multiply_wide(a: Array, b: Array) -> Array:
    wide = (SIGNED if a.dtype.kind == "i" else UNSIGNED)[2 * bits_of(a)]
    product: Array = a.astype(wide) * b.astype(wide)
    return product


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    bits = bits_of(a)
    if bits < 64:
        upper: Array = multiply_wide(a, b) >> bits
        return upper.astype(a.dtype)
    a, b = contiguous(a, b)
    x, y = unsigned(a), unsigned(b)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    first = x1 * y0 + (x0 * y0 >> half)
    second = x0 * y1 + (first & low)
    high: Array = x1 * y1 + (first >> half) + (second >> half)
    if a.dtype.kind == "i":  # signed = unsigned less 2**64 times the other factor for each negative factor
        high = high - np.where(a < 0, y, 0).astype(x.dtype) - np.where(b < 0, x, 0).astype(x.dtype)
    return high.view(a.dtype)


def divide(a: Array, b: Array) -> Array:
    """Rounded towards zero; the divisor is not zero. The magnitudes are unsigned: the least integer has no negative."""
    if a.dtype.kind == "u":
        return np.asarray(a // b)
    a, b = contiguous(a, b)
    quotient = unsigned(np.abs(a)) // unsigned(np.abs(b))
    return np.where((a < 0) != (b < 0), 0 - quotient, quotient).view(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    result: Array = a - divide(a, b) * b
    return result


def saturate(values: Array, dtype: np.dtype[Any]) -> Array:
    """Clamped to the range of dtype, in the values' own type."""
    source, target = np.iinfo(values.dtype), np.iinfo(dtype)
    return np.clip(values, max(source.min, target.min), min(source.max, target.max))


def saturating(operation: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """add.sat and sub.sat exist for s32 only."""
    return lambda a, b: saturate(operation(a.astype(np.int64), b.astype(np.int64)), a.dtype).astype(a.dtype)


def find_leading(values: Array) -> Array:
    """Position of the highest bit that differs from the sign (unsigned: of the highest one), else all ones; u32."""
    x = unsigned(values)
    if values.dtype.kind == "i":
        x = np.where(values < 0, ~x, x)
    position = np.full(x.shape, -1, np.int32)
    for shift in [s for s in (32, 16, 8, 4, 2, 1) if s < bits_of(values)]:
        upper = x >> x.dtype.type(shift)
        position += np.where(upper != 0, shift, 0).astype(np.int32)
        x = np.where(upper != 0, upper, x)
    return np.where(x != 0, position + 1, -1).astype(np.int32).view(np.uint32)


def count_leading_zeros(values: Array) -> Array:
    leading = find_leading(unsigned(values)).view(np.int32)
    return (bits_of(values) - 1 - leading).astype(np.uint32)


def find_leading_shift(values: Array) -> Array:
    """bfind.shiftamt: how far to shift left to bring that bit to the top."""
    leading = find_leading(values)
    return np.where(leading == 0xFFFFFFFF, leading, bits_of(values) - 1 - leading).astype(np.uint32)


def population_count(values: Array) -> Array:
    return np.bitwise_count(unsigned(values)).astype(np.uint32)


def reverse_bits(values: Array) -> Array:
    x, dtype = values.byteswap(), values.dtype.type
    for shift, mask in ((4, 0x0F), (2, 0x33), (1, 0x55)):
        low = dtype(int.from_bytes(bytes([mask]) * values.dtype.itemsize, "little"))
        x = ((x & low) << dtype(shift)) | ((x >> dtype(shift)) & low)
    return x


def extract_bits(values: Array, positions: Array, lengths: Array) -> Array:
    """bfe. Positions and lengths are u32, of which 8 bits count. Signed: bits beyond the field repeat its top bit, or
    the value's sign where the field ends beyond it."""
    values, positions, lengths = contiguous(values, positions & 0xFF, lengths & 0xFF)
    bits = bits_of(values)
    if values.dtype.kind == "u":
        return shift_right(values, positions) & field_mask(lengths, values.dtype)
    ends = np.minimum(positions + lengths, bits)  # the field is moved to the top and back, with its sign
    top = shift_left(unsigned(values), bits - ends).view(values.dtype)
    field = shift_right(top, np.where(positions + lengths > bits, positions, bits - np.minimum(lengths, bits)))
    return np.where(lengths == 0, 0, field).astype(values.dtype)


def field_mask(lengths: Array, dtype: np.dtype[Any]) -> Array:
    mask: Array = shift_left(np.ones(lengths.shape, dtype), lengths) - dtype.type(1)
    return mask


def insert_bits(field: Array, base: Array, positions: Array, lengths: Array) -> Array:
    """bfi."""
    field, base, positions, lengths = contiguous(field, base, positions & 0xFF, lengths & 0xFF)
    mask = shift_left(field_mask(lengths, base.dtype), positions)
    return (base & ~mask) | (shift_left(field, positions) & mask)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt: four nibbles of the selector pick bytes of b:a; a nibble's top bit asks for the byte's sign instead."""
    a, b, selector = contiguous(a, b, selector)
    source = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(a.shape, np.uint32)
    for j in range(4):
        nibble = selector >> np.uint32(4 * j)
        byte = (source >> ((nibble & 7) * 8).astype(np.uint64)).astype(np.uint32) & 0xFF
        sign = (byte >> 7) * np.uint32(0xFF)
        result |= np.where(nibble & 8 != 0, sign, byte) << np.uint32(8 * j)
    return result


def funnel_shift(low: Array, high: Array, amounts: Array, left: bool, wrap: bool) -> Array:
    """shf: a shift of high:low of which 32 bits are kept."""
    low, high, amounts = contiguous(low, high, amounts)
    amounts = (amounts & 31 if wrap else np.minimum(amounts, 32)).astype(np.uint64)
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    shifted = (both << amounts) >> np.uint64(32) if left else both >> amounts
    return shifted.astype(np.uint32)


def lookup3(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3: bit (4a + 2b + c) of the table, for every bit."""
    a, b, c = contiguous(a, b, c)
    result = np.zeros(a.shape, a.dtype)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


LOGIC: dict[str, Callable[[Array, Array], Array]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip

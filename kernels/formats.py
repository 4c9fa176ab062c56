"""Floating-point formats: how many bits are exponent, and how many bytes the rest packs into.

A value's bits are rotated left by one, so that the exponent stands on top and the sign at the bottom:

    bf16   s eeeeeeee mmmmmmm            ->  eeeeeeee mmmmmmms                1 exponent byte, 1 remainder byte
    fp16   s eeeee mmmmmmmmmm            ->  eeeee mmm | mmmmmmms             5 exponent bits, 3 + 8 remainder bits
    fp32   s eeeeeeee m(23)              ->  eeeeeeee m(23)s                  1 exponent byte, 3 remainder bytes

fp8 has no row yet: its groups are gathered raw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Bit patterns of values, as unsigned integers of the same width."""


@dataclass(frozen=True)
class FloatFormat:
    """Bit layout of a floating-point dtype whose exponent fits into the top byte of its rotated bits."""

    name: str
    dtype: torch.dtype
    exponent_bits: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize

    @property
    def int_dtype(self) -> torch.dtype:
        """The integer dtype of the same width."""
        return {2: torch.int16, 4: torch.int32}[self.item_bytes]

    @property
    def sign_bit(self) -> int:
        """Number of the highest bit, counted from 0."""
        return 8 * self.item_bytes - 1

    @property
    def mantissa_bits(self) -> int:
        """Bits below the exponent."""
        return self.sign_bit - self.exponent_bits

    @property
    def top_bits(self) -> int:
        """Remainder bits that share the top byte with the exponent: 0 for bf16 and fp32, 3 for fp16."""
        return 8 - self.exponent_bits

    @property
    def low_bytes(self) -> int:
        """Whole bytes of the remainder."""
        return self.item_bytes - 1

    def remainder_bytes(self, num_values: int) -> int:
        """Bytes of the sign+mantissa plane of `num_values` values: whole low bytes, then the top bits packed."""
        return num_values * self.low_bytes + packed_bytes(num_values, self.top_bits)

    def num_values_of(self, remainder_bytes: int) -> int | None:
        """How many values have a plane of `remainder_bytes` bytes; `None` where no number of values has."""
        num_values = remainder_bytes * 8 // (8 * self.low_bytes + self.top_bits)
        return num_values if self.remainder_bytes(num_values) == remainder_bytes else None

    def words(self, values: torch.Tensor) -> Words:
        """The bit patterns of a host tensor of `dtype`, as a view (any shape and strides of rows)."""
        words: Words = values.view(self.int_dtype).numpy().view(f"<u{self.item_bytes}")
        return words

    def remainder_slices(self, num_values: int, chunk: slice) -> tuple[slice, slice]:
        """Where a chunk of values (its start a multiple of 8) lies in the plane: its low bytes, its packed top bits."""
        packed_start = num_values * self.low_bytes + packed_bytes(chunk.start, self.top_bits)
        packed_stop = packed_start + packed_bytes(chunk.stop - chunk.start, self.top_bits)
        return slice(chunk.start * self.low_bytes, chunk.stop * self.low_bytes), slice(packed_start, packed_stop)


def packed_bytes(num_values: int, width_bits: int) -> int:
    """Bytes that `num_values` values of `width_bits` bits pack into."""
    return (num_values * width_bits + 7) // 8


FORMATS: dict[torch.dtype, FloatFormat] = {
    torch.bfloat16: FloatFormat("bf16", torch.bfloat16, exponent_bits=8),
    torch.float16: FloatFormat("fp16", torch.float16, exponent_bits=5),
    torch.float32: FloatFormat("fp32", torch.float32, exponent_bits=8),
}

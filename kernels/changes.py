"""Which values changed, and by how much, on the host; a chunk of values at a time.

A *move* is the change of a bit pattern in the order of the numbers, in zigzag form (0, -1, 1, -2, ... as 0, 1, 2, 3, ...).
Moves below an *escape* of at most 255 are symbols; the escape itself stands for all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_ciera.kernels.formats import FloatFormat, Words
from fsdp_ciera.kernels.memory import Bytes


class ChangeFinder:
    """Finds where two arrays differ; holds the scratch for up to `most_values` values.

    [Note: Finding ones] `np.flatnonzero` jumps from one to the next while at most a tenth are ones, and each jump is a
    branch that the processor guesses wrong; above, it runs without branches. From about 2 % on the latter is faster, so a
    tail of ones is put behind the mask and cut off again. Only speed depends on it.
    """

    def __init__(self, most_values: int) -> None:
        self._mask = np.empty(most_values + most_values // 8 + 1, np.bool_)
        self._size = 0
        self.count = 0

    def compare(self, fresh: npt.NDArray[Any], last: npt.NDArray[Any]) -> int:
        """How many of the n values differ. Keeps where, for `positions` and `bitmap`."""
        self._size = len(fresh)
        mask = np.not_equal(fresh, last, out=self._mask[: self._size])
        self.count = int(np.count_nonzero(mask))
        return self.count

    def load(self, bitmap: Bytes, num_values: int) -> int:
        """Takes uint8 [ceil(num_values / 8)] in place of a comparison. -> how many bits are set."""
        self._size = num_values
        mask = self._mask[:num_values]
        mask[:] = np.unpackbits(bitmap, count=num_values, bitorder="little").view(np.bool_)
        self.count = int(np.count_nonzero(mask))
        return self.count

    def bitmap(self) -> Bytes:
        """uint8 [ceil(n / 8)], first value lowest; 1 = differs."""
        return np.packbits(self._mask[: self._size], bitorder="little")

    def positions(self) -> npt.NDArray[np.int64]:
        """int64 [count], ascending. See [Note: Finding ones]."""
        size = self._size
        if size < 64 * self.count and 10 * self.count <= size:
            padded = size + size // 8 + 1
            self._mask[size:padded] = True
            return np.flatnonzero(self._mask[:padded])[: self.count]
        return np.flatnonzero(self._mask[:size])


class Moves:
    """Turns changes into moves and back; holds the scratch for up to `most_values` values."""

    def __init__(self, fmt: FloatFormat, most_values: int, escape: int) -> None:
        self._escape = escape
        self._dtype = np.dtype(f"<i{fmt.item_bytes}")
        self._sign_bit = fmt.sign_bit
        self._scratch = np.empty((2, most_values), self._dtype)
        self._symbols = np.empty(most_values, np.uint8)

    def encode(self, fresh: Words, last: Words) -> Bytes:
        """Words [n] and [n] -> moves uint8 [n], valid until the next call."""
        moved, spare = self._scratch[:, : len(fresh)]
        self._order(fresh, moved)
        self._order(last, spare)
        np.subtract(moved, spare, out=moved)
        np.right_shift(moved, self._sign_bit, out=spare)
        np.add(moved, moved, out=moved)
        np.bitwise_xor(moved, spare, out=moved)
        zigzag = moved.view(f"<u{self._dtype.itemsize}")
        np.minimum(zigzag, self._escape, out=zigzag)
        symbols = self._symbols[: len(fresh)]
        np.copyto(symbols, zigzag, casting="unsafe")
        return symbols

    def decode(self, last: Words, symbols: Bytes, out: Words) -> None:
        """The inverse: words [n] and moves [n] -> `out` [n] (may be `last`). An escape gives any word."""
        moved, spare = self._scratch[:, : len(last)]
        np.copyto(spare, symbols)
        np.bitwise_and(spare, 1, out=moved)
        np.negative(moved, out=moved)
        np.right_shift(spare, 1, out=spare)
        np.bitwise_xor(spare, moved, out=spare)
        self._order(last, moved)
        np.add(moved, spare, out=moved)
        self._order(moved.view(last.dtype), spare)
        out[:] = spare.view(last.dtype)

    def _order(self, words: Words, out: npt.NDArray[Any]) -> None:
        """Bit patterns <-> integers in the order of the numbers (its own inverse): the lower bits of negatives flip."""
        signed = words.view(self._dtype)
        np.right_shift(signed, self._sign_bit, out=out)
        np.bitwise_and(out, (1 << self._sign_bit) - 1, out=out)
        np.bitwise_xor(out, signed, out=out)


class SizeFinder:
    """Tells small values from large ones by their exponents; holds the scratch for up to `most_values` values.

    A value is small when its exponent is below a *boundary* of at least 1 (zeros and denormals have exponent 0).
    """

    def __init__(self, fmt: FloatFormat, most_values: int, boundary: int) -> None:
        self._doubled = np.empty(most_values, f"<u{fmt.item_bytes}")
        self._limit = self._doubled.dtype.type(boundary << (fmt.mantissa_bits + 1))
        self._mask = np.zeros(-(-most_values // 64) * 64, np.bool_)
        self._size = 0

    def look_at(self, words: Words) -> int:
        """Words [n] -> how many of them are small. Keeps which, for the other methods."""
        self._mask[len(words) : self._size] = False
        self._size = len(words)
        doubled = np.add(words, words, out=self._doubled[: self._size])  # the sign falls off
        return int(np.count_nonzero(np.less(doubled, self._limit, out=self._mask[: self._size])))

    def is_small(self) -> npt.NDArray[np.bool_]:
        """bool [n], valid until the next look."""
        return self._mask[: self._size]

    def num_small_before(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [k] -> how many small values stand before each position.

        Cost: a pass over n or, for few positions, over n / 64 words and some over k.
        """
        if 16 * len(positions) > self._size:
            up_to = np.cumsum(self.is_small(), dtype=np.int32).take(positions).astype(np.int64)
            up_to -= self.is_small().take(positions)
            return up_to
        bits = np.packbits(self._mask[: -(-self._size // 64) * 64], bitorder="little").view("<u8")
        before = np.zeros(len(bits), np.int64)
        np.cumsum(np.bitwise_count(bits[:-1]), out=before[1:])
        word = positions >> 6
        lower = (np.uint64(1) << (positions & 63).astype(np.uint64)) - np.uint64(1)
        ranks: npt.NDArray[np.int64] = before[word] + np.bitwise_count(bits[word] & lower)
        return ranks

    def positions_of(
        self, small_ranks: npt.NDArray[np.int64], large_ranks: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the small values with these ranks among the small ones stand, and the large ones with those: int64 [k] each."""
        small = np.flatnonzero(self.is_small()) if len(small_ranks) or len(large_ranks) else np.empty(0, np.int64)
        if 16 * len(large_ranks) > self._size:
            return small[small_ranks], np.flatnonzero(~self.is_small())[large_ranks]
        large_before = small - np.arange(
            len(small)
        )  # a few are looked up: as many small values stand before a large one
        return small[small_ranks], large_ranks + np.searchsorted(large_before, large_ranks, side="right")

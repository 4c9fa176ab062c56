"""Split and merge on the host: what `reference.split_planes` and `merge_planes` do, a chunk of values at a time.

See [Note: Chunks] in reference.py. A caller takes each chunk's exponents while they are in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fsdp_ciera.kernels.bits import pack_bits, unpack_bits
from fsdp_ciera.kernels.formats import FloatFormat, Words
from fsdp_ciera.kernels.memory import Bytes
from fsdp_ciera.kernels.reference import CHUNK_VALUES, chunks_of


def split(
    words: Words,
    fmt: FloatFormat,
    plane: Bytes | None = None,
    exponents: Bytes | None = None,
    chunk_values: int = CHUNK_VALUES,
    with_exponents: bool = True,
) -> Iterator[tuple[slice, Bytes]]:
    """Words [n] -> each chunk with its exponents, uint8 [chunk], valid until the next one is asked for.

    Writes the sign+mantissa of a chunk into `plane` [fmt.remainder_bytes(n)] and its exponents into `exponents` [n],
    where these are given. `chunk_values` must be a multiple of 8. `with_exponents=False` leaves them undefined. Cost: 6
    passes over a chunk; 2 without `plane`, 4 without exponents.
    """
    num_values = len(words)
    size = min(chunk_values, num_values)
    rotated, spare = np.empty((2, size), words.dtype)
    own = np.empty(size, np.uint8)
    for chunk in chunks_of(num_values, chunk_values):
        part = words[chunk]
        size = len(part)
        into = own[:size] if exponents is None else exponents[chunk]
        if with_exponents:
            _take_exponents(part, fmt, spare[:size], into)
        if plane is not None:
            _take_remainder(part, fmt, rotated[:size], spare[:size])
            low, top = fmt.remainder_slices(num_values, chunk)
            if fmt.item_bytes == 2:
                np.copyto(plane[low], rotated[:size], casting="unsafe")  # the low byte
            else:
                stored = rotated[:size].view(np.uint8).reshape(size, fmt.item_bytes)
                plane[low].reshape(size, -1)[:] = stored[:, :-1]
            if fmt.top_bits:
                np.right_shift(rotated[:size], 8, out=spare[:size])
                spare[:size] &= (1 << fmt.top_bits) - 1
                plane[top] = pack_bits(spare[:size].astype(np.uint8), fmt.top_bits)
        yield chunk, into


def _take_exponents(part: Words, fmt: FloatFormat, spare: Words, into: Bytes) -> None:
    np.right_shift(part, fmt.mantissa_bits, out=spare)
    if fmt.exponent_bits < 8:
        spare &= (1 << fmt.exponent_bits) - 1
    np.copyto(into, spare, casting="unsafe")  # with 8 bits, the sign falls off here


def _take_remainder(part: Words, fmt: FloatFormat, rotated: Words, spare: Words) -> None:
    np.add(part, part, out=rotated)  # a left shift; additions are faster
    np.right_shift(part, fmt.sign_bit, out=spare)
    np.bitwise_or(rotated, spare, out=rotated)


class Merger:
    """Merges chunk after chunk of one or several rows; holds the scratch that this takes."""

    def __init__(self, fmt: FloatFormat, num_values: int) -> None:
        self.fmt = fmt
        self.num_values = num_values
        self._scratch: Words = np.empty((2, 0), f"<u{fmt.item_bytes}")

    def merge(self, exponents: Bytes, planes: Bytes, chunk: slice, out: Words) -> None:
        """Exponents [rows, chunk] and sign+mantissa planes [rows, remainder_bytes(num_values)] -> `out` [rows, chunk].

        `out` may be strided. `chunk` is where these values stand among `num_values`; it must start at a multiple of 8.
        """
        fmt, (rows, size) = self.fmt, exponents.shape
        if self._scratch.shape[1] < rows * size:
            self._scratch = np.empty((2, rows * size), self._scratch.dtype)
        rotated, spare = (half[: rows * size].reshape(rows, size) for half in self._scratch)
        low, top = fmt.remainder_slices(self.num_values, chunk)
        np.copyto(rotated, exponents)
        np.left_shift(rotated, 8 * fmt.item_bytes - fmt.exponent_bits, out=rotated)
        if fmt.item_bytes == 2:
            np.copyto(spare, planes[:, low])
        else:
            stored = spare.view(np.uint8).reshape(rows, size, fmt.item_bytes)
            stored[:, :, :-1] = planes[:, low].reshape(rows, size, -1)
            stored[:, :, -1] = 0
        np.bitwise_or(rotated, spare, out=rotated)
        if fmt.top_bits:
            spare[:] = unpack_bits(planes[:, top], size, fmt.top_bits)
            np.left_shift(spare, 8 * (fmt.item_bytes - 1), out=spare)
            np.bitwise_or(rotated, spare, out=rotated)
        np.right_shift(rotated, 1, out=spare)
        np.left_shift(rotated, fmt.sign_bit, out=rotated)
        np.bitwise_or(rotated, spare, out=out)


def merge_rows(exponents: Bytes, planes: Bytes, fmt: FloatFormat, out: Words) -> None:
    """Merges whole rows: exponents [rows, n], planes [rows, remainder_bytes(n)] -> `out` [rows, n]. Rows may be strided."""
    rows, num_values = exponents.shape
    merger = Merger(fmt, num_values)
    for chunk in chunks_of(num_values, max(CHUNK_VALUES // max(rows, 1) // 8 * 8, 1024)):
        merger.merge(exponents[:, chunk], planes, chunk, out[:, chunk])

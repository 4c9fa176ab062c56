"""Which values of a run changed, as a section, in the smallest of several forms.

    gaps      the number of unchanged values before each change, one byte each; a symbol 255 only moves on by 255
    bitmap    one bit a value
    all       every value travels, as it is
    dense     every value has a change, which is 0 where it stayed

Worked example, changes at 2, 3 and 300 of 400 values: gaps 2, 0, 296, and 296 = 255 + 41, so the symbols 2, 0, 255, 41.
Gaps and bitmap travel uncoded or entropy-coded. No change at all is an empty section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_ciera.entropy import Coding, Form, SectionWriter, StoredSection, SymbolReader
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.formats import packed_bytes
from fsdp_ciera.kernels.ops import CHUNK_VALUES, Bytes, ChangeFinder, chunks_of

_ESCAPE = 255
_BITMAP_PLAUSIBLE = 4
"""A bitmap of more than this many times the bytes of the gaps is not tried. One change in 32 values that lie anywhere takes
0.20 bit a value as coded gaps and 0.28 as a coded bitmap, since a byte of it takes at least a bit."""


class PositionWriter:
    """Collects the changed positions of a run, chunk by chunk in order, and writes the section."""

    def __init__(self, num_values: int) -> None:
        self.num_values = num_values
        self.count = 0
        self._bitmaps: list[tuple[int, Bytes]] = []
        self._gaps: list[Bytes] = []
        self._num_gap_bytes = 0
        self._has_all_gaps = True
        self._last = -1

    def add(self, start: int, positions: npt.NDArray[np.int64], bitmap: Bytes) -> None:
        """Changed positions among the values from `start` on, counted from there.

        In `bitmap` the first bit stands for value start // 8 * 8.
        """
        if not len(positions):
            return
        self.count += len(positions)
        self._bitmaps.append((start // 8, bitmap))
        if self._num_gap_bytes <= packed_bytes(self.num_values, 1):
            gaps = gap_symbols(positions, self._last - start)
            self._num_gap_bytes += len(gaps)
            self._gaps.append(gaps)
        else:  # a coded bitmap is as small, within 2 %, and faster
            self._has_all_gaps = False
        self._last = start + int(positions[-1])

    def add_some(self, start: int, positions: npt.NDArray[np.int64], num_values: int) -> None:
        """Changed positions among the `num_values` values from `start` on, counted from there; makes the bitmap."""
        if len(positions):
            spare = start % 8
            mask = np.zeros(spare + num_values, np.bool_)
            mask[positions + spare] = True
            self.add(start, positions, np.packbits(mask, bitorder="little"))

    def write(self, sections: SectionWriter, num_values: int | None = None) -> None:
        """Adds the section. Cost: a zstd pass over the gaps, the bitmap (an eighth of a byte a value), or both.

        `num_values` is how many values there were, when that was known beforehand only about.
        """
        bitmap_bytes = packed_bytes(self.num_values if num_values is None else num_values, 1)
        forms = []
        if self._has_all_gaps and self._num_gap_bytes <= bitmap_bytes:
            forms.append(Form(np.concatenate(self._gaps) if self._gaps else np.empty(0, np.uint8)))
        if not forms or bitmap_bytes < _BITMAP_PLAUSIBLE * self._num_gap_bytes:
            bitmap = np.zeros(bitmap_bytes, np.uint8)
            for start, part in self._bitmaps:
                bitmap[start : start + len(part)] |= part
            forms.append(Form(bitmap, Coding.BITMAP, Coding.BITMAP_ZSTD))
        sections.code_smallest(forms)


def most_position_bytes(num_values: int) -> int:
    """The largest section of positions: no form is taken that is larger than the plain bitmap."""
    return packed_bytes(num_values, 1)


def gap_symbols(positions: npt.NDArray[np.int64], last: int = -1) -> Bytes:
    """int64 [k], ascending, the first above `last` -> the gaps between them as symbols."""
    gaps = np.empty_like(positions)
    np.subtract(positions[:1], last, out=gaps[:1])
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps -= 1
    if int(gaps.max(initial=0)) < _ESCAPE:
        return gaps.astype(np.uint8)
    num_escapes = gaps // _ESCAPE
    ends = np.cumsum(num_escapes + 1) - 1  # where each gap's last symbol stands
    symbols = np.full(int(ends[-1]) + 1, _ESCAPE, np.uint8)
    symbols[ends] = gaps - num_escapes * _ESCAPE
    return symbols


def position_batches(section: StoredSection, num_values: int) -> Iterator[npt.NDArray[np.int64]]:
    """A section of gaps or a bitmap -> the changed positions, ascending, at most `CHUNK_VALUES` at a time.

    Raises `CieraDecodeError`, possibly after some batches, for what is no such section of `num_values` values; no position
    outside of them is ever given.
    """
    if section.coding in (Coding.BITMAP, Coding.BITMAP_ZSTD):
        return _from_bitmap(section, num_values)
    return _from_gaps(section, num_values)


class PositionReader:
    """Gives the positions of a section piece by piece. Raises `CieraDecodeError` as `position_batches`."""

    def __init__(self, section: StoredSection, num_values: int) -> None:
        self._batches = position_batches(section, num_values)
        self._left: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def below(self, limit: int) -> npt.NDArray[np.int64]:
        """The next positions, as far as they are below `limit`."""
        found = []
        while True:
            end = int(np.searchsorted(self._left, limit))
            found.append(self._left[:end])
            self._left = self._left[end:]
            if len(self._left):
                break
            batch = next(self._batches, None)
            if batch is None:
                break
            self._left = batch
        return found[0] if len(found) == 1 else np.concatenate(found)

    def finish(self) -> None:
        """Checks that all positions were given."""
        assert not len(self._left), "positions below the number of values are given by then"
        for _ in self._batches:
            raise CieraDecodeError("a list of changed values goes on behind the last of them")


def _from_gaps(section: StoredSection, num_values: int) -> Iterator[npt.NDArray[np.int64]]:
    reader = SymbolReader(section, most_symbols=num_values + num_values // _ESCAPE + 1)
    moved_on = 0
    is_last: npt.NDArray[Any] = np.ones(1, np.bool_)
    while reader.num_left:
        symbols = reader.read(min(CHUNK_VALUES, reader.num_left))
        is_last = symbols != _ESCAPE
        moved = symbols.astype(np.int64)
        moved += is_last
        np.cumsum(moved, out=moved)
        moved += moved_on
        moved_on = int(moved[-1])
        if moved_on > num_values:
            raise CieraDecodeError(f"a list of changed values ends at {moved_on - 1} of {num_values} values")
        moved -= 1
        yield moved if is_last.all() else moved[is_last]
    reader.finish()
    if not is_last[-1]:
        raise CieraDecodeError("a list of changed values ends in a symbol that marks none")


def _from_bitmap(section: StoredSection, num_values: int) -> Iterator[npt.NDArray[np.int64]]:
    coding = Coding.PLAIN if section.coding == Coding.BITMAP else Coding.ZSTD
    reader = SymbolReader(StoredSection(coding, section.data), num_symbols=packed_bytes(num_values, 1))
    finder = ChangeFinder(min(CHUNK_VALUES, num_values))
    for chunk in chunks_of(num_values):
        size = chunk.stop - chunk.start
        bitmap = reader.read(packed_bytes(size, 1))
        if size % 8 and int(bitmap[-1]) >> size % 8:
            raise CieraDecodeError(f"a bitmap of changed values marks one behind the last of {num_values}")
        if bitmap.any():
            finder.load(bitmap, size)
            positions = finder.positions()
            positions += chunk.start
            yield positions
    reader.finish()

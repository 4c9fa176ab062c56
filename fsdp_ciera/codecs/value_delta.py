"""`value_delta`: which values changed, and by how many units in the last place. A repeat gather sends nothing.

sender    changed = values != own last ones
          payload = positions | changes in ulp, a byte or half a byte each | sign+mantissa and exponents of larger changes
          (positions and changes apart for small and large values, see [Note: Small values change more] in survey.py)
receiver  ValueCache[positions] = moved or replaced;  copy ValueCache
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.codecs.moves import BYTE_ESCAPE, MoveReader, write_moves
from fsdp_ciera.codecs.survey import ValueForm, choose_value_form
from fsdp_ciera.entropy import Coding, SectionWriter, SymbolReader
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.formats import FloatFormat, Words
from fsdp_ciera.kernels.ops import (
    CHUNK_VALUES,
    Bytes,
    ChangeFinder,
    Merger,
    Moves,
    SizeFinder,
    chunks_of,
    split,
    zeros_tensor,
)
from fsdp_ciera.positions import PositionReader, PositionWriter, most_position_bytes, position_batches

_SMALL_SECTIONS = 3  # boundary, positions and moves of small values; empty when all values are taken together


class ValueDelta(FloatRunCodec):
    """Sends the signed distance to the last value among the numbers of its format, for the values that changed.

    Wire, per value: 0.1 to 2 bits in the first gather after an optimizer step, 0 in the next ones. Memory: the own shard
    and every peer's once more, in the gathered dtype (2 bytes a value of bf16). Exact for every bit pattern: distances
    are taken between bit patterns in the order of the numbers, and wrap around. A distance too large for
    its symbol travels as the value itself, a *literal*.
    """

    name: ClassVar[str] = "value_delta"
    num_sections: ClassVar[int] = 7

    def __init__(self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> None:
        super().__init__(num_values, dtype, block_size, num_peers)
        self._own: torch.Tensor | None = None  # [num_values]
        self._value_cache: torch.Tensor | None = None  # [num_peers, num_values]

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Own values and ValueCache."""
        return (num_peers + 1) * num_values * dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        """None: where nothing changed, nothing travels."""
        return 0

    @property
    def most_section_bytes(self) -> int:
        """The boundary, two lists of positions and moves, at most a byte a move, and every value as a literal."""
        literal_bytes = self.format.remainder_bytes(self.num_values) + self.num_values
        return 1 + most_position_bytes(self.num_values) + 1 + self.num_values + literal_bytes

    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Cmp."""
        words = self.format.words(values)
        if self._own is None:
            self._own = zeros_tensor((self.num_values,), self.dtype)
            form = ValueForm(Coding.ALL)
        else:
            form = choose_value_form(words, self.format.words(self._own), self.format)
        own = self.format.words(self._own)
        if form.coding == Coding.PLAIN:
            self._compress_sparse(words, own, form, sections)
            return
        for _ in range(_SMALL_SECTIONS):
            sections.empty()
        if form.coding == Coding.DENSE:
            self._compress_dense(words, own, form.escape, sections)
        else:
            sections.empty(Coding.ALL)
            sections.empty()
            write_literals(sections, words, self.format, copy=own)

    def _compress_sparse(self, words: Words, own: Words, form: ValueForm, sections: SectionWriter) -> None:
        """Positions, moves and literals of the values that changed; one pass over words and own."""
        most = min(CHUNK_VALUES, self.num_values)
        small = _Changes(int(form.small_share * self.num_values), form.small_escape)
        large = _Changes(int((1 - form.small_share) * self.num_values), form.escape)
        finder, moves = ChangeFinder(most), Moves(self.format, most, BYTE_ESCAPE)
        sizes = SizeFinder(self.format, most, form.boundary) if form.boundary else None
        literals: list[Words] = []
        num_small = 0  # so far
        for chunk in chunks_of(self.num_values):
            now, last = words[chunk], own[chunk]
            is_changed = finder.compare(now, last)
            small_in_chunk = 0 if sizes is None else sizes.look_at(last)
            if is_changed:
                changed = finder.positions()
                fresh = now[changed]
                # with many changes, going through all values costs less than picking them out
                is_sparse = 4 * finder.count < len(now)
                moved = moves.encode(fresh, last[changed]) if is_sparse else moves.encode(now, last)[changed]
                if sizes is None:
                    large.positions.add(chunk.start, changed, finder.bitmap())
                    literals.append(fresh[large.add_moves(moved)])
                else:
                    is_small, before = sizes.is_small().take(changed), sizes.num_small_before(changed)
                    of_small, of_large = np.flatnonzero(is_small), np.flatnonzero(~is_small)  # faster than masks
                    small.positions.add_some(num_small, before.take(of_small), small_in_chunk)
                    large_ranks = (changed - before).take(of_large)
                    large.positions.add_some(chunk.start - num_small, large_ranks, len(now) - small_in_chunk)
                    for part, changes in ((of_small, small), (of_large, large)):
                        literals.append(fresh.take(part[changes.add_moves(moved.take(part))]))
                last[changed] = fresh
            num_small += small_in_chunk
        if sizes is None:
            for _ in range(_SMALL_SECTIONS):
                sections.empty()
        else:
            sections.reserve(1)[:] = form.boundary
            small.write(sections, num_small)
        large.write(sections, self.num_values - num_small)
        write_literals(sections, np.concatenate(literals) if literals else words[:0], self.format)

    def _compress_dense(self, words: Words, own: Words, escape: int, sections: SectionWriter) -> None:
        """A move for every value, and the literals among them."""
        moves = Moves(self.format, min(CHUNK_VALUES, self.num_values), escape)
        literals: list[Words] = []

        def symbols() -> Iterator[Bytes]:
            literals.clear()
            for chunk in chunks_of(self.num_values):
                moved = moves.encode(words[chunk], own[chunk])
                literals.append(words[chunk][np.flatnonzero(moved == escape)])
                yield moved

        sections.empty(Coding.DENSE)
        write_moves(sections, symbols, self.num_values, escape)
        write_literals(sections, np.concatenate(literals), self.format)
        np.copyto(own, words)

    def prepare(self) -> None:
        """PreDecmp: the cache, on first use."""
        if self._value_cache is None:
            self._value_cache = zeros_tensor((self.num_peers, self.num_values), self.dtype)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._value_cache is not None
        cache = self._value_cache[first_peer : first_peer + len(sections)]
        for row, received in zip(self.format.words(cache), sections, strict=True):
            if all(one.coding == Coding.PLAIN and not len(one.data) for one in received):
                continue
            boundary, *of_small, where, what, remainders, exponents = received
            if not len(boundary.data):
                for one in (boundary, *of_small):
                    one.check_nothing()
            if where.coding == Coding.ALL:
                boundary.check_nothing()
                where.check_empty()
                what.check_nothing()
                read_literals(remainders, exponents, self.format, row)
            else:
                self._move(row, received)
        integers = self.format.int_dtype  # copied as integers: float copies may quiet signalling NaNs on some devices
        out.view(integers).copy_(cache.view(integers))

    def _move(self, row: Words, received: Sequence[StoredSection]) -> None:
        """Applies moves and literals to the values of one peer [num_values]."""
        boundary, where_small, what_small, where, what, remainders, exponents = received
        most = min(CHUNK_VALUES, self.num_values)
        literals = _LiteralReader(remainders, exponents, self.format, self.num_values)
        moves = Moves(self.format, most, BYTE_ESCAPE)

        def moved(last: Words, reader: MoveReader) -> Words:
            symbols = reader.read(len(last))
            fresh = np.empty_like(last)
            moves.decode(last, symbols, fresh)
            escapes = np.flatnonzero(symbols == reader.escape)
            fresh[escapes] = literals.read(len(escapes))
            return fresh

        reader = MoveReader(what, most_moves=self.num_values)
        if where.coding == Coding.DENSE:
            boundary.check_nothing()
            where.check_empty()
            for chunk in chunks_of(self.num_values):
                row[chunk] = moved(row[chunk], reader)
        elif not len(boundary.data):
            for positions in position_batches(where, self.num_values):
                row[positions] = moved(row[positions], reader)
        else:
            sizes = SizeFinder(self.format, most, _boundary_of(boundary, self.format))
            num_small = sum(sizes.look_at(row[chunk]) for chunk in chunks_of(self.num_values))
            small_reader = MoveReader(what_small, most_moves=num_small)
            small = PositionReader(where_small, num_small)
            large = PositionReader(where, self.num_values - num_small)
            num_small = 0  # so far
            for chunk in chunks_of(self.num_values):
                last = row[chunk]
                small_in_chunk = sizes.look_at(last)
                num_large = chunk.start - num_small
                small_ranks = small.below(num_small + small_in_chunk) - num_small
                large_ranks = large.below(num_large + len(last) - small_in_chunk) - num_large
                small_positions, large_positions = sizes.positions_of(small_ranks, large_ranks)
                for positions, one in ((small_positions, small_reader), (large_positions, reader)):
                    if len(positions):
                        last[positions] = moved(last[positions], one)
                num_small += small_in_chunk
            small.finish()
            large.finish()
            small_reader.finish()
        reader.finish()
        literals.finish()

    def forget(self) -> None:
        """Empties both caches."""
        self._own = self._value_cache = None


class _Changes:
    """Where values changed and by how much, of all values of a run or of its small or large ones."""

    def __init__(self, about_how_many_values: int, escape: int) -> None:
        self.positions = PositionWriter(about_how_many_values)
        self._escape = escape
        self._moves: list[Bytes] = []

    def add_moves(self, symbols: Bytes) -> npt.NDArray[np.int64]:
        """Moves with the escape of bytes, uint8 [k] -> which of them are literals here."""
        moved = np.minimum(symbols, self._escape)
        self._moves.append(moved)
        if int(moved.max(initial=0)) < self._escape:
            return np.empty(0, np.int64)
        return np.flatnonzero(moved == self._escape)

    def write(self, sections: SectionWriter, num_values: int) -> None:
        """Adds the two sections; `num_values` is how many values the positions were counted among."""
        self.positions.write(sections, num_values)
        whole = np.concatenate(self._moves) if self._moves else np.empty(0, np.uint8)
        write_moves(sections, lambda: [whole], self.positions.count, self._escape)


class _LiteralReader:
    """Gives the literals of a run in order. Raises `CieraDecodeError` unless exactly all of them are asked for."""

    def __init__(self, remainders: StoredSection, exponents: StoredSection, fmt: FloatFormat, most: int) -> None:
        count = fmt.num_values_of(len(remainders.data))
        if count is None or count > most:
            raise CieraDecodeError(f"{len(remainders.data)} bytes of remainders belong to no number of literals")
        self._literals: Words = np.empty(count, f"<u{fmt.item_bytes}")
        read_literals(remainders, exponents, fmt, self._literals)
        self._num_read = 0

    def read(self, count: int) -> Words:
        """The next ones."""
        start, self._num_read = self._num_read, self._num_read + count
        if self._num_read > len(self._literals):
            raise CieraDecodeError(f"moves ask for more literals than the {len(self._literals)} that there are")
        return self._literals[start : self._num_read]

    def finish(self) -> None:
        """Checks that all were asked for."""
        if self._num_read != len(self._literals):
            raise CieraDecodeError(f"moves ask for {self._num_read} of {len(self._literals)} literals")


def _boundary_of(section: StoredSection, fmt: FloatFormat) -> int:
    if section.coding != Coding.PLAIN or len(section.data) != 1 or not 0 < section.data[0] < 1 << fmt.exponent_bits:
        raise CieraDecodeError(f"a section of {len(section.data)} bytes is no exponent between small and large values")
    return int(section.data[0])


def write_literals(sections: SectionWriter, words: Words, fmt: FloatFormat, copy: Words | None = None) -> None:
    """Two sections of words [n]: their remainders, plain, and their exponents. Also copies them into `copy` [n]."""
    plane = sections.reserve(fmt.remainder_bytes(len(words)))

    def exponents() -> Iterator[Bytes]:
        for chunk, part in split(words, fmt, plane):
            if copy is not None:
                copy[chunk] = words[chunk]
            yield part

    sections.code(exponents, len(words), fmt.exponent_bits)


def read_literals(remainders: StoredSection, exponents: StoredSection, fmt: FloatFormat, out: Words) -> None:
    """The inverse: fills `out` [n]. Raises `CieraDecodeError` unless the sections hold n literals."""
    if remainders.coding != Coding.PLAIN or len(remainders.data) != fmt.remainder_bytes(len(out)):
        raise CieraDecodeError(f"{len(remainders.data)} bytes of remainders stand where {len(out)} values belong")
    reader = SymbolReader(exponents, len(out), symbol_bits=fmt.exponent_bits)
    merger = Merger(fmt, len(out))
    for chunk in chunks_of(len(out)):
        part = reader.read(chunk.stop - chunk.start)
        merger.merge(part[None], remainders.data[None], chunk, out[None, chunk])
    reader.finish()

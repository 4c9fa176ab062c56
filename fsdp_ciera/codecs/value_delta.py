"""`value_delta`: which values changed, and by how many units in the last place. A repeat gather sends nothing.

sender    changed = values != own last ones
          payload = positions | changes in ulp, a byte or half a byte each | sign+mantissa and exponents of larger changes
receiver  ValueCache[positions] = moved or replaced;  copy ValueCache
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.codecs.moves import NIBBLE_ESCAPE, MoveReader, write_moves
from fsdp_ciera.codecs.survey import choose_value_form
from fsdp_ciera.entropy import Coding, SectionWriter, SymbolReader
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.formats import FloatFormat, Words
from fsdp_ciera.kernels.ops import (
    CHUNK_VALUES,
    Bytes,
    ChangeFinder,
    Merger,
    Moves,
    chunks_of,
    split,
    zeros_tensor,
)
from fsdp_ciera.positions import PositionWriter, most_position_bytes, position_batches


class ValueDelta(FloatRunCodec):
    """Sends the signed distance to the last value among the numbers of its format, for the values that changed.

    Wire, per value: 0.1 to 2 bits in the first gather after an optimizer step, 0 in the next ones. Memory: the own shard
    and every peer's once more, in the gathered dtype (2 bytes a value of bf16). Exact for every bit pattern: distances
    are taken between bit patterns in the order of the numbers, and wrap around. A distance too large for
    its symbol travels as the value itself, a *literal*.
    """

    name: ClassVar[str] = "value_delta"
    num_sections: ClassVar[int] = 4

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
        """Positions, one byte a move, and every value as a literal."""
        literal_bytes = self.format.remainder_bytes(self.num_values) + self.num_values
        return most_position_bytes(self.num_values) + self.num_values + literal_bytes

    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Cmp."""
        words = self.format.words(values)
        if self._own is None:
            self._own = zeros_tensor((self.num_values,), self.dtype)
            form, escape = Coding.ALL, NIBBLE_ESCAPE
        else:
            form, escape = choose_value_form(words, self.format.words(self._own), self.format)
        own = self.format.words(self._own)
        if form == Coding.PLAIN:
            self._compress_sparse(words, own, escape, sections)
        elif form == Coding.DENSE:
            self._compress_dense(words, own, escape, sections)
        else:
            sections.empty(Coding.ALL)
            sections.empty()
            write_literals(sections, words, self.format, copy=own)

    def _compress_sparse(self, words: Words, own: Words, escape: int, sections: SectionWriter) -> None:
        """Positions, moves and literals of the values that changed; one pass over words and own."""
        most = min(CHUNK_VALUES, self.num_values)
        positions, finder, moves = PositionWriter(self.num_values), ChangeFinder(most), Moves(self.format, most, escape)
        symbols: list[Bytes] = []
        literals: list[Words] = []
        for chunk in chunks_of(self.num_values):
            now, last = words[chunk], own[chunk]
            if not finder.compare(now, last):
                continue
            changed = finder.positions()
            if 4 * finder.count < len(now):
                fresh = now[changed]
                moved = moves.encode(fresh, last[changed]).copy()
                literals.append(fresh[np.flatnonzero(moved == escape)])
                last[changed] = fresh
            else:  # going through all values costs less than picking out that many
                moved = moves.encode(now, last)[changed]
                literals.append(now[changed[np.flatnonzero(moved == escape)]])
                np.copyto(last, now)
            positions.add(chunk.start, changed, finder.bitmap())
            symbols.append(moved)
        positions.write(sections)
        whole = np.concatenate(symbols) if symbols else np.empty(0, np.uint8)
        write_moves(sections, lambda: [whole], positions.count, escape)
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
        for row, (where, what, remainders, exponents) in zip(self.format.words(cache), sections, strict=True):
            if all(one.coding == Coding.PLAIN and not len(one.data) for one in (where, what, remainders, exponents)):
                continue
            if where.coding == Coding.ALL:
                where.check_empty()
                what.check_empty()
                read_literals(remainders, exponents, self.format, row)
            else:
                self._move(row, where, what, remainders, exponents)
        integers = self.format.int_dtype  # copied as integers: float copies may quiet signalling NaNs on some devices
        out.view(integers).copy_(cache.view(integers))

    def _move(
        self, row: Words, where: StoredSection, what: StoredSection, remainders: StoredSection, exponents: StoredSection
    ) -> None:
        """Applies moves and literals to the values of one peer [num_values]."""
        num_literals = self.format.num_values_of(len(remainders.data))
        if num_literals is None or num_literals > self.num_values:
            raise CieraDecodeError(f"{len(remainders.data)} bytes of remainders belong to no number of literals")
        literals = np.empty(num_literals, row.dtype)
        read_literals(remainders, exponents, self.format, literals)
        reader = MoveReader(what, most_moves=self.num_values)
        moves = Moves(self.format, min(CHUNK_VALUES, self.num_values), reader.escape)
        num_used = 0

        def moved(last: Words) -> Words:
            nonlocal num_used
            symbols = reader.read(len(last))
            fresh = np.empty_like(last)
            moves.decode(last, symbols, fresh)
            escapes = np.flatnonzero(symbols == reader.escape)
            if num_used + len(escapes) > num_literals:
                raise CieraDecodeError(f"moves ask for more literals than the {num_literals} that there are")
            fresh[escapes] = literals[num_used : num_used + len(escapes)]
            num_used += len(escapes)
            return fresh

        if where.coding == Coding.DENSE:
            where.check_empty()
            for chunk in chunks_of(self.num_values):
                row[chunk] = moved(row[chunk])
        else:
            for positions in position_batches(where, self.num_values):
                row[positions] = moved(row[positions])
        reader.finish()
        if num_used != num_literals:
            raise CieraDecodeError(f"moves ask for {num_used} of {num_literals} literals")

    def forget(self) -> None:
        """Empties both caches."""
        self._own = self._value_cache = None


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

"""`exponent_delta`: which exponents changed, and by how much, instead of whole blocks of them.

sender    split;  changed = exponents != own last ones
          payload = sign+mantissa of all values | positions | exponent changes (mod 256)
receiver  ExpCache[positions] += changes;  merge(ExpCache, sign+mantissa)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.codecs.survey import choose_exponent_form
from fsdp_ciera.entropy import Coding, SectionWriter, SymbolReader, check_width
from fsdp_ciera.kernels.formats import Words
from fsdp_ciera.kernels.ops import CHUNK_VALUES, Bytes, ChangeFinder, chunks_of, merge_rows, split, zeros_tensor
from fsdp_ciera.positions import PositionWriter, most_position_bytes, position_batches


class ExponentDelta(FloatRunCodec):
    """Keeps nearly the 2x of unchanged exponents at every learning rate (no block is all or nothing).

    Wire, per value: sign+mantissa (8 bits of bf16) + 0.01 to 0.06 bit for changed exponents. Memory: one byte a value of
    the own shard and of every peer's. Exact by comparison, no hash.
    """

    name: ClassVar[str] = "exponent_delta"
    num_sections: ClassVar[int] = 2

    def __init__(self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> None:
        super().__init__(num_values, dtype, block_size, num_peers)
        self._own: torch.Tensor | None = None  # uint8 [num_values]
        self._exp_cache: torch.Tensor | None = None  # uint8 [num_peers, num_values]

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Own exponents and ExpCache."""
        return (num_peers + 1) * num_values

    @property
    def fixed_bytes(self) -> int:
        """The sign+mantissa plane."""
        return self.format.remainder_bytes(self.num_values)

    @property
    def most_section_bytes(self) -> int:
        """Positions, and one byte an exponent."""
        return most_position_bytes(self.num_values) + self.num_values

    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Cmp."""
        words, plane = self.format.words(values), fixed.numpy()
        form = Coding.ALL if self._own is None else choose_exponent_form(words, self._own.numpy(), self.format)
        if self._own is None:
            self._own = zeros_tensor((self.num_values,), torch.uint8)
        own = self._own.numpy()
        if form == Coding.PLAIN:
            self._compress_sparse(words, plane, own, sections)
            return
        sections.empty(form)
        if form == Coding.ALL:
            sections.code(
                lambda: (exponents for _, exponents in split(words, self.format, plane, exponents=own)),
                self.num_values,
                self.format.exponent_bits,
            )
            return

        def changes() -> Iterator[Bytes]:
            for chunk, exponents in split(words, self.format, plane):
                yield exponents - own[chunk]

        sections.code(changes, self.num_values)
        for _ in split(words, self.format, exponents=own):
            pass

    def _compress_sparse(self, words: Words, plane: Bytes, own: Bytes, sections: SectionWriter) -> None:
        positions, changes = PositionWriter(self.num_values), []
        finder = ChangeFinder(min(CHUNK_VALUES, self.num_values))
        for chunk, exponents in split(words, self.format, plane):
            last = own[chunk]
            if finder.compare(exponents, last):
                changed = finder.positions()
                fresh = exponents[changed]
                changes.append(fresh - last[changed])
                last[changed] = fresh
                positions.add(chunk.start, changed, finder.bitmap())
        positions.write(sections)
        sections.code(lambda: changes, positions.count)

    def prepare(self) -> None:
        """PreDecmp: the cache, on first use."""
        if self._exp_cache is None:
            self._exp_cache = zeros_tensor((self.num_peers, self.num_values), torch.uint8)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._exp_cache is not None
        planes = fixed.numpy()
        cache = self._exp_cache.numpy()[first_peer : first_peer + len(planes)]
        for row, (where, what) in zip(cache, sections, strict=True):
            if where.coding in (Coding.ALL, Coding.DENSE):
                self._replace(row, where, what)
            else:
                self._change(row, where, what)
        merge_rows(cache, planes, self.format, self.format.words(out))

    def _replace(self, row: Bytes, where: StoredSection, what: StoredSection) -> None:
        """All exponents of one peer [num_values], as they are or as changes."""
        where.check_empty()
        is_all = where.coding == Coding.ALL
        reader = SymbolReader(what, self.num_values, symbol_bits=self.format.exponent_bits if is_all else 8)
        for chunk in chunks_of(self.num_values):
            if is_all:
                reader.read_into(row[chunk])
            else:
                row[chunk] += reader.read(chunk.stop - chunk.start)
                check_width(row[chunk], self.format.exponent_bits)
        reader.finish()

    def _change(self, row: Bytes, where: StoredSection, what: StoredSection) -> None:
        """Some exponents of one peer [num_values]."""
        reader = SymbolReader(what, most_symbols=self.num_values)
        for positions in position_batches(where, self.num_values):
            fresh = row[positions] + reader.read(len(positions))
            check_width(fresh, self.format.exponent_bits)
            row[positions] = fresh
        reader.finish()

    def forget(self) -> None:
        """Empties both caches."""
        self._own = self._exp_cache = None

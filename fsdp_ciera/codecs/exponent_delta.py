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
from fsdp_ciera.codecs.planes import merge, split
from fsdp_ciera.codecs.positions import most_position_bytes, read_positions, write_positions
from fsdp_ciera.codecs.sections import Coding, SectionWriter, SymbolReader, check_width
from fsdp_ciera.codecs.survey import choose_exponent_form
from fsdp_ciera.kernels.changes import Form, Received
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.memory import Bytes, zeros_tensor
from fsdp_ciera.kernels.reference import chunks_of


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
        form = Coding.ALL if self._own is None else choose_exponent_form(values, self._own, self.format)
        if self._own is None:
            self._own = zeros_tensor((self.num_values,), torch.uint8)
        own = self._own
        if form == Coding.PLAIN:
            self._compress_sparse(values, fixed, own, sections)
            return
        sections.empty(form)
        if form == Coding.ALL:
            sections.code(
                lambda: (exponents.numpy() for _, exponents in split(values, self.format, fixed, exponents=own)),
                self.num_values,
                self.format.exponent_bits,
            )
            return

        def changes() -> Iterator[Bytes]:
            for chunk, exponents in split(values, self.format, fixed):
                yield (exponents - own[chunk]).numpy()

        sections.code(changes, self.num_values)
        for _ in split(values, self.format, exponents=own):
            pass

    def _compress_sparse(
        self, values: torch.Tensor, plane: torch.Tensor, own: torch.Tensor, sections: SectionWriter
    ) -> None:
        kernels = kernels_of(values)
        bits, moves = [], []
        for chunk, exponents in split(values, self.format, plane):
            found = kernels.find_changes(exponents, own[chunk], None, Form())
            assert found.changed is not None
            bits.append(found.changed)
            moves.append(found.moves.numpy())
        num_changed = sum(map(len, moves))
        write_positions(sections, torch.cat(bits), self.num_values, num_changed)
        sections.code(lambda: moves, num_changed)

    def prepare(self) -> None:
        """PreDecmp: the cache, on first use."""
        if self._exp_cache is None:
            self._exp_cache = zeros_tensor((self.num_peers, self.num_values), torch.uint8)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._exp_cache is not None
        caches = self._exp_cache[first_peer : first_peer + len(fixed)]
        whole = slice(0, self.num_values)
        for plane, row, (where, what), into in zip(fixed, caches, sections, out, strict=True):
            if where.coding in (Coding.ALL, Coding.DENSE):
                self._replace(row.numpy(), where, what)
            else:
                self._change(row, where, what)
            merge(row, plane, self.format, self.num_values, whole, into)

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

    def _change(self, row: torch.Tensor, where: StoredSection, what: StoredSection) -> None:
        """Some exponents of one peer [num_values]."""
        bits, num_changed = read_positions(where, self.num_values)
        moves = torch.from_numpy(SymbolReader(what, num_changed).read_all())
        if num_changed:
            none = moves[:0]
            kernels_of(row).apply_changes(row, None, Received(Form(), bits, None, none, moves, none))
            check_width(row.numpy(), self.format.exponent_bits)

    def forget(self) -> None:
        """Empties both caches."""
        self._own = self._exp_cache = None

"""`entropy`: entropy-coded exponents, no cache. What every gather on its own can save: about a third of bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.entropy import SectionWriter, SymbolReader
from fsdp_ciera.kernels.ops import Bytes, Merger, chunks_of, split


class Entropy(FloatRunCodec):
    """Sign+mantissa as they are, exponents entropy-coded (2.6 to 2.7 bits of 8 for trained weights). Memory: none."""

    name: ClassVar[str] = "entropy"
    stateless: ClassVar[bool] = True
    num_sections: ClassVar[int] = 1

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """None."""
        return 0

    @property
    def fixed_bytes(self) -> int:
        """The sign+mantissa plane."""
        return self.format.remainder_bytes(self.num_values)

    @property
    def most_section_bytes(self) -> int:
        """One byte an exponent."""
        return self.num_values

    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Cmp."""
        words, plane = self.format.words(values), fixed.numpy()

        def exponents() -> Iterator[Bytes]:
            return (part for _, part in split(words, self.format, plane))

        sections.code(exponents, self.num_values, self.format.exponent_bits)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        planes, words = fixed.numpy(), self.format.words(out)
        merger = Merger(self.format, self.num_values)
        for peer, (section,) in enumerate(sections):
            row = slice(peer, peer + 1)
            reader = SymbolReader(section, self.num_values, symbol_bits=self.format.exponent_bits)
            for chunk in chunks_of(self.num_values):
                exponents = reader.read(chunk.stop - chunk.start)
                merger.merge(exponents[None], planes[row], chunk, words[row, chunk])
            reader.finish()

"""`entropy`: entropy-coded exponents, no cache. What every gather on its own can save: about a third of bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.codecs.planes import merge, split
from fsdp_ciera.codecs.sections import SectionWriter, SymbolReader
from fsdp_ciera.kernels.memory import Bytes
from fsdp_ciera.kernels.reference import chunks_of


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

        def exponents() -> Iterator[Bytes]:
            return (part.numpy() for _, part in split(values, self.format, fixed))

        sections.code(exponents, self.num_values, self.format.exponent_bits)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        for plane, (section,), row in zip(fixed, sections, out, strict=True):
            reader = SymbolReader(section, self.num_values, symbol_bits=self.format.exponent_bits)
            for chunk in chunks_of(self.num_values):
                exponents = torch.from_numpy(reader.read(chunk.stop - chunk.start))
                merge(exponents, plane, self.format, self.num_values, chunk, row[chunk])
            reader.finish()

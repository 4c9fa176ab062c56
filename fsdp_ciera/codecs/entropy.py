"""`entropy`: entropy-coded exponents, no cache. What every gather on its own can save: about a third of bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.entropy import Section, code_section, decode_section
from fsdp_ciera.kernels.reference import merge_planes, split_planes


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

    def compress(self, values: torch.Tensor, fixed: torch.Tensor) -> Sequence[Section]:
        """Cmp."""
        exponents, remainder = split_planes(values.view(1, -1), self.format)
        fixed.copy_(remainder[0])
        return (code_section(exponents[0], self.format.exponent_bits),)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        for peer, (section,) in enumerate(sections):
            exponents = decode_section(section.coding, section.data, self.num_values, self.format.exponent_bits)
            merge_planes(exponents.view(1, -1), fixed[peer : peer + 1], self.format, out[peer : peer + 1])

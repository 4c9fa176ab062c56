"""`exponent_delta`: which exponents changed, and by how much, instead of whole blocks of them.

sender    split;  changed = exponents != own last ones
          payload = sign+mantissa of all values | positions | exponent changes (mod 256)
receiver  ExpCache[positions] += changes;  merge(ExpCache, sign+mantissa)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.entropy import Coding, Section, check_width, code_section, decode_section
from fsdp_ciera.kernels.reference import merge_planes, split_planes
from fsdp_ciera.positions import code_positions, decode_positions, is_all

_MOST_CHANGED = 0.5  # above this share, positions cost more than they save


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

    def compress(self, values: torch.Tensor, fixed: torch.Tensor) -> Sequence[Section]:
        """Cmp."""
        planes, remainder = split_planes(values.view(1, -1), self.format)
        exponents, last = planes[0], self._own
        fixed.copy_(remainder[0])
        self._own = exponents
        if last is not None:
            positions = (exponents != last).nonzero().view(-1)
            if len(positions) <= _MOST_CHANGED * self.num_values:
                return code_positions(positions), code_section(exponents[positions] - last[positions])
        return Section(Coding.ALL, b""), code_section(exponents, self.format.exponent_bits)

    def prepare(self) -> None:
        """PreDecmp: the cache, on first use."""
        if self._exp_cache is None:
            self._exp_cache = torch.zeros(self.num_peers, self.num_values, dtype=torch.uint8)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._exp_cache is not None
        cache = self._exp_cache[first_peer : first_peer + fixed.shape[0]]
        for peer, (where, what) in enumerate(sections):
            if is_all(where):
                cache[peer] = decode_section(what.coding, what.data, self.num_values, self.format.exponent_bits)
                continue
            positions = decode_positions(where, self.num_values)
            if len(positions):
                fresh = cache[peer][positions] + decode_section(what.coding, what.data, len(positions))
                check_width(fresh, self.format.exponent_bits)
                cache[peer][positions] = fresh
        merge_planes(cache, fixed, self.format, out)

    def forget(self) -> None:
        """Empties both caches."""
        self._own = self._exp_cache = None

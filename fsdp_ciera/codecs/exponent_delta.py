"""`exponent_delta`: which exponents changed, and by how much, instead of whole blocks of them.

sender    changed = exponents != own last exponents
          payload = sign+mantissa of all values | positions | exponent changes (mod 256)
receiver  ExpCache[positions] += changes;  merge(ExpCache, sign+mantissa)
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fsdp_ciera.codecs.base import FloatCodec, UnitCoder


class ExponentDelta(FloatCodec):
    """Keeps nearly the 2x of unchanged exponents at every learning rate: it sends changed exponents alone, not whole blocks.

    Wire, per value: sign+mantissa (8 bits of bf16) + 0.01 to 0.06 bit for changed exponents. Memory: one byte a value of
    the own shard and of every peer's. Exact by comparison, no hash.
    """

    name: ClassVar[str] = "exponent_delta"

    def __init__(self, coder: UnitCoder, in_place: bool = False) -> None:
        super().__init__(coder, in_place)
        self._own: torch.Tensor | None = None  # uint8 [num_values]
        self._exp_cache: torch.Tensor | None = None  # uint8 [num_peers, num_values]

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Bytes of this rank's own exponents and of ExpCache."""
        return (num_peers + 1) * num_values

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the sign+mantissa plane."""
        return self.coder.plane_bytes

    def prepare(self) -> None:
        """Allocates own exponents and ExpCache."""
        if self._own is None:
            self._own = self.coder.exponent_rows(1)[0]
        if self._exp_cache is None:
            self._exp_cache = self.coder.exponent_rows(self.unit.num_peers)

    def encode(self, values: torch.Tensor, sections: Any, is_full: bool) -> None:
        """Adds positions and changes of exponents."""
        self.coder.write_exponent_changes(values, None if is_full else self._own, sections)

    def fill(self, values: torch.Tensor, fixed: Any) -> None:
        """Writes the plane, and keeps the exponents in the same pass."""
        self.coder.fill_plane(values, fixed, self._own)

    def decode(self, received: Any, output: torch.Tensor) -> None:
        """Changes ExpCache, and merges it with the planes into values."""
        assert self._exp_cache is not None
        self.coder.read_exponent_changes(received, self._exp_cache)
        self.coder.merge(self._exp_cache, received, output)

    def seed(self, values: torch.Tensor, output: torch.Tensor) -> None:
        """Keeps the exponents of all ranks."""
        self.prepare()
        assert self._own is not None and self._exp_cache is not None
        self.coder.take_own_exponents(values, self._own)
        self.coder.take_exponents(output, self._exp_cache)

    def forget(self) -> None:
        """Drops own exponents and ExpCache."""
        self._own = self._exp_cache = None

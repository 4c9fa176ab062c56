"""`exponent_block`: the paper's codec (Algorithm 1), exactly.

sender    split -> exponents | sign+mantissa;  Hash: 128 bits per block of exponents;  changed = hash != HashCache
          payload = bitmap | sign+mantissa of all blocks | entropy-coded exponents of the changed blocks
receiver  ExpCache[changed blocks] = decoded exponents;  merge(ExpCache, sign+mantissa)
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fsdp_ciera.codecs.base import FloatCodec, UnitCoder


class ExponentBlock(FloatCodec):
    """Reuses the exponents of unchanged blocks (paper sections 3.1 and 3.2).

    Wire, per value: sign+mantissa (8 bits of bf16, 11 of fp16, 24 of fp32) + the entropy-coded exponent where the block
    changed + 1/B bitmap bit where any did. Memory: 16 bytes per own block (HashCache) and one byte per value of every peer
    (ExpCache), rounded up to whole blocks. A block counts as unchanged when its 128-bit hash is: wrong with probability
    2**-128 per comparison (paper 3.1).
    """

    name: ClassVar[str] = "exponent_block"

    def __init__(self, coder: UnitCoder, in_place: bool = False) -> None:
        super().__init__(coder, in_place)
        self._hash_cache: torch.Tensor | None = None  # int64 [num_blocks, 2]
        self._exp_cache: torch.Tensor | None = None  # uint8 [num_peers, num_blocks * block_size]
        self._fresh_hashes: torch.Tensor | None = None  # of the values that were encoded last
        self._block_counts = (0, 0)

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Bytes of HashCache and ExpCache; the second term is the paper's M_i = (W - 1) S_e."""
        num_blocks = -(-num_values // block_size)
        return num_blocks * 16 + num_peers * num_blocks * block_size

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the sign+mantissa plane."""
        return self.coder.plane_bytes

    @property
    def block_counts(self) -> tuple[int, int]:
        """The number of blocks of the unit, and the number with unchanged exponents."""
        return self._block_counts

    def prepare(self) -> None:
        """Allocates ExpCache."""
        if self._exp_cache is None:
            self._exp_cache = self.coder.exponent_rows(self.unit.num_peers, in_blocks=True)

    def detect(self, values: torch.Tensor) -> None:
        """Hashes all blocks."""
        self._fresh_hashes = self.coder.hash_blocks(values)

    def encode(self, values: torch.Tensor, sections: Any, is_full: bool) -> None:
        """Adds the exponents of blocks whose hash differs from that in HashCache."""
        assert self._fresh_hashes is not None
        last = None if is_full else self._hash_cache
        self._block_counts = self.coder.write_blocks(values, self._fresh_hashes, last, sections)

    def fill(self, values: torch.Tensor, fixed: Any) -> None:
        """Writes the plane, and moves the fresh hashes into HashCache."""
        self.coder.fill_plane(values, fixed)
        if self._fresh_hashes is not None:
            self._hash_cache, self._fresh_hashes = self._fresh_hashes, None

    def decode(self, received: Any, output: torch.Tensor) -> None:
        """Replaces the exponents of changed blocks in ExpCache, and merges it with the planes into values."""
        assert self._exp_cache is not None
        self.coder.read_blocks(received, self._exp_cache)
        self.coder.merge(self._exp_cache, received, output)

    def seed(self, values: torch.Tensor, output: torch.Tensor) -> None:
        """Hashes this rank's shard, and keeps the exponents of the other shards."""
        self.prepare()
        assert self._exp_cache is not None
        self.coder.take_exponents(output, self._exp_cache)
        self._hash_cache, self._fresh_hashes = self.coder.hash_blocks(values), None

    def forget(self) -> None:
        """Drops HashCache and ExpCache."""
        self._hash_cache = self._exp_cache = self._fresh_hashes = None

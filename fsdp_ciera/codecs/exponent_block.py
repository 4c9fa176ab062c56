"""`exponent_block`: the paper's codec (Algorithm 1), exactly.

    sender    split -> exponents | sign+mantissa;  Hash: 128 bits per block of exponents;  changed = hash != HashCache
              payload = bitmap | sign+mantissa of all blocks | entropy-coded exponents of the changed blocks
    receiver  ExpCache[changed blocks] = decoded exponents;  merge(ExpCache, sign+mantissa)

The bytes are described in docs/wire-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.entropy import Section, code_section, decode_section
from fsdp_ciera.kernels.formats import packed_bytes
from fsdp_ciera.kernels.reference import hash_blocks, merge_planes, pack_bits, split_planes, unpack_bits


class ExponentBlock(FloatRunCodec):
    """Reuses the exponents of unchanged blocks (paper sections 3.1 and 3.2).

    Wire, per value: sign+mantissa (8 bits of bf16, 11 of fp16, 24 of fp32) + 1/B bitmap bit + the entropy-coded exponent
    where the block changed. Memory: 16 bytes per own block (HashCache) and one byte per value of every peer (ExpCache),
    rounded up to whole blocks. A block counts as unchanged when its 128-bit hash is: wrong with probability 2**-128 per
    comparison (paper 3.1).
    """

    name: ClassVar[str] = "exponent_block"
    num_sections: ClassVar[int] = 1

    def __init__(self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> None:
        super().__init__(num_values, dtype, block_size, num_peers)
        self.num_blocks = -(-num_values // block_size)
        self.bitmap_bytes = packed_bytes(self.num_blocks, 1)
        self._hash_cache: torch.Tensor | None = None  # int64 [num_blocks, 2]
        self._exp_cache: torch.Tensor | None = None  # uint8 [num_peers, num_blocks, block_size]
        self._num_reused = 0
        self._exponents: torch.Tensor | None = None  # between detect and compress: uint8 [num_blocks, block_size]
        self._remainder: torch.Tensor | None = None
        self._changed: torch.Tensor | None = None  # bool [num_blocks]

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """HashCache + ExpCache; the paper's M_i = (W - 1) S_e is the second term."""
        num_blocks = -(-num_values // block_size)
        return num_blocks * 16 + num_peers * num_blocks * block_size

    @property
    def fixed_bytes(self) -> int:
        """Bitmap and sign+mantissa plane."""
        return self.bitmap_bytes + self.format.remainder_bytes(self.num_values)

    @property
    def block_counts(self) -> tuple[int, int]:
        """All blocks of the run, and those with unchanged exponents."""
        return self.num_blocks, self._num_reused

    def detect(self, values: torch.Tensor) -> None:
        """Hash."""
        exponents, remainder = split_planes(values.view(1, -1), self.format)
        blocks = exponents
        if self.num_values % self.block_size:  # the last block's unused values are zero, at sender and receivers alike
            blocks = torch.zeros(self.num_blocks * self.block_size, dtype=torch.uint8)
            blocks[: self.num_values] = exponents[0]
        self._exponents = blocks.view(self.num_blocks, self.block_size)
        self._remainder = remainder[0]
        hashes = hash_blocks(self._exponents)
        if self._hash_cache is None:
            self._changed = torch.ones(self.num_blocks, dtype=torch.bool)
        else:
            self._changed = (hashes != self._hash_cache).any(dim=1)
        self._hash_cache = hashes

    def compress(self, values: torch.Tensor, fixed: torch.Tensor) -> Sequence[Section]:
        """Cmp."""
        assert self._exponents is not None and self._remainder is not None and self._changed is not None
        fixed[: self.bitmap_bytes] = pack_bits(self._changed.view(1, -1).to(torch.uint8), 1)[0]
        fixed[self.bitmap_bytes :] = self._remainder
        self._num_reused = self.num_blocks - int(self._changed.sum())
        blocks = self._exponents[self._changed] if self._num_reused else self._exponents
        symbols = blocks.view(-1)
        if self.num_blocks and self._changed[-1]:
            symbols = symbols[: symbols.numel() - self._num_unused]
        section = code_section(symbols, self.format.exponent_bits)
        self._exponents = self._remainder = self._changed = None
        return (section,)

    def prepare(self) -> None:
        """PreDecmp: the cache, on first use."""
        if self._exp_cache is None:
            self._exp_cache = torch.zeros(self.num_peers, self.num_blocks, self.block_size, dtype=torch.uint8)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._exp_cache is not None
        num_peers = fixed.shape[0]
        cache = self._exp_cache[first_peer : first_peer + num_peers]
        changed = unpack_bits(fixed[:, : self.bitmap_bytes], self.num_blocks, 1).bool()
        for peer, (section,) in enumerate(sections):
            self._update_cache(cache[peer], changed[peer], section)
        exponents = cache.view(num_peers, -1)[:, : self.num_values]
        merge_planes(exponents, fixed[:, self.bitmap_bytes :], self.format, out)

    def forget(self) -> None:
        """Empties HashCache and ExpCache."""
        self._hash_cache = self._exp_cache = self._exponents = self._remainder = self._changed = None

    @property
    def _num_unused(self) -> int:
        """Values by which the last block is short; they do not travel."""
        return self.num_blocks * self.block_size - self.num_values

    def _update_cache(self, cache: torch.Tensor, changed: torch.Tensor, section: StoredSection) -> None:
        num_changed = int(changed.sum())
        ends_in_last = bool(num_changed) and bool(changed[-1])
        num_symbols = num_changed * self.block_size - (self._num_unused if ends_in_last else 0)
        symbols = decode_section(section.coding, section.data, num_symbols, self.format.exponent_bits)
        if num_symbols == self.num_values:
            cache.view(-1)[:num_symbols] = symbols
        elif num_changed:
            blocks = torch.zeros(num_changed * self.block_size, dtype=torch.uint8)
            blocks[:num_symbols] = symbols
            cache[changed] = blocks.view(num_changed, self.block_size)

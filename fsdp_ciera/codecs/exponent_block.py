"""`exponent_block`: the paper's codec (Algorithm 1), exactly.

    sender    split -> exponents | sign+mantissa;  Hash: 128 bits per block of exponents;  changed = hash != HashCache
              payload = bitmap | sign+mantissa of all blocks | entropy-coded exponents of the changed blocks
    receiver  ExpCache[changed blocks] = decoded exponents;  merge(ExpCache, sign+mantissa)

The bytes are described in docs/wire-format.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.codecs.planes import merge, split, split_remainder
from fsdp_ciera.codecs.sections import SectionWriter, SymbolReader
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import packed_bytes
from fsdp_ciera.kernels.memory import Bytes, zeros_tensor
from fsdp_ciera.kernels.reference import CHUNK_VALUES, chunks_of, pack_bits, unpack_bits


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
        self._chunk_blocks = max(1, CHUNK_VALUES // block_size)
        self._hash_cache: torch.Tensor | None = None  # int64 [num_blocks, 2]
        self._exp_cache: torch.Tensor | None = None  # uint8 [num_peers, num_blocks, block_size]
        self._num_reused = 0
        self._changed: npt.NDArray[np.bool_] | None = None  # between detect and compress: [num_blocks]

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
    def most_section_bytes(self) -> int:
        """One byte an exponent."""
        return self.num_values

    @property
    def block_counts(self) -> tuple[int, int]:
        """All blocks of the run, and those with unchanged exponents."""
        return self.num_blocks, self._num_reused

    def detect(self, values: torch.Tensor) -> None:
        """Hash. The exponents are not kept for `compress`: taking them again costs less than memory for all of them."""
        hashes = kernels_of(values).hash_blocks(values, self.format, self.block_size)
        if self._hash_cache is None:
            self._changed = np.ones(self.num_blocks, np.bool_)
        else:
            self._changed = (self._hash_cache != hashes).any(dim=1).numpy()
        self._hash_cache = hashes

    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Cmp."""
        changed = self._changed
        assert changed is not None
        fixed[: self.bitmap_bytes] = pack_bits(torch.from_numpy(changed.view(np.uint8)), 1)
        plane = fixed[self.bitmap_bytes :]
        num_changed = int(np.count_nonzero(changed))
        self._num_reused = self.num_blocks - num_changed
        self._changed = None
        if not num_changed:
            split_remainder(values, self.format, plane)
            sections.empty()
            return

        def symbols() -> Iterator[Bytes]:
            for chunk, exponents in split(
                values, self.format, plane, chunk_values=self._chunk_blocks * self.block_size
            ):
                first = chunk.start // self.block_size
                chosen = changed[first : first + -(-len(exponents) // self.block_size)]
                yield _of_blocks(exponents.numpy(), chosen, self.block_size)

        sections.code(symbols, self._num_symbols(changed), self.format.exponent_bits)

    def prepare(self) -> None:
        """PreDecmp: the cache, on first use."""
        if self._exp_cache is None:
            self._exp_cache = zeros_tensor((self.num_peers, self.num_blocks, self.block_size), torch.uint8)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._exp_cache is not None
        caches = self._exp_cache[first_peer : first_peer + len(fixed)]
        whole = slice(0, self.num_values)
        for part, cache, (section,), row in zip(fixed, caches, sections, out, strict=True):
            changed = unpack_bits(part[: self.bitmap_bytes], self.num_blocks, 1).numpy().view(np.bool_)
            self._update_cache(cache.numpy(), changed, section)
            exponents = cache.view(-1)[whole]
            merge(exponents, part[self.bitmap_bytes :], self.format, self.num_values, whole, row)

    def forget(self) -> None:
        """Empties HashCache and ExpCache."""
        self._hash_cache = self._exp_cache = self._changed = None

    @property
    def _num_unused(self) -> int:
        """Values by which the last block is short; they do not travel, and count as 0."""
        return self.num_blocks * self.block_size - self.num_values

    def _num_symbols(self, changed: npt.NDArray[np.bool_]) -> int:
        num_changed = int(np.count_nonzero(changed))
        return num_changed * self.block_size - (self._num_unused if num_changed and changed[-1] else 0)

    def _update_cache(self, cache: npt.NDArray[Any], changed: npt.NDArray[np.bool_], section: StoredSection) -> None:
        """Cache uint8 [num_blocks, block_size] of one peer; `changed` [num_blocks]."""
        reader = SymbolReader(section, self._num_symbols(changed), symbol_bits=self.format.exponent_bits)
        flat = cache.reshape(-1)[: self.num_values]
        for blocks in chunks_of(self.num_blocks, self._chunk_blocks) if reader.num_symbols else ():
            chosen = changed[blocks]
            num_chosen = int(np.count_nonzero(chosen))
            if num_chosen == len(chosen):
                reader.read_into(flat[blocks.start * self.block_size : blocks.stop * self.block_size])
            elif num_chosen:
                num_symbols = min(num_chosen * self.block_size, reader.num_left)
                fresh = reader.read(num_symbols)
                if num_symbols % self.block_size:
                    fresh = np.concatenate([fresh, np.zeros(self._num_unused, np.uint8)])
                cache[blocks][chosen] = fresh.reshape(num_chosen, self.block_size)
        reader.finish()


def _of_blocks(exponents: Bytes, chosen: npt.NDArray[np.bool_], block_size: int) -> Bytes:
    """Exponents uint8 [n], n possibly short of whole blocks -> those of the chosen blocks [ceil(n / block_size)]."""
    if chosen.all():
        return exponents
    num_whole = len(exponents) // block_size
    whole = exponents[: num_whole * block_size].reshape(num_whole, block_size)[chosen[:num_whole]].reshape(-1)
    return np.concatenate([whole, exponents[num_whole * block_size :]]) if chosen[num_whole:].any() else whole

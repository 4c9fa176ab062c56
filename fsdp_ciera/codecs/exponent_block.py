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
from fsdp_ciera.entropy import SectionWriter, SymbolReader
from fsdp_ciera.kernels.formats import Words, packed_bytes
from fsdp_ciera.kernels.ops import (
    CHUNK_VALUES,
    BlockHasher,
    Bytes,
    chunks_of,
    merge_rows,
    pack_bits,
    split,
    unpack_bits,
    zeros_tensor,
)


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
        hashes = zeros_tensor((self.num_blocks, 2), torch.int64)
        fresh = hashes.numpy().view(np.uint64)
        hasher = BlockHasher(self.block_size, min(self._chunk_blocks, self.num_blocks))
        for blocks, exponents in self._blocks(self.format.words(values), None):
            hasher.add(exponents, fresh[blocks])
        hasher.finish(fresh)
        if self._hash_cache is None:
            self._changed = np.ones(self.num_blocks, np.bool_)
        else:
            self._changed = (self._hash_cache.numpy().view(np.uint64) != fresh).any(axis=1)
        self._hash_cache = hashes

    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Cmp."""
        changed, part = self._changed, fixed.numpy()
        assert changed is not None
        part[: self.bitmap_bytes] = pack_bits(changed.view(np.uint8), 1)
        words, plane = self.format.words(values), part[self.bitmap_bytes :]
        num_changed = int(np.count_nonzero(changed))
        self._num_reused = self.num_blocks - num_changed
        self._changed = None
        if not num_changed:
            for _ in split(words, self.format, plane, with_exponents=False):
                pass
            sections.empty()
            return

        def symbols() -> Iterator[Bytes]:
            for blocks, exponents in self._blocks(words, plane):
                chosen = changed[blocks]
                num_unused = self._num_unused if blocks.stop == self.num_blocks and chosen[-1] else 0
                part = (exponents if chosen.all() else exponents[chosen]).reshape(-1)
                yield part[: len(part) - num_unused]

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
        parts = fixed.numpy()
        num_peers = len(parts)
        cache = self._exp_cache.numpy()[first_peer : first_peer + num_peers]
        changed = unpack_bits(parts[:, : self.bitmap_bytes], self.num_blocks, 1).view(np.bool_)
        for peer, (section,) in enumerate(sections):
            self._update_cache(cache[peer], changed[peer], section)
        exponents = cache.reshape(num_peers, -1)[:, : self.num_values]
        merge_rows(exponents, parts[:, self.bitmap_bytes :], self.format, self.format.words(out))

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

    def _blocks(self, words: Words, plane: Bytes | None) -> Iterator[tuple[slice, Bytes]]:
        """Blocks by number, with their exponents uint8 [blocks, block_size]; also fills `plane`."""
        for chunk, exponents in split(words, self.format, plane, chunk_values=self._chunk_blocks * self.block_size):
            first = chunk.start // self.block_size
            num_blocks = -(-len(exponents) // self.block_size)
            if len(exponents) % self.block_size:
                whole = np.zeros(num_blocks * self.block_size, np.uint8)
                whole[: len(exponents)] = exponents
                exponents = whole
            yield slice(first, first + num_blocks), exponents.reshape(num_blocks, self.block_size)

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

"""The block hash on the host: what `reference.hash_blocks` does, with unsigned shifts and without fresh temporaries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fsdp_ciera.kernels.memory import Bytes
from fsdp_ciera.kernels.reference import GAMMA, HASH_SEEDS, MIX_FACTORS

_FIRST_SHIFT = 30


class BlockHasher:
    """128-bit hashes of blocks of exponents; holds the scratch for up to `most_blocks` of them at a time.

    Blocks are hashed as `reference.hash_blocks` says, in two steps: `add` sums the mixed words of some blocks, `finish` mixes
    the sums of all. Cost: 20 passes over the exponents, as 64-bit words.
    """

    def __init__(self, block_size: int, most_blocks: int) -> None:
        num_words = block_size // 8
        steps = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(GAMMA)
        keys = [np.tile(steps + np.uint64(seed), (most_blocks, 1)) for seed in HASH_SEEDS]
        self._keys = [key ^ (key >> np.uint64(_FIRST_SHIFT)) for key in keys]
        self._scratch = np.empty((3, most_blocks, num_words), np.uint64)

    def add(self, exponents: Bytes, sums: npt.NDArray[np.uint64]) -> None:
        """Exponents uint8 [num_blocks, block_size], contiguous -> `sums` uint64 [num_blocks, 2]."""
        num_blocks = len(exponents)
        words = exponents.view(np.uint64)
        shifted, mixed, spare = self._scratch[:, :num_blocks]
        # the finaliser's first step is linear over xor, so that both streams share it
        _xor_shift(words, _FIRST_SHIFT, spare, out=shifted)
        for stream, keys in enumerate(self._keys):
            np.bitwise_xor(shifted, keys[:num_blocks], out=mixed)
            _finish_mix(mixed, spare)
            np.einsum("ij->i", mixed, out=sums[:, stream])

    def finish(self, sums: npt.NDArray[np.uint64]) -> None:
        """Sums [num_blocks, 2] -> hashes, in place."""
        sums ^= np.array(HASH_SEEDS, np.uint64)
        spare = np.empty_like(sums)
        _xor_shift(sums, _FIRST_SHIFT, spare, out=sums)
        _finish_mix(sums, spare)


def _xor_shift(
    words: npt.NDArray[np.uint64], num_bits: int, spare: npt.NDArray[np.uint64], out: npt.NDArray[np.uint64]
) -> None:
    np.right_shift(words, np.uint64(num_bits), out=spare)
    np.bitwise_xor(words, spare, out=out)


def _finish_mix(words: npt.NDArray[np.uint64], spare: npt.NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser behind its first step, in place."""
    for factor, num_bits in zip(MIX_FACTORS, (27, 31), strict=True):
        np.multiply(words, np.uint64(factor), out=words)
        _xor_shift(words, num_bits, spare, out=words)

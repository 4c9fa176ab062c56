"""A look at a sample of a run, to choose how its changes travel. Wrong guesses cost bytes, never exactness."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_ciera.codecs.moves import BYTE_ESCAPE, NIBBLE_ESCAPE
from fsdp_ciera.entropy import Coding, entropy_bits
from fsdp_ciera.kernels.formats import FloatFormat, Words
from fsdp_ciera.kernels.ops import CHUNK_VALUES, Bytes, Moves, chunks_of, split

_WINDOW_VALUES = 2048  # one window in each chunk: a 64th of a run
_MOST_SPARSE = 0.4
"""Above this share of changed values, a change of 0 for all others costs no more than 2 % over naming those that changed (a
coded symbol takes at least a bit), and is faster."""
_LEAST_GAIN = 0.95  # what moves must beat literals by: two lists are slower than one, and the estimate is of order 0
_BYTE_LOSS = 1.1  # moves in bytes take more than their entropy; see [Note: Nibbles] in moves.py


def sample(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[n] -> the values in one window of each chunk; all of a run that has no more than half a chunk.

    The windows lie at a different place in each chunk, so that they do not always meet the same rows of a matrix.
    """
    num_values = len(words)
    if num_values <= CHUNK_VALUES // 2:
        return words
    places = CHUNK_VALUES // _WINDOW_VALUES
    starts = [chunk.start + number * 37 % places * _WINDOW_VALUES for number, chunk in enumerate(chunks_of(num_values))]
    windows: npt.NDArray[Any] = np.concatenate([words[start : start + _WINDOW_VALUES] for start in starts])
    return windows


def exponents_of(words: Words, fmt: FloatFormat) -> Bytes:
    """The exponents of a sample of words [n], uint8 [n]."""
    return np.concatenate([part.copy() for _, part in split(words, fmt)])


def choose_value_form(words: Words, last: Words, fmt: FloatFormat) -> tuple[Coding, int]:
    """The form for words [n] after `last` [n] (`PLAIN`: positions and moves, `DENSE`, or `ALL`), and the escape of its moves.

    Cost: reads a 64th of both.
    """
    fresh, before = sample(words), sample(last)
    changed = np.flatnonzero(fresh != before)
    if not len(changed):
        return Coding.PLAIN, NIBBLE_ESCAPE
    is_sparse = len(changed) <= _MOST_SPARSE * len(fresh)
    if is_sparse:
        fresh, before = fresh[changed], before[changed]
    literal_bits = 8 * fmt.item_bytes - fmt.exponent_bits + entropy_bits(exponents_of(fresh, fmt))
    symbols = Moves(fmt, len(fresh), BYTE_ESCAPE).encode(fresh, before)

    def move_bits(escape: int) -> float:
        num_literals = int(np.count_nonzero(symbols >= escape))
        coder_loss = _BYTE_LOSS if escape == BYTE_ESCAPE else 1.0
        return entropy_bits(np.minimum(symbols, escape)) * coder_loss + literal_bits * num_literals / len(symbols)

    escape = min(NIBBLE_ESCAPE, BYTE_ESCAPE, key=move_bits)
    if is_sparse:
        return Coding.PLAIN, escape
    return Coding.DENSE if move_bits(escape) < _LEAST_GAIN * literal_bits else Coding.ALL, escape


def choose_exponent_form(words: Words, last: Bytes, fmt: FloatFormat) -> Coding:
    """The form for the exponents of words [n] after exponents `last` [n]. Cost: reads a 64th of both."""
    fresh, before = exponents_of(sample(words), fmt), sample(last)
    if np.count_nonzero(fresh != before) <= _MOST_SPARSE * len(fresh):
        return Coding.PLAIN
    return Coding.DENSE if entropy_bits(fresh - before) < _LEAST_GAIN * entropy_bits(fresh) else Coding.ALL

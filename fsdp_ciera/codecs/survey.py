"""Looks at a sample of a run to choose how its changes travel. Wrong guesses cost bytes, never exactness."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.codecs.moves import NIBBLE_ESCAPE
from fsdp_ciera.codecs.planes import split
from fsdp_ciera.codecs.sections import Coding, entropy_bits
from fsdp_ciera.kernels.changes import BYTE_ESCAPE, Form
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import FloatFormat
from fsdp_ciera.kernels.memory import Bytes
from fsdp_ciera.kernels.reference import CHUNK_VALUES, chunks_of

_WINDOW_VALUES = 2048  # one window in each chunk: a 64th of a run
_MOST_WINDOWS = 64  # at most: 131 thousand values say enough of a run of any length
_MOST_SPARSE = 0.4
"""Above this share of changed values, a change of 0 for all others costs no more than 2 % over naming those that changed (a
coded symbol takes at least a bit), and is faster."""
_LEAST_GAIN = 0.95  # what moves must beat literals by: two lists are slower than one, and the estimate is of order 0
_MOST_SPLIT = 0.25
"""Above this share of changed values, small and large ones are not told apart: that costs several passes over them."""
_SMALL_SHARE = 0.4
"""The share of changed values that count as small; 0.35 to 0.5 took the fewest bytes on the demo's steps, at both rates."""
_LEAST_GAINED_BITS = 400  # what two more sections cost in headers and frames, at the most
_BYTE_LOSS = 1.1  # moves in bytes take more than their entropy; see [Note: Nibbles] in moves.py


def sample(values: torch.Tensor) -> torch.Tensor:
    """Takes from values [n] one window of each chunk, or of every so many chunks; all values of a run of up to half a chunk.

    The windows lie at a different place in each chunk, so that they do not always meet the same rows of a matrix.
    """
    num_values = len(values)
    if num_values <= CHUNK_VALUES // 2:
        return values
    windows_per_chunk = CHUNK_VALUES // _WINDOW_VALUES
    chunks = list(chunks_of(num_values))
    step = -(-len(chunks) // _MOST_WINDOWS)
    starts = [
        chunk.start + number * 37 % windows_per_chunk * _WINDOW_VALUES for number, chunk in enumerate(chunks[::step])
    ]
    return torch.cat([values[start : start + _WINDOW_VALUES] for start in starts])


def exponents_of(values: torch.Tensor, fmt: FloatFormat) -> Bytes:
    """The exponents of a sample [n], uint8 [n]."""
    exponents = torch.empty(len(values), dtype=torch.uint8)
    for _ in split(values, fmt, exponents=exponents):
        pass
    return exponents.numpy()


def moves_of(fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat) -> Bytes:
    """The move of each value of a sample [n], uint8 [n]."""
    form = Form(everywhere=True)
    return kernels_of(fresh).find_changes(fresh, last.clone(), fmt, form).moves.numpy()


class ValueForm(NamedTuple):
    """How the changes of a run travel: `PLAIN` (positions and moves), `DENSE` or `ALL`, and the escapes of its moves."""

    coding: Coding
    escape: int = NIBBLE_ESCAPE
    boundary: int = 0
    """The exponent below which values are *small*, with positions and moves of their own; 0 where none are told apart."""
    small_escape: int = NIBBLE_ESCAPE


def choose_value_form(values: torch.Tensor, last: torch.Tensor, fmt: FloatFormat) -> ValueForm:
    """Chooses the form for the changes from `last` [n] to `values` [n]. Cost: reads a sample of both."""
    fresh, before = sample(values), sample(last)
    changed = (fresh.view(fmt.int_dtype) != before.view(fmt.int_dtype)).nonzero().view(-1)
    if not len(changed):
        return ValueForm(Coding.PLAIN)
    if not kernels_of(values).reads_in_sequence:
        return ValueForm(Coding.PLAIN, BYTE_ESCAPE)
    is_sparse = len(changed) <= _MOST_SPARSE * len(fresh)
    if is_sparse:
        boundary, is_small = 0, np.zeros(len(changed), np.bool_)
        if len(changed) <= _MOST_SPLIT * len(fresh):
            boundary, is_small = _choose_boundary(exponents_of(before, fmt), changed.numpy())
        fresh, before = fresh[changed], before[changed]
    literal_bits = 8 * fmt.item_bytes - fmt.exponent_bits + entropy_bits(exponents_of(fresh, fmt))
    symbols = moves_of(fresh, before, fmt)
    if is_sparse:
        small, large = _choose_escape(symbols[is_small], literal_bits), _choose_escape(symbols[~is_small], literal_bits)
        return ValueForm(Coding.PLAIN, large, boundary, small)
    escape = _choose_escape(symbols, literal_bits)
    pays = _move_bits(symbols, escape, literal_bits) < _LEAST_GAIN * literal_bits
    return ValueForm(Coding.DENSE if pays else Coding.ALL, escape)


def _choose_escape(symbols: Bytes, literal_bits: float) -> int:
    return min(NIBBLE_ESCAPE, BYTE_ESCAPE, key=lambda escape: _move_bits(symbols, escape, literal_bits))


def _move_bits(symbols: Bytes, escape: int, literal_bits: float) -> float:
    """The bits that a move takes, literals included."""
    if not len(symbols):
        return 0.0
    num_literals = int(np.count_nonzero(symbols >= escape))
    coder_loss = _BYTE_LOSS if escape == BYTE_ESCAPE else 1.0
    return entropy_bits(np.minimum(symbols, escape)) * coder_loss + literal_bits * num_literals / len(symbols)


def _choose_boundary(exponents: Bytes, changed: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.bool_]]:
    """Chooses a boundary from the exponents [n] before the change and the indices [k] of changed values. Returns it, or 0, and
    which of the k are small.

    [Note: Small values change more] A step moves a value by about the learning rate, which is many units in the last place of a
    small value and less than one of a large one. Both sides know what a value was, so naming the changes
    among small and among large values apart takes a fifth less than naming them together.
    """
    changed_exponents = exponents[changed]
    cumulated = np.cumsum(np.bincount(changed_exponents, minlength=256))
    boundary = int(np.searchsorted(cumulated, _SMALL_SHARE * len(changed))) + 1
    num_small, num_small_changed = int(np.count_nonzero(exponents < boundary)), int(cumulated[boundary - 1])
    parts = ((num_small, num_small_changed), (len(exponents) - num_small, len(changed) - num_small_changed))
    bits_together = _position_bits(len(exponents), len(changed))
    if sum(_position_bits(*part) for part in parts) + _LEAST_GAINED_BITS < _LEAST_GAIN * bits_together:
        return boundary, changed_exponents < boundary
    return 0, np.zeros(len(changed), np.bool_)


def _position_bits(num_values: int, num_changed: int) -> float:
    """The bits that it takes to name the changed values, when they lie anywhere."""
    if num_changed in (0, num_values):
        return 0.0
    share = num_changed / num_values
    return -num_values * (share * log2(share) + (1 - share) * log2(1 - share))


def choose_exponent_form(values: torch.Tensor, last: torch.Tensor, fmt: FloatFormat) -> Coding:
    """Chooses the form for the changes from exponents `last` [n] to those of `values` [n]. Cost: reads a sample of both."""
    fresh, before = exponents_of(sample(values), fmt), sample(last).numpy()
    if np.count_nonzero(fresh != before) <= _MOST_SPARSE * len(fresh):
        return Coding.PLAIN
    return Coding.DENSE if entropy_bits(fresh - before) < _LEAST_GAIN * entropy_bits(fresh) else Coding.ALL

"""Counts what changed in a shard since the last look, and turns counts into `Rates`. Host only, a chunk of values at a time.

    CountLayout      names the columns of a row of counts; rows of shards and ranks add up
    ShardCounter     compares one shard with the bits kept of it, adds to a row, keeps the new bits
    CountLayout.rates    a row -> Rates

[Note: Work per value] Every value is cast, compared and looked up once, about a nanosecond together. All the rest (moves,
exponents that changed, blocks and shards that hold one) works on the positions of changed values, which are few.
Histograms of exponents are taken on an eighth of a large shard, another eighth in each look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.kernels.changes import BYTE_ESCAPE, Form
from fsdp_ciera.kernels.dispatch import Kernels, kernels_of
from fsdp_ciera.kernels.formats import FloatFormat, Words
from fsdp_ciera.kernels.reference import CHUNK_VALUES, chunks_of
from fsdp_ciera.policies.rates import Rates

SHARD_CUTS = (1, 2, 4, 8)
"""Numbers of pieces that shards are cut into, to project the shard change rate to larger worlds (paper Fig. 3a)."""
MOST_BITS = 64.0
"""Figures in bits a value are cut off here: `Rates` allows no more. Only codecs on shards of a few values get there."""

_SAMPLED_SHARE = 8  # one in so many values goes into the histogram of exponents ...
_LEAST_SAMPLED = CHUNK_VALUES // _SAMPLED_SHARE  # ... of chunks larger than this

Row: TypeAlias = npt.NDArray[np.float64]
"""Counts, one float64 each (exact up to 2**53), in the order of a `CountLayout`."""


class CountLayout:
    """The meaning of each column of a row of counts, for these block sizes and codecs."""

    def __init__(self, block_sizes: Sequence[int], codecs: Sequence[str]) -> None:
        self.block_sizes = tuple(block_sizes)
        self.codecs = tuple(codecs)
        self.num_columns = 0
        self.values = self._take(1)
        self.exponent_changes = self._take(1)
        self.value_changes = self._take(1)
        self.blocks = self._take(len(self.block_sizes))
        self.block_changes = self._take(len(self.block_sizes))
        self.shards = self._take(len(SHARD_CUTS))
        self.shard_changes = self._take(len(SHARD_CUTS))
        self.exponents = self._take(256)
        self.moves = self._take(256)
        self.escape_bits = self._take(1)
        self.codec_values = self._take(1)
        self.codec_changes = self._take(1)
        self.codec_bits = self._take(len(self.codecs))

    def _take(self, num_columns: int) -> slice:
        start, self.num_columns = self.num_columns, self.num_columns + num_columns
        return slice(start, self.num_columns)

    def total(self, rows: Row) -> Row:
        """The sum of the categories' rows, float64 [categories, num_columns]. The values that codecs were tried on stand for
        all values of their category."""
        rows = rows.copy()
        num_tried = rows[:, self.codec_values]
        rows[:, self.codec_values.start : self.codec_bits.stop] *= rows[:, self.values] / np.maximum(num_tried, 1)
        total: Row = rows.sum(axis=0)
        return total

    def rates(self, row: Row, rank_spread: float | None = None) -> Rates:
        """The rates of a row, float64 [num_columns]; `None` for what was not counted.

        [Note: What was tried may change more] Codecs are tried on a part of the shards, and shards differ in how much of them
        changes. What `value_delta` sends is nearly proportional to that, so its bits a *changed* value are taken from what
        was tried, and the share of changed values from all. Test: test_profiler.py, tried parts that change more.
        """
        num_values = float(row[self.values].sum())
        if not num_values:
            return Rates()
        blocks = zip(self.block_sizes, row[self.block_changes], row[self.blocks], strict=True)
        num_tried = max(1.0, float(row[self.codec_values].sum()))
        codec_bits = {
            codec: float(bits) / num_tried for codec, bits in zip(self.codecs, row[self.codec_bits], strict=True)
        }
        value_change = float(row[self.value_changes].sum()) / num_values
        num_changed = float(row[self.codec_changes].sum())
        if "value_delta" in codec_bits and num_changed:  # See [Note: What was tried may change more]
            codec_bits["value_delta"] *= value_change * num_tried / num_changed
        change_bits = _entropy_bits(row[self.moves]) + float(row[self.escape_bits].sum()) / num_values
        return Rates(
            exponent_change=float(row[self.exponent_changes].sum()) / num_values,
            block_change={size: float(changed / count) for size, changed, count in blocks if count},
            value_change=value_change,
            exponent_entropy_bits=_entropy_bits(row[self.exponents]),
            value_change_entropy_bits=min(change_bits, MOST_BITS),
            codec_bits={codec: min(bits, MOST_BITS) for codec, bits in codec_bits.items()}
            if row[self.codec_values].any()
            else {},
            rank_spread=rank_spread,
        )

    def shard_change(self, row: Row) -> dict[int, float]:
        """The share of pieces in which an exponent changed, by the number of pieces that every shard is cut into."""
        pieces = zip(SHARD_CUTS, row[self.shard_changes], row[self.shards], strict=True)
        return {cut: float(changed / count) for cut, changed, count in pieces if count}


@dataclass(frozen=True)
class ShardChanges:
    """The changes that `ShardCounter.count` counted in one shard."""

    num_values: int
    """Values in which a bit changed."""
    blocks: tuple[int, int]
    """Changed blocks and all blocks, of `ShardCounter.kept_block_size` values."""


class ShardCounter:
    """Counts the changes of shards of one format; holds scratch for a chunk of values."""

    def __init__(self, fmt: FloatFormat, layout: CountLayout, kept_block_size: int) -> None:
        self.format = fmt
        self.kept_block_size = kept_block_size
        self._layout = layout
        self._cast = torch.empty(CHUNK_VALUES, dtype=fmt.dtype)
        self._fresh = fmt.words(self._cast)
        self._exponent_mask = self._fresh.dtype.type(((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits)

    def keep(self, values: torch.Tensor, kept: Words) -> None:
        """Values [n] of any floating dtype and device, cast to the format -> their bits, into `kept` [n]."""
        for chunk in chunks_of(len(kept)):
            kept[chunk] = self._words(values, chunk)

    def count(self, values: torch.Tensor, kept: Words, row: Row, turn: int) -> ShardChanges:
        """Compares values [n], cast to the format, with `kept` [n], adds to `row`, and keeps the new bits.

        `turn` says which part of a large shard goes into the histogram of exponents. An empty shard counts nothing.
        Memory: 8 bytes for each change in a chunk. Cost: see [Note: Work per value].
        """
        num_values, layout = len(kept), self._layout
        if not num_values:
            return ShardChanges(0, (0, 0))
        piece_sizes = [-(-num_values // cut) for cut in SHARD_CUTS]
        sizes = (*layout.block_sizes, *piece_sizes, self.kept_block_size)
        counters = [_Distinct(size) for size in sizes]
        kernels = kernels_of(self._cast)
        num_changed = num_exponents = 0
        for chunk in chunks_of(num_values):
            now, then = self._words(values, chunk), kept[chunk]
            self._add_exponents(now, row[layout.exponents], turn)
            changed = np.flatnonzero(now != then)
            if not len(changed):
                continue
            num_changed += len(changed)
            fresh, last = now[changed], then[changed]
            crossed = changed[np.flatnonzero((fresh ^ last) & self._exponent_mask)]
            then[changed] = fresh
            moves = np.bincount(self._moves(kernels, fresh, last), minlength=256)
            row[layout.moves] += moves
            row[layout.escape_bits] += int(moves[BYTE_ESCAPE]) * 8 * self.format.item_bytes
            num_exponents += len(crossed)
            crossed += chunk.start
            for counter in counters:
                counter.add(crossed)
        row[layout.values] += num_values
        row[layout.value_changes] += num_changed
        row[layout.exponent_changes] += num_exponents
        row[layout.moves.start] += num_values - num_changed
        totals = [-(-num_values // size) for size in sizes]
        changes = [counter.count for counter in counters]
        num_sizes = len(layout.block_sizes)
        row[layout.blocks] += totals[:num_sizes]
        row[layout.block_changes] += changes[:num_sizes]
        row[layout.shards] += totals[num_sizes:-1]
        row[layout.shard_changes] += changes[num_sizes:-1]
        return ShardChanges(num_changed, (changes[-1], totals[-1]))

    def _moves(self, kernels: Kernels, fresh: Words, last: Words) -> npt.NDArray[np.uint8]:
        """Words [n] and [n], which may be overwritten -> moves uint8 [n]."""
        now, then = (torch.from_numpy(words).view(self.format.dtype) for words in (fresh, last))
        return kernels.find_changes(now, then, self.format, Form(everywhere=True)).moves.numpy()

    def _words(self, values: torch.Tensor, chunk: slice) -> Words:
        """The bits of a chunk of values as FSDP2 gathers them, valid until the next call."""
        size = chunk.stop - chunk.start
        self._cast[:size].copy_(values[chunk])  # rounds as `values.to(dtype)` does
        return self._fresh[:size]

    def _add_exponents(self, now: Words, counts: Row, turn: int) -> None:
        size = len(now)
        if size > _LEAST_SAMPLED:
            window = -(-size // _SAMPLED_SHARE)
            start = min(turn * 3 % _SAMPLED_SHARE * window, size - window)
            now = now[start : start + window]
        fmt = self.format
        exponents = (now >> fmt.mantissa_bits).astype(np.uint8)  # with 8 bits, the sign falls off here
        if fmt.exponent_bits < 8:
            exponents &= (1 << fmt.exponent_bits) - 1
        counts += np.bincount(exponents, minlength=256) * (size / len(now))


class _Distinct:
    """Counts the stretches of `size` values that hold at least one of the positions added, which must ascend."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last = -1
        self.count = 0

    def add(self, positions: npt.NDArray[np.int64]) -> None:
        if not len(positions):
            return
        stretches = positions // self._size
        self.count += int(stretches[0] != self._last) + int(np.count_nonzero(stretches[1:] != stretches[:-1]))
        self._last = int(stretches[-1])


def _entropy_bits(counts: npt.NDArray[Any]) -> float:
    """Bits a symbol that an order-0 code needs for symbols with these counts."""
    known = counts[counts > 0]
    shares = known / known.sum()
    return max(0.0, float(-(shares * np.log2(shares)).sum()))

"""Measures what codecs really send: runs each one on a part of the shards, as the sender of a first gather.

Each turn takes another part, until all have had theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.planning.probe import first_payload_bytes
from fsdp_ciera.profiling.counts import CountLayout, Row

TRIED_CODECS = ("entropy", "exponent_block", "exponent_delta", "value_delta")
CODEC_BLOCK_SIZE = 512  # what `exponent_block` is tried with: the paper's
_TRIED_EVERY = 4  # looks
_TRIED_SHARE = 32  # one in so many values a turn, and one part at least
_MOST_TRIED_VALUES = 1 << 23  # longer shards are tried in parts
_PART_MULTIPLE = 1024  # parts begin at whole blocks


class TriedShard(NamedTuple):
    """What planning needs to know of a shard. Neighbours of the same category that are gathered together are tried
    together: they are one run for the codecs, which finds repetitions across them."""

    category: str
    param_group: int
    dtype: torch.dtype
    num_values: int


class Part(NamedTuple):
    """A stretch of some shards of one category: their numbers, with the values of each."""

    category: str
    pieces: tuple[tuple[int, slice], ...]

    @property
    def num_values(self) -> int:
        """Values of all pieces together."""
        return sum(piece.stop - piece.start for _, piece in self.pieces)


class CodecTrials:
    """Chooses what is tried in each look, and tries it. Memory: a part, twice, and one payload of it: some megabytes."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Part]] = {}
        self._positions: dict[str, int] = {}
        self._num_looks = 0

    def plan(self, shards: Sequence[TriedShard]) -> None:
        """Cuts the shards into parts and queues them, each category on its own."""
        numbered = list(enumerate(shards))
        for (category, *_), run in groupby(numbered, key=lambda pair: pair[1][:3]):
            self._queues.setdefault(category, []).extend(_parts_of(category, list(run)))
        self._positions = dict.fromkeys(self._queues, 0)

    def next_parts(self) -> list[Part]:
        """The parts to try in the next look: some in the first look and in every fourth after it, none in the others."""
        chosen: list[Part] = []
        is_due, self._num_looks = self._num_looks % _TRIED_EVERY == 0, self._num_looks + 1
        for category, queue in self._queues.items() if is_due else ():
            quota = -(-sum(part.num_values for part in queue) // _TRIED_SHARE)
            taken = 0
            while queue and taken < quota:
                part = queue[self._positions[category]]
                self._positions[category] = (self._positions[category] + 1) % len(queue)
                chosen.append(part)
                taken += part.num_values
        return chosen

    def run(self, last: torch.Tensor, fresh: torch.Tensor, row: Row, layout: CountLayout) -> None:
        """Adds to `row` the bits that each codec sends for `fresh` [n] after it sent `last` [n]."""
        for column, name in enumerate(layout.codecs):
            row[layout.codec_bits.start + column] += 8 * first_payload_bytes(name, last, fresh, CODEC_BLOCK_SIZE)
        row[layout.codec_values] += len(fresh)
        words = [values.view(FORMATS[fresh.dtype].int_dtype).numpy() for values in (last, fresh)]
        row[layout.codec_changes] += np.count_nonzero(words[0] != words[1])


def _parts_of(category: str, run: Sequence[tuple[int, TriedShard]]) -> list[Part]:
    """A run as one part. If it is too long, each of its shards in parts of its own."""
    whole = Part(category, tuple((index, slice(0, shard.num_values)) for index, shard in run if shard.num_values))
    if whole.num_values <= _MOST_TRIED_VALUES:
        return [whole] if whole.num_values else []
    parts = []
    for index, shard in run:
        num_parts = max(1, -(-shard.num_values // _MOST_TRIED_VALUES))
        length = -(-shard.num_values // num_parts // _PART_MULTIPLE) * _PART_MULTIPLE
        for start in range(0, shard.num_values, max(length, 1)):
            parts.append(Part(category, ((index, slice(start, min(start + length, shard.num_values))),)))
    return parts

"""What codecs really send: each one is run on a part of the shards, as the sender of a first gather.

Another part in each look, until the turn comes round again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_ciera.policies.changes import CountLayout, Row
from fsdp_ciera.probe import first_payload_bytes

TRIED_CODECS = ("entropy", "exponent_block", "exponent_delta", "value_delta")
CODEC_BLOCK_SIZE = 512  # what `exponent_block` is tried with: the paper's
_TRIED_SHARE = 32  # one in so many values a look
_MOST_TRIED_VALUES = 1 << 20  # longer shards are tried in parts
_PART_MULTIPLE = 1024  # parts begin at whole blocks


class CodecTrials:
    """Chooses what is tried in each look, and tries it. Memory: one payload of a part, some megabytes."""

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[int, slice]]] = {}
        self._positions: dict[str, int] = {}
        self._quotas: dict[str, int] = {}

    def plan(self, shards: Sequence[tuple[str, int]]) -> None:
        """Takes the category and the number of values of each shard. Every category has a turn of its own."""
        for index, (category, size) in enumerate(shards):
            num_parts = -(-size // _MOST_TRIED_VALUES)
            length = -(-size // max(num_parts, 1) // _PART_MULTIPLE) * _PART_MULTIPLE
            queue = self._queues.setdefault(category, [])
            queue += [(index, slice(start, min(start + length, size))) for start in range(0, size, max(length, 1))]
        for category, queue in self._queues.items():
            self._positions[category] = 0
            self._quotas[category] = -(-sum(part.stop - part.start for _, part in queue) // _TRIED_SHARE)

    def next_parts(self) -> dict[int, list[slice]]:
        """By shard: what is tried in this look."""
        chosen: dict[int, list[slice]] = {}
        for category, queue in self._queues.items():
            taken = 0
            while queue and taken < self._quotas[category]:
                index, part = queue[self._positions[category]]
                self._positions[category] = (self._positions[category] + 1) % len(queue)
                chosen.setdefault(index, []).append(part)
                taken += part.stop - part.start
        return chosen

    def run(self, last: torch.Tensor, fresh: torch.Tensor, row: Row, layout: CountLayout) -> None:
        """Adds the bits that each codec sends of `fresh` [n] when it sent `last` [n] before."""
        for column, name in enumerate(layout.codecs):
            row[layout.codec_bits.start + column] += 8 * first_payload_bytes(name, last, fresh, CODEC_BLOCK_SIZE)
        row[layout.codec_values] += len(fresh)

"""`Loopback`: all ranks of one channel in one process, without collectives. For measuring codecs, and for their tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from fsdp_ciera.backends.base import Backend
from fsdp_ciera.gather.channel import STAGES, Changes, Channel, Settled
from fsdp_ciera.gather.layout import Layout
from fsdp_ciera.gather.topology import Cut
from fsdp_ciera.kernels.heads import HEAD_BYTES


class _Rank:
    """Stands in for a process group, as far as a channel needs one."""

    group_name = "loopback"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        """The number of this rank."""
        return self._rank


class Loopback:
    """One channel for each of `world_size` ranks, which gather in turn.

    `gather` goes through the same steps as a gather between processes: announce, settle, make payloads, decode.
    """

    def __init__(
        self, layout: Layout, backend: Backend, block_size: int = 512, world_size: int = 2, in_place: bool = False
    ) -> None:
        self.stage_seconds = dict.fromkeys(STAGES, 0.0)
        self.backend = backend
        self.layout = layout
        cut = Cut(world_size)
        self.channels = [
            Channel({"module": "loopback"}, layout, cast(dist.ProcessGroup, _Rank(rank)), cut, backend, block_size,
                    in_place, Changes(), self.stage_seconds)
            for rank in range(world_size)
        ]  # fmt: skip

    def announce(self, rank: int, values: torch.Tensor) -> int:
        """Encodes one rank's shard [num_values] and returns the bytes of its payload."""
        channel = self.channels[rank]
        encoded = channel.announce(values).encoded
        assert encoded is not None
        channel.learn(self.backend.read(channel.own_numbers()))
        [payload_bytes] = self.backend.read(encoded.payload_bytes)
        return int(payload_bytes)

    def settle_all(self, first_bytes: int, repeat_bytes: int = 0) -> list[Settled]:
        """Settles the next gathers of all channels as an agreement would. Returns what is settled, by rank."""
        settled_by_rank = []
        for channel in self.channels:
            kind = "first" if channel.has_base else "cold"
            channel.settled = Settled(kind, first_bytes, repeat_bytes, channel.sequence + 1)
            settled_by_rank.append(channel.settled)
        return settled_by_rank

    def take_payload(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        """Makes one rank's payload, uint8 [settled.payload_bytes]."""
        channel = self.channels[rank]
        assert channel.settled is not None
        return channel.take_payload(values, self.backend.checksum(values.view(1, -1)), channel.settled)

    def decode(self, rank: int, payloads: torch.Tensor, output: torch.Tensor) -> None:
        """Decodes payloads uint8 [world_size, any] into the other ranks' rows of `output` [world_size, num_values]."""
        channel = self.channels[rank]
        assert channel.settled is not None
        heads = payloads[:, :HEAD_BYTES]
        row_ok = self.backend.check_heads(heads, channel.row, channel.name_of(channel.settled), channel.damage)
        with channel.stage("Decmp"):
            channel.decode(payloads, row_ok, output)

    def is_silent(self, num_bytes: int) -> bool:
        """Whether payloads of `num_bytes` are not exchanged at all, since nothing changed and the host checks later."""
        return num_bytes == HEAD_BYTES and not self.backend.checks_at_once

    def decode_nothing(self, rank: int, output: torch.Tensor) -> None:
        """Fills the other ranks' rows of `output` [world_size, num_values] in a silent gather."""
        with self.channels[rank].stage("Decmp"):
            self.channels[rank].decode_nothing(output)

    def gather(self, shards: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gathers the shards [num_values] of all ranks into every rank's output [world_size, num_values]. Returns the payloads;
        none where the shards would travel as they are, or where nothing would travel."""
        most_bytes = max(self.announce(rank, values) for rank, values in enumerate(shards))
        settled_by_rank = self.settle_all(most_bytes)
        checksums = torch.cat([self.backend.checksum(values.view(1, -1)) for values in shards])
        is_raw, is_silent = most_bytes >= self.channels[0].raw_payload_bytes, self.is_silent(most_bytes)
        payloads = (
            [] if is_raw or is_silent else [self.take_payload(rank, values) for rank, values in enumerate(shards)]
        )
        for rank, (channel, output) in enumerate(zip(self.channels, outputs, strict=True)):
            output[rank].view(torch.uint8).copy_(shards[rank].view(torch.uint8))
            if is_raw:
                for row, values in zip(output, shards, strict=True):
                    row.view(torch.uint8).copy_(values.view(torch.uint8))
                channel.seed(output[rank], output)
            elif is_silent:
                self.decode_nothing(rank, output)
            else:
                self.decode(rank, torch.stack(payloads), output)
            channel.complete(settled_by_rank[rank], None if is_silent else checksums, output)
        return payloads

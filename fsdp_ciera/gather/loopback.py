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
    """What a channel asks of its process group."""

    group_name = "loopback"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        """This rank."""
        return self._rank


class Loopback:
    """One channel for each of `world_size` ranks, which gather in turn.

    `gather` goes through the same steps as a gather between processes: announce, settle, payloads, decode.
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
        """One rank encodes its shard [num_values] -> bytes of its payload."""
        channel = self.channels[rank]
        encoded = channel.announce(values).encoded
        assert encoded is not None
        channel.learn(self.backend.read(channel.own_numbers()))
        [payload_bytes] = self.backend.read(encoded.payload_bytes)
        return int(payload_bytes)

    def settle(self, first_bytes: int, repeat_bytes: int = 0) -> list[Settled]:
        """What all ranks would agree on -> by rank."""
        made = []
        for channel in self.channels:
            kind = "first" if channel.has_base else "cold"
            channel.settled = Settled(kind, first_bytes, repeat_bytes, channel.sequence + 1)
            made.append(channel.settled)
        return made

    def take_payload(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        """One rank's payload, as settled."""
        channel = self.channels[rank]
        assert channel.settled is not None
        return channel.take_payload(values, self.backend.checksum(values.view(1, -1)), channel.settled)

    def decode(self, rank: int, payloads: torch.Tensor, output: torch.Tensor) -> None:
        """Payloads uint8 [world_size, any] -> the other rows of `output` [world_size, num_values]."""
        channel = self.channels[rank]
        assert channel.settled is not None
        heads = payloads[:, :HEAD_BYTES]
        row_ok = self.backend.check_heads(heads, channel.row, channel.name_of(channel.settled), channel.damage)
        with channel.stage("Decmp"):
            channel.decode(payloads, row_ok, output)

    def is_silent(self, num_bytes: int) -> bool:
        """Whether payloads of so many bytes are not exchanged: nothing changed, and the host checks later."""
        return num_bytes == HEAD_BYTES and not self.backend.checks_at_once

    def decode_nothing(self, rank: int, output: torch.Tensor) -> None:
        """The other rows of `output` [world_size, num_values] in such a gather."""
        with self.channels[rank].stage("Decmp"):
            self.channels[rank].decode_nothing(output)

    def gather(self, shards: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Shards [num_values] of all ranks -> their rows in every rank's output [world_size, num_values]. -> the payloads;
        none where the shards would travel as they are, or nothing would."""
        sizes = [self.announce(rank, values) for rank, values in enumerate(shards)]
        settled = self.settle(max(sizes))
        checksums = torch.cat([self.backend.checksum(values.view(1, -1)) for values in shards])
        is_raw, is_silent = max(sizes) >= self.channels[0].raw_payload_bytes, self.is_silent(max(sizes))
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
            channel.complete(settled[rank], None if is_silent else checksums, output)
        return payloads

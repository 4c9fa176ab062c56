"""Sizes: how the ranks learn what each will send, for one gather, or ahead for the gathers of a step epoch.

    agree            one gather: encode, exchange headers, settle
    settle_ahead     many groups at once: encode all, exchange all their headers in one piece; each gets an `Epoch`

A gather with an epoch exchanges no headers. What a rank promised is confirmed by a mark of 8 bytes behind its payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp_ciera._compat import all_gather_bytes
from fsdp_ciera.gather.handshake import Agreement, check_same, settle
from fsdp_ciera.gather.lockstep import Encoded
from fsdp_ciera.gather.payload import (
    HEADER_BYTES,
    Status,
    base_of,
    pack_header,
    unpack_headers,
)
from fsdp_ciera.gather.stream import Stream
from fsdp_ciera.kernels.dispatch import kernels_of

DOUBT = 0
"""The mark of a rank that does not send what it promised. No promise has this mark."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks of a group know before the payloads of a gather move. `headers` is the table of wire.HEADER."""

    encoded: Encoded
    headers: np.ndarray[Any, Any]
    sent_bytes: int

    @property
    def sequence(self) -> int:
        """The number of this gather. Ranks that start again after a loss may count differently: the highest holds."""
        return int(self.headers["sequence"].max())

    @property
    def checksums(self) -> tuple[int, ...]:
        """What every rank's shard must decode to."""
        return tuple(int(value) for value in self.headers["checksum"])

    @property
    def sizes(self) -> list[int]:
        """Every rank's payload, in bytes."""
        return [int(size) for size in self.headers["payload_bytes"]]


@dataclass
class Epoch:
    """What every rank promised for the gathers of one stream until its weights change.

    [Note: An epoch ends on all ranks together] Gathers with and without an epoch exchange different things, so no rank may
    leave it alone. A rank that cannot keep its promise (its bytes changed, `invalidate`, an exception) marks its payload
    with `DOUBT`; all ranks see it, and exchange headers in the same call. Test: test_sizes.py, a broken promise.
    """

    headers: np.ndarray[Any, Any]
    first: Encoded | None
    """What was encoded ahead, until it is sent; later gathers encode on their own, and find no change."""
    num_gathers: int = 0
    is_kept: bool = True

    def next(self, stream: Stream, local: torch.Tensor, local_checksum: int) -> tuple[Promise, Encoded | None]:
        """The promise for the gather that comes now, and what this rank can send, if it can."""
        promise = Promise(self)
        encoded = self.first
        if encoded is None:
            encoded, failure = _encode(stream, local)
            if failure is not None:  # it is told to the peers when the headers are exchanged
                stream.forget()
        own = self.headers[stream.rank]
        is_as_promised = int(own["checksum"]) == local_checksum & 0xFFFF_FFFF_FFFF_FFFF
        if not (self.is_kept and is_as_promised) or encoded is None or encoded.num_bytes != promise.sizes[stream.rank]:
            promise.own_mark = DOUBT
        return promise, encoded


class Promise:
    """What an epoch says about one gather: every rank's payload size, and the mark that confirms it."""

    def __init__(self, epoch: Epoch) -> None:
        self.sizes = [int(n) for n in epoch.headers["payload_bytes" if epoch.first is not None else "repeat_bytes"]]
        self.headers = epoch.headers.copy()
        self.headers["payload_bytes"] = self.sizes
        self.headers["sequence"] = epoch.headers["sequence"].max() + epoch.num_gathers
        self.mark = base_of(int(self.headers["sequence"][0]), [int(value) for value in epoch.headers["checksum"]])
        self.own_mark = self.mark


def agree(stream: Stream, local: torch.Tensor, local_checksum: int, encoded: Encoded | None = None) -> Agreed:
    """Encodes `local` (unless it is encoded already), exchanges headers over the stream's group, and settles them.

    When any rank has lost its caches, all forget theirs and encode in full. Raises as `fsdp_ciera.gather.handshake.settle`.
    Communication: 64 bytes a rank, again after a loss.
    """
    sent_bytes = 0
    while True:
        announcement = _announce(stream, local, local_checksum, encoded)
        with stream.state.stage("AllGather"):
            headers = unpack_headers(all_gather_bytes(announcement.header, stream.group))
        sent_bytes += (stream.cut.world_size - 1) * HEADER_BYTES
        agreement = _settle(stream, announcement, headers)
        if agreement is Agreement.PROCEED:
            assert announcement.encoded is not None
            return Agreed(announcement.encoded, headers, sent_bytes)
        stream.state.forget()
        encoded = None


def settle_ahead(shards: Sequence[tuple[Stream, torch.Tensor]], group: dist.ProcessGroup) -> int:
    """Settles the sizes of several streams of one process group at once; each gets an `Epoch`. -> bytes sent.

    `shards` holds each stream with this rank's shard [num_values], in the same order on all ranks. Collective over `group`:
    64 bytes a rank to see that all settle the same streams, then 64 bytes a stream. The encoded shards are held until
    their gathers. Raises as `fsdp_ciera.gather.handshake.settle`; then no stream has an epoch, and all caches are dropped.
    """
    num_peers = group.size() - 1
    try:
        _check_same_streams([stream for stream, _ in shards], group)
        sent_bytes = num_peers * HEADER_BYTES
        for stream, _ in shards:
            if stream.epoch is not None and stream.epoch.first is not None:
                stream.state.forget()  # it was encoded ahead of a gather that never came: peers do not have that state
            stream.epoch = None
        left = list(shards)
        while left:
            checksums = [int(kernels_of(local).checksum(local.view(1, -1))) for _, local in left]
            announcements = [_announce(*shard, told) for shard, told in zip(left, checksums, strict=True)]
            table = all_gather_bytes(torch.cat([one.header for one in announcements]), group)
            headers = unpack_headers(table).reshape(group.size(), len(left))
            sent_bytes += num_peers * HEADER_BYTES * len(left)
            again = []
            for (stream, local), one, column in zip(left, announcements, headers.T, strict=True):
                if _settle(stream, one, column) is Agreement.PROCEED:
                    stream.epoch = Epoch(column.copy(), one.encoded)
                else:
                    stream.state.forget()
                    again.append((stream, local))
            left = again
    except BaseException:
        for stream, _ in shards:
            stream.state.forget()
            stream.epoch = None
        raise
    return sent_bytes


@dataclass(frozen=True)
class _Announcement:
    """A rank's header for one stream, and the text that it announces: its descriptor, or its failure."""

    header: torch.Tensor
    text: bytes
    encoded: Encoded | None
    failure: Exception | None


def _announce(
    stream: Stream, local: torch.Tensor, local_checksum: int, encoded: Encoded | None = None
) -> _Announcement:
    """A rank that cannot encode must not leave its peers waiting: it tells them, and all raise together."""
    failure: Exception | None = None
    if encoded is None:
        encoded, failure = _encode(stream, local)
    text = stream.descriptor_text if failure is None else repr(failure).encode()
    header = pack_header(
        status=Status.READY if failure is None else Status.ENCODE_FAILED,
        fingerprint=stream.fingerprint,
        sequence=stream.state.sequence + 1,
        base=stream.state.base,
        payload_bytes=encoded.num_bytes if encoded is not None else 0,
        repeat_bytes=stream.repeat_bytes(encoded) if encoded is not None else 0,
        checksum=local_checksum,
        num_changes=stream.changes.see(local_checksum),
        descriptor_bytes=len(text),
    )
    return _Announcement(header, text, encoded, failure)


def _encode(stream: Stream, local: torch.Tensor) -> tuple[Encoded | None, Exception | None]:
    if stream.layout.is_raw:
        return Encoded.raw(local, stream.layout), None
    try:
        stream.state.prepare()  # our largest allocation: should it fail, the peers hear of it too
        return stream.state.encode(local), None
    except Exception as failure:
        return None, failure


def _settle(stream: Stream, one: _Announcement, headers: np.ndarray[Any, Any]) -> Agreement:
    return settle(headers, stream.descriptor, one.text, stream.group, one.failure)


def _check_same_streams(streams: Sequence[Stream], group: dist.ProcessGroup) -> None:
    """All ranks must be in `settle_ahead` with the same streams: a header of its own says so, settled like any other."""
    descriptor = {
        "module": "settle_sizes",
        "group_size": group.size(),
        "groups": [stream.descriptor["module"] for stream in streams],
    }
    check_same(descriptor, group)

"""Sizes of gathers on CUDA, settled once per optimizer step for many groups at once: here the host waits for the device.

Hash of all groups -> counts of all ranks, in one exchange that the host reads -> Cmp of all groups
-> (where nvCOMP is there) sizes of coded chunks, in one more -> each group's stream has a `DeviceEpoch`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fsdp_ciera._compat import all_gather_flat
from fsdp_ciera.errors import CieraDesyncError
from fsdp_ciera.gather.device_coder import PartCoder, part_coder
from fsdp_ciera.gather.device_stream import DeviceStream, event_of
from fsdp_ciera.gather.device_watch import ADVICE, DamageWatch
from fsdp_ciera.gather.handshake import check_same
from fsdp_ciera.gather.payload import HEADER_BYTES

_NUMBER_BYTES = 8


def settle_on_device(shards: Sequence[tuple[DeviceStream, torch.Tensor]], group: dist.ProcessGroup) -> int:
    """Settles several streams of one process group at once; each gets a `DeviceEpoch`. -> bytes sent to the peers.

    `shards` holds each stream with this rank's shard [num_values], in the same order on all ranks. Collective over `group`;
    waits for the device. Raises, on all ranks together, `CieraMismatchError` where they settle different streams, and
    `CieraDesyncError` where a gather since the last time sent something else than was settled, or a payload was damaged:
    then all caches are dropped. Without streams it still meets the other ranks, who may have some.
    """
    streams = [stream for stream, _ in shards]
    try:
        return _settle(shards, group)
    except BaseException:  # some may have compressed what no peer will get
        for stream in streams:
            stream.epoch = None
            stream.forget()
        raise


def _settle(shards: Sequence[tuple[DeviceStream, torch.Tensor]], group: dist.ProcessGroup) -> int:
    streams = [stream for stream, _ in shards]
    for stream in streams:
        stream.end_epoch()
    coder = part_coder()
    descriptor = {
        "module": "settle_sizes",
        "group_size": group.size(),
        "groups": [one.descriptor for one in streams],
        "nvCOMP version": None if coder is None else coder.version,
    }
    check_same(descriptor, group)
    num_peers = group.size() - 1
    if not streams:
        return num_peers * HEADER_BYTES
    with record_function("Ciera::Hash"):
        own = torch.cat([stream.count(local) for stream, local in shards])
    everyones = torch.empty(group.size(), len(own), dtype=torch.int64, device=own.device)
    all_gather_flat(everyones.view(-1), own, group, async_op=False)
    numbers = everyones.cpu()  # the host waits here
    widths = [stream.num_counts for stream in streams]
    columns = list(zip(streams, torch.split(numbers, widths, dim=1), torch.split(own, widths), shards, strict=True))
    _check_damage([(stream, column[:, 1].tolist()) for stream, column, _, _ in columns])
    for stream, column, row, (_, local) in columns:
        stream.epoch = stream.settle(column, local, row)
    num_bytes = HEADER_BYTES + len(own) * _NUMBER_BYTES
    if coder is not None:
        num_bytes += _code(streams, coder, group)
    watch = DamageWatch()
    for stream in streams:
        stream.watch = watch
        watch.tell(stream.module, stream.damage)  # pinned memory is made here: making it may wait
    settled = event_of(own.device)
    for stream in streams:
        assert stream.epoch is not None
        stream.epoch.settled = settled
    return num_peers * num_bytes


def _code(streams: Sequence[DeviceStream], coder: PartCoder, group: dist.ProcessGroup) -> int:
    """Entropy-codes what is worth it, and tells all ranks the sizes of all chunks. -> bytes that this rank told each peer."""
    widths = [
        [sum(num_chunks for *_, num_chunks in stream.places_to_code(rank)) for stream in streams]
        for rank in range(group.size())
    ]
    longest = max(map(sum, widths))
    if not longest:
        return 0
    with record_function("Ciera::Cmp"):
        own = torch.cat([sizes for stream in streams for sizes in stream.code(coder)] or [_no_sizes(streams[0].device)])
    told = torch.zeros(longest, dtype=torch.int64, device=streams[0].device)
    told[: len(own)] = own
    everyones = torch.empty(group.size(), longest, dtype=torch.int64, device=told.device)
    all_gather_flat(everyones.view(-1), told, group, async_op=False)
    rows = everyones.tolist()  # the host waits here
    starts = [0] * group.size()
    for number, stream in enumerate(streams):
        sizes = [row[start : start + width[number]] for row, start, width in zip(rows, starts, widths, strict=True)]
        starts = [start + width[number] for start, width in zip(starts, widths, strict=True)]
        stream.store(coder, sizes)
    return longest * _NUMBER_BYTES


def _no_sizes(device: torch.device) -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int64, device=device)


def _check_damage(found: Sequence[tuple[DeviceStream, Sequence[int]]]) -> None:
    """See [Note: Told ahead]."""
    damaged = [(stream, [rank for rank, flag in enumerate(flags) if flag]) for stream, flags in found if any(flags)]
    if not damaged:
        return
    for stream, _ in found:
        stream.forget()
        stream.damage.zero_()
    where = "; ".join(f"module {stream.module!r} on ranks {ranks}" for stream, ranks in damaged)
    raise CieraDesyncError(f"{where}: {ADVICE}")

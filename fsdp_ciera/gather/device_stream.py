"""What one rank remembers about one stream of gathers on CUDA, and the gathers, which wait for nothing.

device_settle.py settles sizes once per optimizer step: Hash and Cmp of all groups; each group's stream then has a
`DeviceEpoch`, and `DeviceStream.gather` sends and decodes as it says. A gather whose sizes were not settled runs as in stock
FSDP2, and leaves all caches as they are.

[Note: Told ahead] What was counted must be what is sent. A gather compares its shard's checksum with the settled one on the
device; where they differ, or a payload is damaged, it sets a flag. The rank raises `CieraDesyncError` some gathers later
(device_watch.py), and all ranks together in the next `settle_sizes`. Test: test_device_gather.py, weights changed
behind our back.

[Note: Order of streams] `settle_sizes` runs on the caller's stream, gathers on FSDP2's. Events order the two in both
directions; what a gather did not allocate itself is recorded on its stream before it may be freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fsdp_ciera._compat import all_gather_flat
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import CieraDesyncError
from fsdp_ciera.gather.device_codecs import DEVICE_CODECS
from fsdp_ciera.gather.device_coder import Part, PartCoder, choose, part_coder
from fsdp_ciera.gather.device_watch import DamageWatch
from fsdp_ciera.gather.layout import Layout
from fsdp_ciera.gather.payload import base_of
from fsdp_ciera.gather.stream import describe
from fsdp_ciera.gather.topology import Cut
from fsdp_ciera.kernels import nvcomp
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.policy import CieraPolicy

_HEADER_COUNTS = 3  # base, damage, checksum; before the counts of a stream's runs
_NO_BASE = -(1 << 63)  # bases are unsigned, int64 is not


@dataclass
class DeviceEpoch:
    """What all ranks send in the gathers of one stream until the next `settle_sizes`."""

    counts: list[list[list[int]]]
    """By rank and run."""
    parts: list[list[list[Part]]]
    """By rank and run: what is stored in the first gather's payloads."""
    checksums: list[int]
    """Of each rank's shard."""
    own_checksum: torch.Tensor
    """int64 [1], on the device."""
    is_cold: bool
    """Whether the first gather goes raw, and fills the caches."""
    payload: torch.Tensor | None = None
    """What was compressed ahead, until it is sent."""
    coded: dict[tuple[int, int], nvcomp.Coded] = field(default_factory=dict)
    """By run and part, between coding and storing."""
    places: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    """By rank, run and part: `PartCoder.places` of the coded ones."""
    settled: torch.cuda.Event | None = None
    num_gathers: int = 0
    is_broken: bool = False
    """After a gather that failed: caches may have moved on in part, and peers may count other gathers."""


@dataclass(frozen=True)
class Sent:
    """What a gather sent to each peer, in bytes: of each run, and padded, in total."""

    kind: str
    run_bytes: list[int]
    payload_bytes: int


@dataclass
class DeviceStream:
    """State of one stream of gathers on one rank: `num_peers` other ranks, values of `layout` on `device`."""

    module: str
    policy: CieraPolicy
    layout: Layout
    group: dist.ProcessGroup
    cut: Cut
    device: torch.device
    epoch: DeviceEpoch | None = None
    base: int = 0
    """Names the gather that the caches describe; 0: there are none."""
    is_forgotten: bool = False
    """Whether the caches are dropped at the next `settle_sizes`."""
    sequence: int = 0
    last_gather: torch.cuda.Event | None = None
    watch: DamageWatch = field(default_factory=DamageWatch)
    damage: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.world_size = self.group.rank(), self.group.size()
        sizes = (self.layout.dtype, self.policy.block_size, self.world_size - 1, self.device)
        self.codecs = [DEVICE_CODECS[run.codec](run.num_values, *sizes) for run in self.layout.runs]
        self.damage = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.descriptor = describe(self.module, self.policy, self.layout, self.cut)

    @property
    def cache_bytes(self) -> int:
        """Bytes of caches held now."""
        if not self.base:
            return 0
        sizes = (self.layout.dtype, self.policy.block_size, self.world_size - 1)
        return sum(CODECS[run.codec].cache_bytes(run.num_values, *sizes) for run in self.layout.runs)

    @property
    def num_counts(self) -> int:
        """Numbers that a rank tells of this stream."""
        return _HEADER_COUNTS + sum(codec.num_counts for codec in self.codecs)

    def forget(self) -> None:
        """Drops the caches at the next `settle_sizes`: until then what was settled is sent as it was told."""
        self.is_forgotten = True

    def fail(self) -> None:
        """A gather raised: no other one of this epoch may run."""
        self.forget()
        if self.epoch is not None:
            self.epoch.is_broken, self.epoch.payload = True, None

    def end_epoch(self) -> None:
        """Gathers are plain from now on. What is launched next on this stream comes after the last one."""
        wait_for(self.last_gather, self.device)
        if self.epoch is not None and not self.epoch.num_gathers:
            self.forget()  # compressed ahead of a gather that never came: peers do not have that state
        self.epoch = None

    def count(self, local: torch.Tensor) -> torch.Tensor:
        """Hash of all runs of the own shard -> int64 [num_counts] on the device."""
        checksum = kernels_of(local).checksum(local.view(1, -1))
        if self.is_forgotten:
            self._drop()
        parts = [torch.tensor([self.base + _NO_BASE], dtype=torch.int64).to(self.device, non_blocking=True),
                 self.damage.to(torch.int64), checksum]  # fmt: skip
        for run, codec in zip(self.layout.runs, self.codecs, strict=True):
            if codec.num_counts:
                values = local[run.start : run.stop]
                parts.append(codec.count(values) if self.base else parts[0].new_zeros(codec.num_counts))
        return torch.cat(parts)

    def settle(self, numbers: torch.Tensor, local: torch.Tensor, own: torch.Tensor) -> DeviceEpoch:
        """`numbers` int64 [world_size, num_counts] of all ranks, on the host -> what they will send. Compresses, if it can.

        `own` is this rank's row on the device.
        """
        bases, checksums = numbers[:, 0].tolist(), numbers[:, 2].tolist()
        counts = [self._by_run(row) for row in numbers[:, _HEADER_COUNTS:].tolist()]
        is_cold = any(base == _NO_BASE or base != bases[0] for base in bases)
        epoch = DeviceEpoch(counts, [self._parts(row) for row in counts], checksums, own[2:3], is_cold)
        if epoch.is_cold:
            self._drop()
        else:
            epoch.payload = self._compress(local, counts[self.rank], self._payload_bytes(epoch.parts[self.rank]))
        return epoch

    def places_to_code(self, rank: int) -> list[tuple[int, int, int]]:
        """Run, part and number of chunks of each part that a rank codes, in order: known to all from the counts."""
        epoch = self.epoch
        assert epoch is not None
        found = []
        for run, codec in enumerate(self.codecs if not epoch.is_cold else ()):
            for part in codec.coded_parts:
                num_chunks = PartCoder.num_chunks(epoch.parts[rank][run][part].num_bytes)
                if num_chunks:
                    found.append((run, part, num_chunks))
        return found

    def code(self, coder: PartCoder) -> list[torch.Tensor]:
        """Codes the large parts of the payload -> int64 [chunks] each, the coded bytes, on the device."""
        epoch = self.epoch
        assert epoch is not None
        sizes = []
        for run, part, _ in self.places_to_code(self.rank):
            assert epoch.payload is not None
            view = self._views(epoch.payload, epoch.parts[self.rank])[run][part]
            epoch.coded[run, part] = coder.encode(view)
            sizes.append(epoch.coded[run, part].chunk_bytes)
        return sizes

    def store(self, coder: PartCoder, chunk_bytes: Sequence[list[int]]) -> None:
        """`chunk_bytes` of each rank, in the order of `places_to_code` -> the payload as it will be sent."""
        epoch = self.epoch
        assert epoch is not None
        uncoded = epoch.parts[self.rank]
        epoch.parts = [list(map(list, parts)) for parts in epoch.parts]
        for rank, sizes in enumerate(chunk_bytes):
            start = 0
            for run, part, num_chunks in self.places_to_code(rank):
                stored = choose(epoch.parts[rank][run][part].num_bytes, sizes[start : start + num_chunks])
                epoch.parts[rank][run][part] = stored
                if stored.chunk_bytes and rank != self.rank:
                    epoch.places[rank, run, part] = coder.places(stored, self.device)
                start += num_chunks
        if epoch.payload is None:
            return
        parts = epoch.parts[self.rank]
        payload = torch.empty(self._payload_bytes(parts), dtype=torch.uint8, device=self.device)
        for run, (sources, targets) in enumerate(
            zip(self._views(epoch.payload, uncoded), self._views(payload, parts), strict=True)
        ):
            for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
                if parts[run][number].chunk_bytes:
                    coder.store(epoch.coded[run, number], parts[run][number], target)
                else:
                    target.copy_(source)
        epoch.payload = payload
        epoch.coded.clear()

    def gather(self, output: torch.Tensor, local: torch.Tensor) -> Sent:
        """One gather of the epoch: fills the other ranks' slots of `output` [world_size, num_values]. Waits for nothing.

        Memory: the payloads of all ranks, padded to the largest. Communication: one all-gather of them; none when nobody
        has anything to send.
        """
        epoch = self.epoch
        assert epoch is not None
        if epoch.is_broken:
            raise CieraDesyncError(
                f"module {self.module!r}: an earlier gather failed here. Call reset_iter_state() where it exists, reshard, and "
                "settle_sizes(model) on all ranks before the next forward"
            )
        self.watch.look()
        wait_for(epoch.settled, self.device)
        wait_for(self.last_gather, self.device)  # unshard() gathers on another stream than forward
        checksum = kernels_of(local).checksum(local.view(1, -1))
        self.damage |= (checksum != epoch.own_checksum).to(torch.int32)  # See [Note: Told ahead]
        is_first = epoch.num_gathers == 0
        if epoch.is_cold and is_first:
            kind = "cold"
            self._gather_raw(output, local)
            sent = [run.num_values * self.layout.dtype.itemsize for run in self.layout.runs]
            payload_bytes = sum(sent)
        else:
            kind = "first" if is_first else "repeat"
            counts, parts = epoch.counts, epoch.parts
            if not is_first:
                counts = [[[0] * codec.num_counts for codec in self.codecs]] * self.world_size
                parts = [self._parts(counts[0])] * self.world_size
            payload_bytes = max(map(self._payload_bytes, parts))
            self._exchange(output, local, counts, parts, payload_bytes)
            sent = [sum(part.stored_bytes for part in of_run) for of_run in parts[self.rank]]
        epoch.payload = None
        epoch.num_gathers += 1
        self.sequence += 1
        self.base = base_of(self.sequence, epoch.checksums) if is_first else self.base
        self.watch.tell(self.module, self.damage)
        self.last_gather = event_of(self.device)
        return Sent(kind, sent, payload_bytes)

    def _gather_raw(self, output: torch.Tensor, local: torch.Tensor) -> None:
        with record_function("Ciera::AllGather"):
            all_gather_flat(output.view(-1).view(torch.uint8), local.view(torch.uint8), self.group, async_op=False)
        peers = [row for rank, row in enumerate(output) if rank != self.rank]
        with record_function("Ciera::Decmp"):
            for run, codec in zip(self.layout.runs, self.codecs, strict=True):
                stretch = slice(run.start, run.stop)
                codec.seed(local[stretch], [row[stretch] for row in peers])

    def _exchange(
        self,
        output: torch.Tensor,
        local: torch.Tensor,
        counts: list[list[list[int]]],
        parts: list[list[list[Part]]],
        payload_bytes: int,
    ) -> None:
        payloads = torch.empty(self.world_size, payload_bytes, dtype=torch.uint8, device=self.device)
        if payload_bytes:
            payload = self._padded(local, counts[self.rank], payload_bytes)
            with record_function("Ciera::AllGather"):
                all_gather_flat(payloads.view(-1), payload, self.group, async_op=False)
            _record_use(payload)
        with record_function("Ciera::Decmp"):
            for rank in range(self.world_size):
                if rank == self.rank:
                    continue
                peer = rank - (rank > self.rank)
                views = self._decoded(rank, self._views(payloads[rank], parts[rank]), parts[rank])
                for run, codec, own, received in zip(self.layout.runs, self.codecs, counts[rank], views, strict=True):
                    codec.decompress(peer, own, received, output[rank, run.start : run.stop], self.damage)

    def _padded(self, local: torch.Tensor, counts: list[list[int]], payload_bytes: int) -> torch.Tensor:
        """What this rank sends, uint8 [payload_bytes]; what is behind its own parts is whatever was there."""
        assert self.epoch is not None
        settled = self.epoch.payload
        if settled is None:
            return self._compress(local, counts, payload_bytes)
        if len(settled) == payload_bytes:
            return settled
        payload = torch.empty(payload_bytes, dtype=torch.uint8, device=self.device)
        payload[: len(settled)].copy_(settled)
        _record_use(settled)
        return payload

    def _decoded(self, rank: int, views: list[list[torch.Tensor]], parts: list[list[Part]]) -> list[list[torch.Tensor]]:
        """The parts of a received payload, those that are coded decoded."""
        assert self.epoch is not None
        for run, of_run in enumerate(parts):
            for number, part in enumerate(of_run):
                if part.chunk_bytes:
                    coder = part_coder()
                    assert coder is not None
                    places = self.epoch.places[rank, run, number]
                    _record_use(places)
                    views[run][number] = coder.decode(views[run][number], part, places, self.damage)
        return views

    def _compress(self, local: torch.Tensor, counts: list[list[int]], payload_bytes: int) -> torch.Tensor:
        """Cmp -> uint8 [payload_bytes], uncoded."""
        payload = torch.empty(payload_bytes, dtype=torch.uint8, device=self.device)
        with record_function("Ciera::Cmp"):
            views = self._views(payload, self._parts(counts))
            for run, codec, own, parts in zip(self.layout.runs, self.codecs, counts, views, strict=True):
                codec.compress(local[run.start : run.stop], own, parts)
        return payload

    def _parts(self, counts: list[list[int]]) -> list[list[Part]]:
        return [list(map(Part, codec.part_bytes(own))) for codec, own in zip(self.codecs, counts, strict=True)]

    def _payload_bytes(self, parts: list[list[Part]]) -> int:
        return sum(part.stored_bytes for of_run in parts for part in of_run)

    def _views(self, payload: torch.Tensor, parts: list[list[Part]]) -> list[list[torch.Tensor]]:
        """By run: each part's place in a payload."""
        views, start = [], 0
        for of_run in parts:
            found = []
            for part in of_run:
                end = part.stored_bytes if part.chunk_bytes else part.num_bytes
                found.append(payload[start : start + end])
                start += part.stored_bytes
            views.append(found)
        return views

    def _by_run(self, numbers: Sequence[int]) -> list[list[int]]:
        found, start = [], 0
        for codec in self.codecs:
            found.append(list(numbers[start : start + codec.num_counts]))
            start += codec.num_counts
        return found

    def _drop(self) -> None:
        self.base, self.is_forgotten = 0, False
        for codec in self.codecs:
            codec.forget()


def event_of(device: torch.device) -> torch.cuda.Event | None:
    """What was launched so far on the current stream. See [Note: Order of streams]."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def wait_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    """What is launched from now on comes after the event; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _record_use(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

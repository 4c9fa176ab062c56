"""`Channel`: the gathers of one parameter group over one process group with one dtype and length, and all that a rank
remembers of them.

at the agreement   announce   Hash and Cmp -> numbers for the table of all ranks (agreement.py), and sections to send
                   settled    what the table says about the next gathers
in the gather      take_payload, decode, seed, complete
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fsdp_ciera.backends.base import Backend, Encoded, name_of_base, plan_payload
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.codecs.base import Codec, Unit
from fsdp_ciera.gather.layout import Layout
from fsdp_ciera.gather.topology import Cut
from fsdp_ciera.kernels.heads import BROKEN_PROMISE, FIRST_NAME, HEAD_BYTES, WIRE_VERSION
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.version import __version__

STAGES = ("Hash", "Cmp", "AllGather", "PreDecmp", "Decmp", "InNode")
"""The paper's nodes, and the plain half of hierarchical gathers."""


@dataclass
class Settled:
    """What all ranks have agreed on for the gathers of a channel until the next agreement. The same on all ranks."""

    kind: str
    """The kind of the first gather: "cold" (nothing to build on), "first" (weights changed since the last gather) or
    "repeat"."""
    first_bytes: int
    """Bytes of the largest payload of the first gather; `Channel.raw_payload_bytes` where the shards travel as they are."""
    repeat_bytes: int
    """The same for every later gather."""
    sequence: int
    """The number of the first gather."""
    num_gathers: int = 0
    """The number of gathers made since the agreement."""
    is_agreed: bool = True
    """Whether an agreement settled it; not so in `Channel.settle_alone`."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the largest payload of the next gather."""
        return self.repeat_bytes if self.num_gathers else self.first_bytes

    @property
    def next_kind(self) -> str:
        """The kind of the next gather."""
        return "repeat" if self.num_gathers else self.kind

    @property
    def next_sequence(self) -> int:
        """The number of the next gather."""
        return self.sequence + self.num_gathers


@dataclass(frozen=True)
class Announced:
    """What a rank says about its shard at an agreement. Numbers are int64 [1] on the device."""

    checksum: torch.Tensor
    has_changed: torch.Tensor
    """1 where the shard differs from that of the last agreement, else 0."""
    encoded: Encoded | None
    """The sections of the first gather, until it is made."""
    block_counts: tuple[int, int]
    """The sums of `Codec.block_counts`."""

    @property
    def payload_bytes(self) -> torch.Tensor:
        """Bytes of the first gather's payload."""
        assert self.encoded is not None
        return self.encoded.payload_bytes

    @property
    def repeat_bytes(self) -> torch.Tensor:
        """Bytes of every later gather's payload."""
        assert self.encoded is not None
        return self.encoded.repeat_bytes


@dataclass
class Changes:
    """How often the shards of a parameter group have changed. It outlives the channels, which come and go with plans."""

    agreed: int = 0
    """The number of agreements at which any rank's shard had changed: the same on all ranks."""
    at_last_gather: int = 0
    """The value of `agreed` at the last gather."""
    seen_checksum: torch.Tensor | None = None
    """The checksum of this rank's shard at the last agreement, int64 [1]."""


class Column(NamedTuple):
    """The memory that a hierarchical gather decodes into: the shards of this rank's number on every node, and their tail."""

    buffer: torch.Tensor
    """uint8: shards and tail side by side, as they travel inside the node."""
    shards: torch.Tensor
    """[num_nodes, num_values]"""
    tail: torch.Tensor
    """uint8 [8 + 8 num_nodes]: the flags that this rank has seen, and the checksum of each of these shards."""


class Channel:
    """Sender and receiver state of one channel, with the identity that its agreements and payloads carry.

    Flat gathers exchange payloads among all ranks of the process group, hierarchical ones among the ranks of equal number in
    their nodes. Memory between gathers: the codecs' state; from an agreement to the next gather also the sections to send.

    [Note: The own slot] Where `held` serves as state, FSDP2 writes this rank's new shard into it before the gather, and the
    state is half moved until the gather is complete. A gather that does not get so far leaves `is_touched` set: nobody knows
    then what the peers hold, and the next gather is a full one. Test: test_failures.py, an exception between copy-in and
    gather.
    """

    def __init__(
        self,
        descriptor: Mapping[str, Any],
        layout: Layout,
        process_group: dist.ProcessGroup,
        cut: Cut,
        backend: Backend,
        block_size: int,
        in_place: bool,
        changes: Changes,
        stage_seconds: dict[str, float],
    ) -> None:
        self.descriptor = descriptor
        self.descriptor_text = encode_descriptor(descriptor)
        self.fingerprint = fingerprint_of(descriptor)
        self.where = f"module {descriptor['module']!r}"
        self.layout = layout
        self.process_group = process_group
        self.cut = cut
        self.rank = process_group.rank()
        self.backend = backend
        self.row = cut.node_of(self.rank)
        """The index of this rank among those that exchange payloads."""
        runs = layout.runs
        self.run_numbers = backend.group_runs(runs)
        """The numbers of the runs of each unit."""
        self.codecs: list[Codec] = []
        for numbers in self.run_numbers:
            stretches = tuple((runs[number].start, runs[number].num_values) for number in numbers)
            unit = Unit(stretches, layout.dtype, block_size, cut.num_nodes, self.row)
            codec = CODECS[runs[numbers[0]].codec]
            is_in_place = in_place and codec.can_decode_in_place
            self.codecs.append(codec(backend.coder(unit, codec.name, is_in_place), is_in_place))
        self.payload_plan = plan_payload(self.codecs, backend.alignment)
        self.raw_payload_bytes = HEAD_BYTES + layout.num_values * layout.dtype.itemsize
        """Bytes that count for the payload where the shards travel as they are: those of a shard, and of a head beside it."""
        self.room_bytes = backend.first_room_bytes(self.raw_payload_bytes)
        """Bytes to set aside for sections, where that must be done before they are made."""
        self.changes = changes
        self.stage_seconds = stage_seconds
        self._block_size = block_size
        self.sequence = 0
        """The number of completed gathers, the same on all ranks."""
        self.has_base = False
        """Whether the state describes a completed gather."""
        self.base = backend.numbers(0)
        """The name of that gather, int64 [1]: see `fsdp_ciera.backends.base.name_of_base`."""
        self.damage = torch.zeros(1, dtype=torch.int32, device=backend.device)
        """Bits of `fsdp_ciera.kernels.heads.Damage`, until an agreement has told all ranks."""
        self.has_raised = False
        """Whether this rank has raised for its `damage` or for another channel's."""
        self.held: torch.Tensor | None = None
        """The last output [rows, num_values], where it holds a codec's state; otherwise `None`."""
        self._column: Column | None = None
        self._sent_unit_bytes = [0] * len(self.codecs)
        self.is_touched = False
        """See [Note: The own slot]."""
        self.announced: Announced | None = None
        """What this rank said at the last agreement."""
        self.settled: Settled | None = None
        """What all ranks agreed on there; `None` where nothing is."""

    def is_of(self, process_group: dist.ProcessGroup, values: torch.Tensor) -> bool:
        """Whether a gather of these values over that process group belongs to this channel."""
        is_same = process_group.group_name == self.process_group.group_name
        return is_same and values.dtype == self.layout.dtype and values.numel() == self.layout.num_values

    # memory

    @property
    def is_in_place(self) -> bool:
        """Whether an output is held between gathers, since it is some codec's state."""
        return any(codec.is_in_place for codec in self.codecs)

    @property
    def cache_bytes(self) -> int:
        """Bytes of codec state held now."""
        if not self.has_base:
            return 0
        return sum(
            CODECS[run.codec].cache_bytes(run.num_values, self.layout.dtype, self._block_size, self.cut.num_nodes - 1)
            for run in self.layout.runs
        )

    @property
    def held_output_bytes(self) -> int:
        """Bytes of `held` beyond the values that count as state: the runs of other codecs."""
        if self.held is None:
            return 0
        num_in_place = sum(codec.unit.num_values for codec in self.codecs if codec.is_in_place)
        return (self.held.numel() - len(self.held) * num_in_place) * self.held.element_size()

    def forget(self) -> None:
        """Drops all state of this rank: the next gather is a full one, on all ranks."""
        self.has_base = self.is_touched = False
        self.held = self._column = None
        self.announced = None
        for codec in self.codecs:
            codec.forget()

    # at the agreement

    def announce(self, values: torch.Tensor) -> Announced:
        """Encodes the shard [num_values] that the next gather will send.

        Changes no state, see [Note: State moves in the gather only] in codecs/base.py. May raise whatever encoding raises.
        """
        if self.is_touched:
            self.forget()
        backend, plan = self.backend, self.payload_plan
        with self.stage("Hash"):
            checksum = backend.checksum(values.view(1, -1))
            for codec in self.codecs:
                codec.detect(values)
        with self.stage("PreDecmp"):  # the largest allocation: should it fail, the peers hear of it
            for codec in self.codecs:
                codec.prepare()
        with self.stage("Cmp"):
            collector = backend.collector(plan, self.codecs)
            for codec in self.codecs:
                codec.encode(values, collector, is_full=not self.has_base)
            encoded = backend.seal(plan, self.codecs, collector, self.raw_payload_bytes, self.room_bytes)
        seen, self.changes.seen_checksum = self.changes.seen_checksum, checksum
        has_changed = torch.zeros_like(checksum) if seen is None else (checksum != seen).to(torch.int64)
        counts = [codec.block_counts for codec in self.codecs]
        block_counts = sum(num_blocks for num_blocks, _ in counts), sum(num_reused for _, num_reused in counts)
        self.announced = Announced(checksum, has_changed, encoded, block_counts)
        return self.announced

    def own_numbers(self) -> torch.Tensor:
        """The numbers that the host must read about this rank's sections, int64 [any] on the device."""
        if self.announced is None or self.announced.encoded is None:
            return self.backend.numbers()
        return self.announced.encoded.numbers

    def learn(self, numbers: list[int]) -> None:
        """Takes these numbers, once the host has read them."""
        if self.announced is not None and self.announced.encoded is not None:
            self.announced.encoded.learn(numbers)
            self.room_bytes = self.backend.room_bytes_after(self.announced.encoded, self.raw_payload_bytes)

    # in the gather

    def name_of(self, settled: Settled) -> int:
        """The name of the next gather, the same on all ranks and never a reserved one. It leaves the number of the gather out
        where nothing was agreed on, since ranks may count differently then."""
        text = f"{self.fingerprint} {settled.next_sequence if settled.is_agreed else 0}".encode()
        return max(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"), FIRST_NAME)

    def take_payload(self, values: torch.Tensor, checksum: torch.Tensor, settled: Settled) -> torch.Tensor:
        """Makes this rank's payload of the next gather, uint8 [settled.payload_bytes]. The sender's state moves on."""
        if self.announced is None:  # the state was dropped since the agreement
            return self.empty_payload(settled.payload_bytes, BROKEN_PROMISE)
        backend, plan, encoded = self.backend, self.payload_plan, self.announced.encoded
        if settled.num_gathers:
            encoded = self._encode_repeat(values)
            if backend.checks_at_once and int(encoded.payload_bytes) > settled.payload_bytes:
                return self.empty_payload(settled.payload_bytes, BROKEN_PROMISE)  # weights changed: it has no room
        assert encoded is not None, "the first gather of this agreement has been made"
        self._sent_unit_bytes = backend.section_bytes(plan, encoded)
        with self.stage("Cmp"):
            payload = backend.payload(plan, encoded, settled.payload_bytes)
            for number, codec in enumerate(self.codecs):
                codec.fill(values, plan.fixed(payload, number))
            name = self.name_of(settled)
            backend.stamp(payload, name, checksum, self.announced.checksum, encoded.payload_bytes)
        self.announced = replace(self.announced, encoded=None)  # as much again as the payload
        return payload

    def _encode_repeat(self, values: torch.Tensor) -> Encoded:
        """Makes the sections of values that did not change since the last gather."""
        with self.stage("Cmp"):
            collector = self.backend.collector(self.payload_plan, self.codecs)
            for codec in self.codecs:
                if codec.stateless:
                    codec.encode(values, collector, is_full=False)
                else:
                    self.backend.no_sections(codec, collector)
            return self.backend.seal(self.payload_plan, self.codecs, collector, self.raw_payload_bytes, self.room_bytes)

    def empty_payload(self, num_bytes: int, name: int) -> torch.Tensor:
        """Makes a payload with a reserved name, which nobody decodes."""
        payload = self.backend.empty(num_bytes).zero_()
        no_checksum = self.backend.numbers(0)
        self.backend.stamp(payload, name, no_checksum, no_checksum, self.backend.numbers(num_bytes))
        return payload

    def take_column(self) -> Column:
        """Returns the column that is held, where a codec decodes in place; otherwise a fresh one."""
        if self._column is None:
            num_nodes, dtype = self.cut.num_nodes, self.layout.dtype
            shard_bytes = num_nodes * self.layout.num_values * dtype.itemsize
            buffer = self.backend.empty(shard_bytes + 8 * (1 + num_nodes))
            shards = buffer[:shard_bytes].view(dtype).view(num_nodes, self.layout.num_values)
            column = Column(buffer, shards, buffer[shard_bytes:])
            if not self.is_in_place:
                return column
            self._column = column
        self.is_touched = True
        return self._column

    def head(self, checksum: torch.Tensor, settled: Settled) -> torch.Tensor:
        """Makes the head alone, uint8 [HEAD_BYTES], for a gather in which the shards travel as they are."""
        head = self.backend.empty(HEAD_BYTES)
        name, size = self.name_of(settled), self.backend.numbers(self.raw_payload_bytes)
        self.backend.stamp(head, name, checksum, checksum, size)
        return head

    def decode(self, payloads: torch.Tensor, row_ok: torch.Tensor, output: torch.Tensor) -> None:
        """Decodes payloads uint8 [rows, any] into the other ranks' rows of `output` [rows, num_values]. The receiver's state
        moves on."""
        opened = self.backend.open(self.payload_plan, self.codecs, payloads, self.row, row_ok, self.damage)
        for codec, received in zip(self.codecs, opened, strict=True):
            codec.decode(received, output)

    def seed(self, values: torch.Tensor, output: torch.Tensor) -> None:
        """Takes the shards as state, after a gather in which they travelled as they are."""
        for codec in self.codecs:
            codec.seed(values, output)

    def run_bytes(self, settled: Settled) -> list[int]:
        """Bytes of each run that this rank has sent to each peer in the gather that `settled` describes. The runs of a unit
        share its bytes in proportion to their values."""
        runs, item_bytes = self.layout.runs, self.layout.dtype.itemsize
        if settled.payload_bytes >= self.raw_payload_bytes:
            return [run.num_values * item_bytes for run in runs]
        run_bytes = [0] * len(runs)
        if settled.payload_bytes == HEAD_BYTES:
            return run_bytes
        for numbers, codec, section_bytes in zip(self.run_numbers, self.codecs, self._sent_unit_bytes, strict=True):
            unit_bytes = codec.fixed_bytes + section_bytes
            for number in numbers:
                run_bytes[number] = unit_bytes * runs[number].num_values // codec.unit.num_values
        return run_bytes

    def decode_nothing(self, output: torch.Tensor) -> None:
        """Makes the output from the state alone, after a gather in which nothing travelled, since no shard changed."""
        for codec in self.codecs:
            codec.decode(None, output)

    def complete(self, settled: Settled, checksums: torch.Tensor | None, output: torch.Tensor) -> None:
        """Takes note that a gather is complete, so that the state describes it. `checksums` are those of all shards, int64
        [world_size]; `None` where no shard travelled, since none changed."""
        self.sequence = settled.next_sequence
        if checksums is not None:
            self.base = name_of_base(self.backend, self.sequence, checksums)
        self.has_base = True
        self.is_touched = False
        self.changes.at_last_gather = self.changes.agreed
        if self.is_in_place:
            self.held = output if self._column is None else self._column.shards
        settled.num_gathers += 1
        if self.announced is not None:  # not needed where the shards travelled as they are
            self.announced = replace(self.announced, encoded=None)

    def settle_alone(self) -> Settled:
        """Settles a gather without an agreement: all ranks send their shards as they are, and the next agreement goes on from
        there."""
        raw_bytes = self.raw_payload_bytes
        return Settled("cold", raw_bytes, raw_bytes, self.sequence + 1, is_agreed=False)

    def start_over(self, settled: Settled, checksum: torch.Tensor) -> Settled:
        """Settles a gather again in which some rank did not send what was settled: all ranks send their shards as they are
        instead. The gather keeps its number."""
        block_counts = (0, 0) if self.announced is None else self.announced.block_counts
        self.announced = Announced(checksum, torch.zeros_like(checksum), None, block_counts)
        self.damage.zero_()
        self.has_base = False
        self.settled = Settled("cold", self.raw_payload_bytes, settled.repeat_bytes, settled.next_sequence)
        return self.settled

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the host thread's seconds in one of `STAGES`, and names the stage in a profile."""
        start = time.perf_counter()
        with record_function(f"Ciera::{name} ({self.descriptor['module']})"):
            yield
        self.stage_seconds[name] += time.perf_counter() - start


def encode_descriptor(descriptor: Mapping[str, Any]) -> bytes:
    """Writes a descriptor as JSON with sorted keys."""
    return json.dumps(descriptor, sort_keys=True).encode()


def fingerprint_of(descriptor: Mapping[str, Any]) -> int:
    """Makes a 63-bit number that differs when any field of the descriptor does."""
    return int.from_bytes(hashlib.blake2b(encode_descriptor(descriptor), digest_size=8).digest(), "little") >> 1


def describe(module: str, policy: CieraPolicy, layout: Layout, cut: Cut, backend: Backend) -> dict[str, Any]:
    """Makes the descriptor of a channel: the fields that must be equal on all its ranks."""
    return {
        **common_fields(module, policy),
        "device": backend.name,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "num_values": layout.num_values,
        "group_size": cut.world_size,
        "ranks per node": cut.ranks_per_node,
        "layout": [f"{run.category}:{run.codec}:{run.num_values}" for run in layout.runs],
    }


def common_fields(module: str, policy: CieraPolicy) -> dict[str, Any]:
    """The fields that must be equal on all ranks whatever they exchange: module, versions and policy."""
    return {
        "module": module,
        "fsdp_ciera version": __version__,
        "wire version": WIRE_VERSION,
        "torch version": torch.__version__.split("+")[0],
        **{f"policy.{name}": value for name, value in policy.to_dict().items()},
    }

"""`Backend`: the steps of gathers that differ by kind of device. The pipeline (fsdp_ciera.gather) is written once, above it.

A payload   head | table | fixed parts | sections
    head        32 bytes: whose gather this is (fsdp_ciera.kernels.heads)
    table       a u64 for each section: coding in the top 8 bits; its end in the lower 56, counted from the payload's beginning
    fixed       a part for each unit, whose size all ranks know
    sections    in the order of units, of any size
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdp_ciera.codecs.base import Codec, Unit, UnitCoder
from fsdp_ciera.kernels.heads import HEAD_BYTES, TABLE_ENTRY_BYTES


class Stretch(Protocol):
    """A run of a layout, with the fields that backends read."""

    @property
    def codec(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def num_values(self) -> int: ...


@dataclass(frozen=True)
class PayloadPlan:
    """Where the parts of a channel's payloads lie, as far as all ranks know beforehand. Positions are bytes from the payload's
    beginning."""

    fixed_at: tuple[int, ...]
    """The position of each unit's fixed part."""
    fixed_bytes: tuple[int, ...]
    """Bytes of each unit's fixed part."""
    first_sections: tuple[int, ...]
    """The number of each unit's first section."""
    num_sections: int
    """The number of sections of all units."""
    sections_at: int
    """The position of the first section, which is the end of a payload whose sections are all empty."""
    alignment: int
    """Bytes; fixed parts and sections begin at multiples of it."""

    @property
    def has_fixed_parts(self) -> bool:
        """Whether payloads hold anything where no value changed. If not, such a payload is only a head."""
        return any(self.fixed_bytes)

    def fixed(self, payload: torch.Tensor, number: int) -> torch.Tensor:
        """The fixed part of unit `number`, uint8 [..., fixed bytes], as a view of payloads uint8 [..., any]."""
        return payload[..., self.fixed_at[number] : self.fixed_at[number] + self.fixed_bytes[number]]


def plan_payload(codecs: Sequence[Codec], alignment: int) -> PayloadPlan:
    """Lays out the payloads of the units that these codecs code."""

    def aligned(position: int) -> int:
        return -(-position // alignment) * alignment

    num_sections = [codec.num_sections for codec in codecs]
    position = aligned(HEAD_BYTES + sum(num_sections) * TABLE_ENTRY_BYTES)
    fixed_at = []
    for codec in codecs:
        fixed_at.append(position)
        position = aligned(position + codec.fixed_bytes)
    first_sections = tuple(sum(num_sections[:number]) for number in range(len(codecs)))
    fixed_bytes = tuple(codec.fixed_bytes for codec in codecs)
    return PayloadPlan(tuple(fixed_at), fixed_bytes, first_sections, sum(num_sections), position, alignment)


class Encoded(Protocol):
    """The sections of one payload, made at the agreement and sent in the next gather."""

    @property
    def payload_bytes(self) -> torch.Tensor:
        """Bytes of the whole payload, int64 [1] on the backend's device."""

    @property
    def repeat_bytes(self) -> torch.Tensor:
        """Bytes of the next payload if the shard does not change, int64 [1] on the backend's device."""

    @property
    def numbers(self) -> torch.Tensor:
        """The numbers that the host must read together with the table of the agreement, int64 [any] on the backend's device."""

    def learn(self, numbers: Sequence[int]) -> None:
        """Takes `numbers`, once the host has read them."""


class Backend(ABC):
    """Kernels, coder, memory and host reads of one kind of device.

    [Note: Damage] Nothing in a payload is trusted with memory. The decoder reports what does not fit: on CPU by
    `CieraDecodeError`, on CUDA by bits of a flag on the device (fsdp_ciera.kernels.heads.Damage). Test: test_sections.py,
    damaged payloads; test_kernels_shim.py, damaged input.
    """

    name: str
    """The backend's name: the same on ranks that can decode each other's payloads."""
    alignment: int
    """Bytes; fixed parts and sections begin at multiples of it."""
    checks_at_once: bool
    """Whether the host may read results of the device in a gather. If not, a gather without payloads exchanges nothing, and the
    next agreement reports errors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # units

    @abstractmethod
    def group_runs(self, runs: Sequence[Stretch]) -> list[list[int]]:
        """Groups runs into units. Returns the numbers of the runs of each unit."""

    @abstractmethod
    def coder(self, unit: Unit, codec: str, in_place: bool) -> UnitCoder:
        """Makes the coder that writes and reads the parts of a unit with that codec. `in_place`: its state is an output."""

    @abstractmethod
    def supports(self, codec: str, dtype: torch.dtype) -> bool:
        """Whether runs of `dtype` can have that codec on this device."""

    # memory and numbers

    @abstractmethod
    def empty(self, num_bytes: int) -> torch.Tensor:
        """Makes memory for payloads, uint8 [num_bytes], uninitialised."""

    def numbers(self, *values: int) -> torch.Tensor:
        """Puts numbers on the device, int64 [len(values)]."""
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)

    def read(self, numbers: torch.Tensor) -> list[Any]:
        """Reads a tensor into nested lists. The host waits for the device here, and nowhere else."""
        return numbers.tolist()

    @abstractmethod
    def checksum(self, rows: torch.Tensor) -> torch.Tensor:
        """Computes 64-bit checksums of rows of any dtype, [num_rows, n] -> int64 [num_rows] on the device."""

    # the sender's side

    @abstractmethod
    def collector(self, plan: PayloadPlan, codecs: Sequence[Codec]) -> Any:
        """Makes the object that collects the sections of codecs, in the order of units."""

    def first_room_bytes(self, shard_bytes: int) -> int:
        """Bytes to set aside for sections before an agreement has shown how much they take."""
        return shard_bytes // 4

    def room_bytes_after(self, encoded: Encoded, shard_bytes: int) -> int:
        """Bytes to set aside for the next sections, once the host knows how much these took."""
        return self.first_room_bytes(shard_bytes)

    @abstractmethod
    def seal(
        self, plan: PayloadPlan, codecs: Sequence[Codec], collector: Any, most_bytes: int, room_bytes: int
    ) -> Encoded:
        """Completes the sections of one payload. A payload of `most_bytes` or more counts as exactly `most_bytes`, and need not
        be kept: the shard then travels as it is. `room_bytes`: the bytes to set aside, where that must be known beforehand."""

    @abstractmethod
    def no_sections(self, codec: Codec, collector: Any) -> None:
        """Adds the sections of a unit in which nothing changed."""

    @abstractmethod
    def section_bytes(self, plan: PayloadPlan, encoded: Encoded) -> list[int]:
        """Bytes of sections and table of each unit. Does not wait for the device: it is called once the agreement has read
        them."""

    @abstractmethod
    def payload(self, plan: PayloadPlan, encoded: Encoded, num_bytes: int) -> torch.Tensor:
        """Makes a payload, uint8 [num_bytes], and writes table and sections. The caller writes fixed parts and head."""

    @abstractmethod
    def stamp(
        self,
        payload: torch.Tensor,
        name: int,
        checksum: torch.Tensor,
        agreed: torch.Tensor,
        payload_bytes: torch.Tensor,
    ) -> None:
        """Writes the head. Its name becomes `BROKEN_PROMISE` where the shard's `checksum`, int64 [1], is not `agreed`."""

    # the receiver's side

    @abstractmethod
    def check_heads(self, heads: torch.Tensor, own: int, name: int, damage: torch.Tensor) -> torch.Tensor:
        """Checks heads uint8 [rows, at least 32] -> int32 [rows]: 0 for rows that must not be decoded. `own` is this rank's
        row. Sets bits of `damage`, int32 [1]."""

    @abstractmethod
    def open(
        self, plan: PayloadPlan, codecs: Sequence[Codec], payloads: torch.Tensor, own: int, row_ok: torch.Tensor,
        damage: torch.Tensor,
    ) -> list[Any]:  # fmt: skip
        """Opens payloads uint8 [rows, any]. Returns for each unit the object that its coder reads, without this rank's row
        `own`."""

    def flag_difference(self, checksum: torch.Tensor, agreed: torch.Tensor, damage: torch.Tensor, flag: int) -> None:
        """Sets `flag` in `damage` if any of two tensors' checksums differ."""
        damage |= (checksum != agreed).any().to(torch.int32) * flag

    def damage_now(self, damage: torch.Tensor) -> int:
        """The bits of `damage` that are set, where the host may look now; else 0."""
        return int(damage) if self.checks_at_once else 0


def name_of_base(backend: Backend, sequence: int, checksums: torch.Tensor) -> torch.Tensor:
    """Computes the name of a completed gather, int64 [1] above 0, from its number and the checksums of all ranks' shards.

    [Note: Mispaired gathers] When ranks gather different modules of the same class and shape at the same time, their
    names can be alike. Both then remember the same checksums, but in different channels; so when the channels meet again
    their bases differ, and all ranks raise. A mere counter would not tell. Test: test_failures.py, two roots in different
    order.
    """
    number = torch.full((1,), sequence, dtype=torch.int64, device=checksums.device)
    identity = torch.cat([checksums.view(-1), number])
    return (backend.checksum(identity.view(1, -1)) & ((1 << 62) - 1)) + 1

"""`Backend`: what one kind of device does for gathers. The pipeline (fsdp_ciera.gather) is written once, on top of it.

A payload   head | table | fixed parts | sections
    head        32 bytes: whose gather this is (fsdp_ciera.kernels.heads)
    table       a u64 a section: coding in the top 8 bits, its end in the lower 56, counted from the payload's beginning
    fixed       a part a unit, whose size all ranks know
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
    """A run of a layout, as far as backends look at it."""

    @property
    def codec(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def num_values(self) -> int: ...


@dataclass(frozen=True)
class PayloadPlan:
    """Where the parts of a channel's payloads lie, as far as all ranks know beforehand. Bytes, counted from the payload's
    beginning."""

    fixed_at: tuple[int, ...]
    """By unit."""
    fixed_bytes: tuple[int, ...]
    """By unit."""
    first_sections: tuple[int, ...]
    """By unit: the number of its first section."""
    num_sections: int
    sections_at: int
    """Where the first section begins, and the end of a payload whose sections are all empty."""
    alignment: int
    """Fixed parts and sections begin at multiples of it."""

    @property
    def has_fixed_parts(self) -> bool:
        """Whether payloads hold anything where no value changed. If not, they are a head and nothing else then."""
        return any(self.fixed_bytes)

    def fixed(self, payload: torch.Tensor, number: int) -> torch.Tensor:
        """The fixed part of a unit, uint8 [..., fixed bytes], as a view of payloads uint8 [..., any]."""
        return payload[..., self.fixed_at[number] : self.fixed_at[number] + self.fixed_bytes[number]]


def plan_payload(codecs: Sequence[Codec], alignment: int) -> PayloadPlan:
    """Lays out the payloads of these units."""

    def aligned(position: int) -> int:
        return -(-position // alignment) * alignment

    num_sections = [codec.num_sections for codec in codecs]
    position = aligned(HEAD_BYTES + sum(num_sections) * TABLE_ENTRY_BYTES)
    fixed_at = []
    for codec in codecs:
        fixed_at.append(position)
        position = aligned(position + codec.fixed_bytes)
    first = [sum(num_sections[:number]) for number in range(len(codecs))]
    fixed_bytes = tuple(codec.fixed_bytes for codec in codecs)
    return PayloadPlan(tuple(fixed_at), fixed_bytes, tuple(first), sum(num_sections), position, alignment)


class Encoded(Protocol):
    """The sections of one payload, made at the agreement and sent in the next gather."""

    @property
    def payload_bytes(self) -> torch.Tensor:
        """int64 [1] on the backend's device: bytes of the whole payload."""

    @property
    def repeat_bytes(self) -> torch.Tensor:
        """int64 [1] on the backend's device: bytes of the next payload if the shard does not change."""

    @property
    def numbers(self) -> torch.Tensor:
        """int64 [any] on the backend's device: what the host must learn of it, with what it reads at the agreement anyway."""

    def learn(self, numbers: Sequence[int]) -> None:
        """The host has read `numbers`."""


class Backend(ABC):
    """Kernels, coder, memory and host reads of one kind of device.

    [Note: Damage] Nothing that a payload says is trusted with memory. What does not fit is told: on CPU by `CieraDecodeError`
    from the decoder, on CUDA by bits of a flag on the device (fsdp_ciera.kernels.heads.Damage). Test: test_sections.py,
    damaged payloads; test_kernels_shim.py, damaged input.
    """

    name: str
    """The same on ranks that can understand one another."""
    alignment: int
    checks_at_once: bool
    """Whether the host may read in a gather what the device has made. If not, a gather without payloads exchanges nothing,
    and what is wrong is told by the next agreement."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # units

    @abstractmethod
    def group_runs(self, runs: Sequence[Stretch]) -> list[list[int]]:
        """Numbers of the runs that make a unit, by unit."""

    @abstractmethod
    def coder(self, unit: Unit, codec: str, in_place: bool) -> UnitCoder:
        """What writes and reads the parts of a unit with that codec. `in_place`: its state is an output."""

    @abstractmethod
    def supports(self, codec: str, dtype: torch.dtype) -> bool:
        """Whether runs of `dtype` can have that codec here."""

    # memory and numbers

    @abstractmethod
    def empty(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] for payloads, uninitialised."""

    def numbers(self, *values: int) -> torch.Tensor:
        """int64 [len(values)] on the device."""
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)

    def read(self, numbers: torch.Tensor) -> list[Any]:
        """Nested lists of what a tensor holds. The host waits for the device here, and nowhere else."""
        return numbers.tolist()

    @abstractmethod
    def checksum(self, rows: torch.Tensor) -> torch.Tensor:
        """64-bit checksums of rows of any dtype, [num_rows, n] -> int64 [num_rows] on the device."""

    # the sender's side

    @abstractmethod
    def collector(self, plan: PayloadPlan, codecs: Sequence[Codec]) -> Any:
        """What codecs add their sections to, in the order of units."""

    def first_room_bytes(self, shard_bytes: int) -> int:
        """Room for sections, as long as no agreement has said how much they take."""
        return shard_bytes // 4

    def room_bytes_after(self, encoded: Encoded, shard_bytes: int) -> int:
        """Room for the next sections, when the host has learned how much these took."""
        return self.first_room_bytes(shard_bytes)

    @abstractmethod
    def seal(
        self, plan: PayloadPlan, codecs: Sequence[Codec], collector: Any, most_bytes: int, room_bytes: int
    ) -> Encoded:
        """The sections of one payload. A payload of `most_bytes` or more counts as exactly so many, and need not be kept: the
        shard then travels as it is. `room_bytes`: most that is set aside, where that must be known beforehand."""

    @abstractmethod
    def no_sections(self, codec: Codec, collector: Any) -> None:
        """Adds the sections of a unit in which nothing changed."""

    @abstractmethod
    def section_bytes(self, plan: PayloadPlan, encoded: Encoded) -> list[int]:
        """Bytes of sections and table of each unit. Waits for nothing: called after the agreement has read them."""

    @abstractmethod
    def payload(self, plan: PayloadPlan, encoded: Encoded, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], room for the payload, with table and sections in their places. Fixed parts and head are the
        caller's."""

    @abstractmethod
    def stamp(
        self,
        payload: torch.Tensor,
        name: int,
        checksum: torch.Tensor,
        agreed: torch.Tensor,
        payload_bytes: torch.Tensor,
    ) -> None:
        """Writes the head. Where the shard's checksum, int64 [1], is not the one that was agreed on, it says
        `BROKEN_PROMISE`."""

    # the receiver's side

    @abstractmethod
    def check_heads(self, heads: torch.Tensor, own: int, name: int, damage: torch.Tensor) -> torch.Tensor:
        """Heads uint8 [rows, at least 32] -> int32 [rows]: 0 for rows that must not be decoded. Sets bits of `damage`,
        int32 [1]."""

    @abstractmethod
    def open(
        self, plan: PayloadPlan, codecs: Sequence[Codec], payloads: torch.Tensor, own: int, row_ok: torch.Tensor,
        damage: torch.Tensor,
    ) -> list[Any]:  # fmt: skip
        """Payloads uint8 [rows, any] -> for each unit what its coder reads. The own row is left out."""

    def flag_difference(self, checksum: torch.Tensor, agreed: torch.Tensor, damage: torch.Tensor, flag: int) -> None:
        """Sets `flag` in `damage` where two checksums differ."""
        damage |= (checksum != agreed).any().to(torch.int32) * flag

    def damage_now(self, damage: torch.Tensor) -> int:
        """The bits that are set, where the host may look now; else 0."""
        return int(damage) if self.checks_at_once else 0


def names_of_base(backend: Backend, sequence: int, checksums: torch.Tensor) -> torch.Tensor:
    """The name of a completed gather, int64 [1], above 0: of its number and of what every rank carried in it.

    [Note: Mispaired gathers] When ranks gather different modules of the same class and shape at the same time, their
    names can be alike. Both then remember the same checksums, but in different channels; so when the channels meet again
    their bases differ, and all ranks raise. A mere counter would not tell. Test: test_failures.py, two roots in different
    order.
    """
    told = torch.cat([checksums.view(-1), torch.full((1,), sequence, dtype=torch.int64, device=checksums.device)])
    return (backend.checksum(told.view(1, -1)) & ((1 << 62) - 1)) + 1

"""`CpuBackend`: kernels of the host build and zstd. The host may look at everything at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fsdp_ciera.backends.base import Backend, Encoded, PayloadPlan, Stretch
from fsdp_ciera.backends.host_coder import HostCoder, PeerParts
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.codecs.base import Codec, Unit, UnitCoder
from fsdp_ciera.codecs.sections import Coding, SectionWriter, StoredSection
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.heads import (
    BROKEN_PROMISE,
    CODING_SHIFT,
    FAILED,
    HEAD,
    HEAD_BYTES,
    MAGIC,
    TABLE_ENTRY_BYTES,
    WIRE_VERSION,
    Damage,
)
from fsdp_ciera.kernels.memory import Bytes, empty_bytes

_MOST_OF_ROOM = 4
"""[Note: Room for sections] Room for the largest possible sections is set aside; pages that are never touched take no memory.
Sections that take less than one part in this many of it are copied out, since the rest of a huge page counts as used. Test:
test_memory.py, peak."""


@dataclass(frozen=True)
class HostEncoded:
    """Sections side by side in `data`, and the coding and bytes of each. Keeps none of a payload that is as large as the
    shard."""

    data: Bytes
    entries: tuple[tuple[Coding, int], ...]
    num_bytes: int
    num_repeat_bytes: int

    @property
    def payload_bytes(self) -> torch.Tensor:
        """See `fsdp_ciera.backends.base.Encoded`."""
        return torch.tensor([self.num_bytes], dtype=torch.int64, device="cpu")

    @property
    def repeat_bytes(self) -> torch.Tensor:
        """See `fsdp_ciera.backends.base.Encoded`."""
        return torch.tensor([self.num_repeat_bytes], dtype=torch.int64, device="cpu")

    @property
    def numbers(self) -> torch.Tensor:
        """No numbers, since the host knows them all."""
        return torch.empty(0, dtype=torch.int64, device="cpu")

    def learn(self, numbers: Sequence[int]) -> None:
        """Takes nothing."""
        return None


class CpuBackend(Backend):
    """See `fsdp_ciera.backends.base.Backend`."""

    name = "cpu"
    alignment = 1
    checks_at_once = True

    def group_runs(self, runs: Sequence[Stretch]) -> list[list[int]]:
        """Makes every run a unit of its own, since the skewed counts of one run blur with those of another."""
        return [[number] for number in range(len(runs))]

    def coder(self, unit: Unit, codec: str, in_place: bool) -> UnitCoder:
        """Makes a coder with zstd and the host's kernels."""
        return HostCoder(unit)

    def supports(self, codec: str, dtype: torch.dtype) -> bool:
        """Whether the codec supports `dtype`: all codecs run on CPU."""
        return CODECS[codec].supports(dtype)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Makes memory for payloads. See [Note: Huge pages] in kernels/memory.py."""
        return torch.from_numpy(empty_bytes(num_bytes))

    def checksum(self, rows: torch.Tensor) -> torch.Tensor:
        """Computes checksums in one pass."""
        return kernels_of(rows).checksum(rows)

    def collector(self, plan: PayloadPlan, codecs: Sequence[Codec]) -> SectionWriter:
        """Makes a writer with a buffer for the largest possible sections."""
        return SectionWriter(empty_bytes(sum(codec.coder.most_section_bytes(codec.name) for codec in codecs)))

    def no_sections(self, codec: Codec, collector: SectionWriter) -> None:
        """Adds empty sections."""
        for _ in range(codec.num_sections):
            collector.empty()

    def seal(
        self, plan: PayloadPlan, codecs: Sequence[Codec], collector: SectionWriter, most_bytes: int, room_bytes: int = 0
    ) -> HostEncoded:
        """Completes the sections of one payload. See [Note: Room for sections]."""
        entries = tuple(collector.entries)
        assert len(entries) == plan.num_sections, (len(entries), plan.num_sections)
        stateless_bytes = 0
        for codec, first in zip(codecs, plan.first_sections, strict=True):
            if codec.stateless:
                stateless_bytes += sum(num_bytes for _, num_bytes in entries[first : first + codec.num_sections])
        is_empty = not plan.has_fixed_parts and all(entry == (Coding.PLAIN, 0) for entry in entries)
        num_bytes = HEAD_BYTES if is_empty else plan.sections_at + collector.num_bytes
        repeat_bytes = plan.sections_at + stateless_bytes if plan.has_fixed_parts else HEAD_BYTES
        if num_bytes >= most_bytes:
            return HostEncoded(empty_bytes(0), (), most_bytes, min(repeat_bytes, most_bytes))
        return HostEncoded(collector.written(_MOST_OF_ROOM), entries, num_bytes, min(repeat_bytes, most_bytes))

    def section_bytes(self, plan: PayloadPlan, encoded: Encoded) -> list[int]:
        """Bytes of sections and table of each unit, as they were written."""
        assert isinstance(encoded, HostEncoded)
        if encoded.num_bytes == HEAD_BYTES:
            return [0] * len(plan.fixed_at)
        ends = (*plan.first_sections[1:], plan.num_sections)
        return [
            sum(num_bytes + TABLE_ENTRY_BYTES for _, num_bytes in encoded.entries[first:end])
            for first, end in zip(plan.first_sections, ends, strict=True)
        ]

    def payload(self, plan: PayloadPlan, encoded: Encoded, num_bytes: int) -> torch.Tensor:
        """Makes a payload, with zeros behind the last section."""
        assert isinstance(encoded, HostEncoded)
        payload = empty_bytes(num_bytes)
        end = HEAD_BYTES
        if encoded.num_bytes > HEAD_BYTES:
            table, end = [], plan.sections_at
            for coding, section_bytes in encoded.entries:
                end += section_bytes
                table.append(coding << CODING_SHIFT | end)
            payload[HEAD_BYTES : HEAD_BYTES + TABLE_ENTRY_BYTES * len(table)] = np.array(table, "<u8").view(np.uint8)
            payload[plan.sections_at : end] = encoded.data
        payload[end:] = 0
        return torch.from_numpy(payload)

    def stamp(
        self,
        payload: torch.Tensor,
        name: int,
        checksum: torch.Tensor,
        agreed: torch.Tensor,
        payload_bytes: torch.Tensor,
    ) -> None:
        """Writes the head at once."""
        head = payload[:HEAD_BYTES].numpy().view(HEAD)
        head["name"] = name if int(checksum) == int(agreed) else BROKEN_PROMISE
        head["checksum"] = checksum.numpy().view("<u8")
        head["payload_bytes"] = int(payload_bytes)
        head["magic"], head["wire_version"], head["alignment"] = MAGIC, WIRE_VERSION, self.alignment

    def check_heads(self, heads: torch.Tensor, own: int, name: int, damage: torch.Tensor) -> torch.Tensor:
        """Checks heads at once."""
        table = heads[:, :HEAD_BYTES].contiguous().numpy().view(HEAD).reshape(-1)
        is_ours = table["magic"] == MAGIC
        is_ours &= (table["wire_version"] == WIRE_VERSION) & (table["alignment"] == self.alignment)
        names = table["name"]
        flags = Damage(0)
        for flag, has_flag in (
            (Damage.FOREIGN, ~is_ours),
            (Damage.BROKEN_PROMISE, is_ours & (names == BROKEN_PROMISE)),
            (Damage.FAILED, is_ours & (names == FAILED)),
            (Damage.OTHER_GATHER, is_ours & (names > FAILED) & (names != name)),
        ):
            if has_flag.any():
                flags |= flag
        damage |= int(flags)
        return torch.from_numpy((is_ours & (names == name)).astype(np.int32))

    def open(
        self, plan: PayloadPlan, codecs: Sequence[Codec], payloads: torch.Tensor, own: int, row_ok: torch.Tensor,
        damage: torch.Tensor,
    ) -> list[list[PeerParts]]:  # fmt: skip
        """Opens payloads. Raises `CieraDecodeError` where a table does not fit its payload."""
        opened: list[list[PeerParts]] = [[] for _ in codecs]
        ends = (*plan.first_sections[1:], plan.num_sections)
        lengths = payloads[:, :HEAD_BYTES].contiguous().numpy().view(HEAD).reshape(-1)["payload_bytes"].tolist()
        for rank, length in enumerate(lengths):
            if rank == own:
                continue
            try:
                sections = read_sections(plan, payloads[rank], length)
            except CieraDecodeError as error:
                raise CieraDecodeError(f"in the payload of rank {rank}: {error}") from None
            for number, (first, end) in enumerate(zip(plan.first_sections, ends, strict=True)):
                parts = PeerParts(rank, rank - (rank > own), plan.fixed(payloads[rank], number), sections[first:end])
                opened[number].append(parts)
        return opened


def read_sections(plan: PayloadPlan, payload: torch.Tensor, length: int) -> list[StoredSection]:
    """Reads the payload of one rank, uint8 [at least length] -> its sections, as views.

    Raises `CieraDecodeError` unless head, table, fixed parts and sections fill the payload exactly.
    """
    stored = payload.numpy()
    if length == HEAD_BYTES and not plan.has_fixed_parts:
        return [StoredSection(Coding.PLAIN, stored[:0])] * plan.num_sections
    if not plan.sections_at <= length <= len(stored):
        raise CieraDecodeError(f"a payload of {length} bytes has {plan.sections_at} bytes before its sections, and room for "
                               f"{len(stored)}")  # fmt: skip
    table = stored[HEAD_BYTES : HEAD_BYTES + TABLE_ENTRY_BYTES * plan.num_sections].copy().view("<u8")
    sections, start = [], plan.sections_at
    for entry in table.tolist():
        end = entry & ((1 << CODING_SHIFT) - 1)
        if not start <= end <= length:
            raise CieraDecodeError(f"a section ends at byte {end} of {length}, and begins at byte {start}")
        sections.append(StoredSection(entry >> CODING_SHIFT, stored[start:end]))
        start = end
    if start != length:
        raise CieraDecodeError(f"the sections of a payload of {length} bytes end at byte {start}")
    return sections

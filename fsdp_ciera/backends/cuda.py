"""`CudaBackend`: tile kernels. Numbers stay on the device, and the host looks at them once an agreement.

NOT YET RUN ON A GPU. Tests run the same kernels on CPU tensors, through the shim or the interpreter (docs/kernels.md).

[Note: Order of streams] FSDP2 calls `allocate` on its copy-in stream and the gather on its all-gather stream, and orders the
two; an agreement runs in `allocate` of the first gather of a pass. What one gather leaves to the next one (state, held
outputs) is ordered by these streams as long as all of it is written on them. Nothing is put on streams of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_ciera.backends.base import Backend, Encoded, PayloadPlan, Stretch
from fsdp_ciera.backends.tile_coder import NUM_SECTIONS, TileCoder, TileReceived, TileSections, units_by_codec
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.codecs.base import Codec, Unit, UnitCoder
from fsdp_ciera.kernels.heads import ALIGNMENT, CODING_SHIFT, HEAD_BYTES, TABLE_ENTRY_BYTES, TILES
from fsdp_ciera.kernels.tiles import Payloads, SectionRoom, TileKernels


class TileEncoded:
    """Sections in an arena, with the table of their ends. All that depends on the values is on the device.

    A payload that has no room in the arena counts as large as the shard, see [Note: Room of an arena].
    """

    def __init__(
        self,
        arena: torch.Tensor,
        table: torch.Tensor,
        sizes: torch.Tensor,
        payload_bytes: torch.Tensor,
        repeat_bytes: torch.Tensor,
    ) -> None:
        self.arena = arena
        self.table = table
        """The ends of the sections, int64 [num_sections]."""
        self.numbers = sizes
        """Bytes of the sections, int64 [num_sections], which the host must read."""
        self.payload_bytes = payload_bytes
        self.repeat_bytes = repeat_bytes
        self.section_bytes: list[int] = [0] * len(sizes)
        """Bytes of each section; 0 until the host has read them."""

    def learn(self, numbers: Sequence[int]) -> None:
        """Takes `numbers`, once the host has read them."""
        self.section_bytes = list(numbers)

    @property
    def needed_bytes(self) -> int:
        """Bytes of an arena that holds these sections, once the host has read theirs."""
        return sum(_aligned(num_bytes) for num_bytes in self.section_bytes)


class CudaBackend(Backend):
    """See `fsdp_ciera.backends.base.Backend`. `kernels` are the tile kernels: launched from PTX, or plain torch.

    [Note: Room of an arena] Only the device knows how many bytes a payload takes, and its room must be set aside before. The
    room is a quarter of the shard at first, and then a quarter more than the last agreement took. Sections that do not fit are
    not written, and the shard travels as it is. Test: test_tile_backend.py, an arena that is too small.
    """

    alignment = ALIGNMENT
    checks_at_once = False

    def __init__(self, device: torch.device, kernels: TileKernels, name: str = "cuda") -> None:
        super().__init__(device)
        self.name = name
        self._kernels = kernels

    def group_runs(self, runs: Sequence[Stretch]) -> list[list[int]]:
        """Makes one unit of all runs with the same codec, since runs are an axis of the kernels."""
        return units_by_codec([run.codec for run in runs])

    def coder(self, unit: Unit, codec: str, in_place: bool) -> UnitCoder:
        """Makes a coder, with the tables of its tiles on the device."""
        return TileCoder(unit, codec, in_place, self._kernels, self.device)

    def supports(self, codec: str, dtype: torch.dtype) -> bool:
        """Whether the codec runs on CUDA and supports `dtype`."""
        return codec in NUM_SECTIONS and CODECS[codec].supports(dtype)

    def numbers(self, *values: int) -> torch.Tensor:
        """Puts numbers on the device from pinned memory, so that the host does not wait."""
        on_host = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Makes memory for payloads. It begins at a multiple of 16 bytes, as all memory of torch does."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def checksum(self, rows: torch.Tensor) -> torch.Tensor:
        """Computes checksums. Costs two launches."""
        return self._kernels.checksum(rows)

    def collector(self, plan: PayloadPlan, codecs: Sequence[Codec]) -> TileSections:
        """Makes an empty collector."""
        return TileSections(self.device)

    def no_sections(self, codec: Codec, collector: TileSections) -> None:
        """Adds empty sections."""
        collector.sizes.append(torch.zeros(codec.num_sections, dtype=torch.int64, device=self.device))

    def seal(
        self, plan: PayloadPlan, codecs: Sequence[Codec], collector: TileSections, most_bytes: int, room_bytes: int
    ) -> TileEncoded:
        """Completes the sections of one payload. See [Note: Room of an arena]."""
        sizes = torch.cat(collector.sizes) if plan.num_sections else self.numbers()
        assert len(sizes) == plan.num_sections, (len(sizes), plan.num_sections)
        most = torch.full((1,), most_bytes, dtype=torch.int64, device=self.device)
        repeat = torch.minimum(self._repeat_bytes(plan, codecs, sizes), most)
        if not plan.num_sections:
            return TileEncoded(self.empty(0), sizes, sizes, repeat, repeat)
        if collector.is_full:
            return TileEncoded(self.empty(0), sizes, sizes, most, repeat)
        table = self._kernels.section_table(sizes, plan.sections_at, TILES)
        total = _end_of(table)
        if not plan.has_fixed_parts:
            total = torch.where(sizes.sum() == 0, HEAD_BYTES, total)
        total = torch.where(total - plan.sections_at > room_bytes, most, total)
        arena = self.empty(_aligned(room_bytes) if collector.packs else 0)
        room = SectionRoom(arena, table, plan.sections_at, 0, plan.sections_at)
        for pack in collector.packs:
            pack(room)
        return TileEncoded(arena, table, sizes, torch.minimum(total, most), repeat)

    def _repeat_bytes(self, plan: PayloadPlan, codecs: Sequence[Codec], sizes: torch.Tensor) -> torch.Tensor:
        """Bytes of the payload of values that did not change, int64 [1]. Codecs without state send their sections again."""
        if not plan.has_fixed_parts:
            return self.numbers(HEAD_BYTES)
        is_sent = [int(codec.stateless) for codec in codecs for _ in range(codec.num_sections)]
        if not any(is_sent):
            return self.numbers(plan.sections_at)
        return _end_of(self._kernels.section_table(sizes * self.numbers(*is_sent), plan.sections_at, TILES))

    def room_bytes_after(self, encoded: Encoded, shard_bytes: int) -> int:
        """Bytes to set aside for the next sections. See [Note: Room of an arena]."""
        assert isinstance(encoded, TileEncoded)
        return min(shard_bytes, max(self.first_room_bytes(shard_bytes), encoded.needed_bytes * 5 // 4))

    def section_bytes(self, plan: PayloadPlan, encoded: Encoded) -> list[int]:
        """Bytes of sections and table of each unit, as they were read at the agreement."""
        assert isinstance(encoded, TileEncoded)
        ends = (*plan.first_sections[1:], plan.num_sections)
        return [
            sum(_aligned(num_bytes) + TABLE_ENTRY_BYTES for num_bytes in encoded.section_bytes[first:end])
            for first, end in zip(plan.first_sections, ends, strict=True)
        ]

    def payload(self, plan: PayloadPlan, encoded: Encoded, num_bytes: int) -> torch.Tensor:
        """Makes a payload. The memory behind this rank's sections is uninitialised."""
        assert isinstance(encoded, TileEncoded)
        payload = self.empty(num_bytes)
        if plan.num_sections:
            table_end = HEAD_BYTES + TABLE_ENTRY_BYTES * plan.num_sections
            payload[HEAD_BYTES:table_end].view(torch.int64).copy_(encoded.table)
        length = min(num_bytes - plan.sections_at, len(encoded.arena))
        if length > 0:
            payload[plan.sections_at : plan.sections_at + length].copy_(encoded.arena[:length])
        return payload

    def stamp(
        self,
        payload: torch.Tensor,
        name: int,
        checksum: torch.Tensor,
        agreed: torch.Tensor,
        payload_bytes: torch.Tensor,
    ) -> None:
        """Writes the head. Costs one launch."""
        self._kernels.write_head(payload, name, checksum, agreed, payload_bytes)

    def check_heads(self, heads: torch.Tensor, own: int, name: int, damage: torch.Tensor) -> torch.Tensor:
        """Checks heads. Costs one launch."""
        return self._kernels.check_heads(heads, own, name, damage)

    def open(
        self,
        plan: PayloadPlan,
        codecs: Sequence[Codec],
        payloads: torch.Tensor,
        own: int,
        row_ok: torch.Tensor,
        damage: torch.Tensor,
    ) -> list[Any]:
        """Returns where each unit finds its parts."""
        units = zip(plan.fixed_at, plan.fixed_bytes, plan.first_sections, strict=True)
        return [
            TileReceived(
                Payloads(payloads, own, row_ok, HEAD_BYTES, plan.sections_at, first), fixed_at, fixed_bytes, damage
            )
            for fixed_at, fixed_bytes, first in units
        ]


class DamageWatch:
    """Copies the flags of channels to the host, without a wait in a gather.

    [Note: Told before the optimizer] A gather copies its flag to pinned memory, behind its last kernel. The host reads all
    flags before an optimizer step, when the gathers are long done. All ranks that saw the damage raise then, before wrong
    gradients reach the weights. The next agreement tells all ranks together. Test: test_tile_backend.py, damage stops the
    optimizer.
    """

    def __init__(self) -> None:
        self._host_flags: dict[str, tuple[torch.Tensor, torch.cuda.Event | None]] = {}

    def tell(self, where: str, damage: torch.Tensor) -> None:
        """Starts the copy of a channel's flag, int32 [1], to the host."""
        is_cuda = damage.device.type == "cuda"
        host_flag, event = self._host_flags.get(where, (None, None))
        if host_flag is None:  # made once, since making it may wait
            host_flag = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=is_cuda)
            event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        host_flag.copy_(damage, non_blocking=True)
        if event is not None:
            event.record()
        self._host_flags[where] = host_flag, event

    def read(self) -> dict[str, int]:
        """Returns the flags that are set, by channel, and clears them. The host waits for the last gathers."""
        set_flags = {}
        for where, (host_flag, event) in self._host_flags.items():
            if event is not None:
                event.synchronize()  # type: ignore[no-untyped-call]
            if int(host_flag):
                set_flags[where] = int(host_flag)
                host_flag.zero_()
        return set_flags


def _end_of(table: torch.Tensor) -> torch.Tensor:
    """Bytes of the payload with this table, int64 [1], rounded up to `ALIGNMENT`."""
    return ((table[-1:] & ((1 << CODING_SHIFT) - 1)) + (ALIGNMENT - 1)) & -ALIGNMENT


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

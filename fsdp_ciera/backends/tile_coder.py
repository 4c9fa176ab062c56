"""`TileCoder`: the parts of payloads on CUDA. A unit is all runs of a codec; peers, runs and tiles are axes of every launch.

values      offsets by tile, a bitmap of bitmaps in two levels, moves, literals
exponents   the same without literals
blocks      which blocks changed, offsets by 64 blocks, exponents
symbols     offsets by tile, the largest exponent of each tile, and the exponents too far below it; nibbles in the fixed part

Counts stay on the device: sections are counted first, and written when the table of all sections of the payload is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_ciera.codecs.base import Unit
from fsdp_ciera.kernels.changes import BYTE_ESCAPE
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.tiles import PLANE_PADDING, Payloads, SectionRoom, TileKernels, make_tiles

NUM_SECTIONS = {"raw": 0, "entropy": 3, "exponent_block": 3, "exponent_delta": 4, "value_delta": 5}
"""The number of sections of a unit, by codec."""


@dataclass
class TileSections:
    """The sizes of sections, and the functions that write them once the table of the payload is known."""

    device: torch.device
    sizes: list[torch.Tensor] = field(default_factory=list)
    """Bytes of the sections of each unit, int64 [sections]."""
    packs: list[Callable[[SectionRoom], None]] = field(default_factory=list)
    """Functions that write the sections of units; they may be called in any order."""
    is_full: bool = False
    """Whether some unit can only be sent as it is."""

    @property
    def num_sections(self) -> int:
        """The number of sections added so far."""
        return sum(map(len, self.sizes))


@dataclass(frozen=True)
class TileReceived:
    """All ranks' payloads, with the positions of one unit's parts."""

    payloads: Payloads
    fixed_at: int
    """The position of the unit's fixed part, in bytes from the payload's beginning."""
    fixed_bytes: int
    damage: torch.Tensor
    """Bits of `fsdp_ciera.kernels.heads.Damage`, int32 [1]."""


class TileCoder:
    """See `fsdp_ciera.codecs.base.UnitCoder`. Sets bits of the flag where a payload is damaged; never waits for the device."""

    def __init__(self, unit: Unit, codec: str, in_place: bool, kernels: TileKernels, device: torch.device) -> None:
        self.unit = unit
        self._kernels = kernels
        self._device = device
        self._tiles = make_tiles(
            unit.stretches,
            device,
            block_size=unit.block_size if codec == "exponent_block" else 0,
            state_is_flat=in_place,
        )

        self._tops: torch.Tensor | None = None  # of the values whose symbols were written last

    @property
    def _format(self) -> FloatFormat:
        return FORMATS[self.unit.dtype]

    @property
    def plane_bytes(self) -> int:
        """Bytes of the plane: low bytes of all values, and behind them the packed top bits; runs are padded to 64 values."""
        num_values = self._tiles.num_plane_values
        return num_values * self._format.low_bytes + packed_bytes(num_values, self._format.top_bits)

    @property
    def symbol_plane_bytes(self) -> int:
        """Bytes of the plane, and half a byte more for each value."""
        return self.plane_bytes + self._tiles.num_plane_values // 2

    @property
    def raw_bytes(self) -> int:
        """Bytes of the values as they are."""
        return self.unit.num_values * self.unit.item_bytes

    def num_sections(self, codec: str) -> int:
        """The number of sections that the codec of that name writes here. See the top of this file."""
        return NUM_SECTIONS[codec]

    def most_section_bytes(self, codec: str) -> int:
        """Never called: the room is what the last agreement took (cuda.py)."""
        raise AssertionError("sections on CUDA are written into an arena")

    # the fixed part

    def fill_raw(self, values: torch.Tensor, fixed: torch.Tensor) -> None:
        """Copies the values. Costs one copy a run."""
        for in_shard, run in self._raw_runs(fixed):
            run.copy_(values[in_shard].view(torch.uint8))

    def read_raw(self, received: TileReceived, output: torch.Tensor) -> None:
        """Copies all ranks' values. Costs one copy a run."""
        start = received.fixed_at
        parts = received.payloads.data[:, start : start + received.fixed_bytes]
        for in_shard, runs in self._raw_runs(parts):
            output[:, in_shard].view(torch.uint8).copy_(runs)

    def _raw_runs(self, parts: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields each run's slice of a shard, and its bytes in parts uint8 [..., raw bytes]."""
        position = 0
        for start, num_values in self.unit.stretches:
            num_bytes = num_values * self.unit.item_bytes
            yield slice(start, start + num_values), parts[..., position : position + num_bytes]
            position += num_bytes

    def fill_plane(self, values: torch.Tensor, fixed: torch.Tensor, exponents: torch.Tensor | None = None) -> None:
        """Writes the sign+mantissa plane. Costs one launch."""
        num_low = self._tiles.num_plane_values * self._format.low_bytes
        top = fixed[num_low:] if self._format.top_bits else None
        self._kernels.split_tiles(values, self._tiles, self._format, fixed[:num_low], top, exponents)

    # state

    def exponent_rows(self, num_rows: int, in_blocks: bool = False) -> torch.Tensor:
        """Makes zeros, uint8 [num_rows, values of the tiles' state]."""
        shape = (num_rows, self._tiles.num_state_values)
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)

    def value_rows(self) -> torch.Tensor:
        """Makes zeros for all ranks' values, [world_size, values of the tiles' state]."""
        shape = (self.unit.world_size, self._tiles.num_state_values)
        return torch.zeros(shape, dtype=self.unit.dtype, device=self._device)

    def take_exponents(self, output: torch.Tensor, exponents: torch.Tensor) -> None:
        """Takes all peers' exponents out of an output. Costs one launch."""
        self._kernels.split_rows(output, self.unit.rank, self._tiles, self._format, exponents)

    def take_own_exponents(self, values: torch.Tensor, exponents: torch.Tensor) -> None:
        """Takes this rank's exponents. Costs one launch."""
        self._kernels.split_tiles(values, self._tiles, self._format, None, None, exponents)

    def take_values(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Takes all ranks' values out of an output. Costs one copy a run."""
        for in_shard, in_state in self._state_slices():
            _integers(rows[:, in_state]).copy_(_integers(output[:, in_shard]))

    def keep_own_values(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies this rank's values into its row. Costs one copy a run."""
        for in_shard, in_state in self._state_slices():
            _integers(rows[self.unit.rank, in_state]).copy_(_integers(values[in_shard]))

    def _state_slices(self) -> Iterator[tuple[slice, slice]]:
        """Yields each run's slice of a shard, and its slice of the state of values."""
        position = 0
        for start, num_values in self.unit.stretches:
            yield slice(start, start + num_values), slice(position, position + num_values)
            position += -(-num_values // PLANE_PADDING) * PLANE_PADDING

    # writing

    def hash_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Hashes the exponents of each block. Costs one launch."""
        return self._kernels.hash_blocks(values, self._tiles, self._format, None)[0]

    def write_symbols(self, values: torch.Tensor, sections: TileSections) -> None:
        """Adds the sections of all exponents. Costs two launches."""
        kernels, tiles, fmt = self._kernels, self._tiles, self._format
        scan = kernels.scan_symbols(values, tiles, fmt)
        self._tops = scan.tops
        first = sections.num_sections
        sections.sizes.append(kernels.symbol_sizes(scan, tiles))
        sections.packs.append(lambda room: kernels.pack_symbols(values, tiles, fmt, scan, _from(room, first)))

    def fill_symbols(self, values: torch.Tensor, fixed: torch.Tensor) -> None:
        """Writes the sign+mantissa plane and the nibbles. Costs two launches."""
        assert self._tops is not None
        self.fill_plane(values, fixed)
        self._kernels.put_nibbles(values, self._tiles, self._format, self._tops, fixed[self.plane_bytes :])
        self._tops = None

    def merge_symbols(self, received: TileReceived, output: torch.Tensor) -> None:
        """Merges exponents and planes into values. Costs one launch."""
        self._kernels.merge_symbols(
            received.payloads, received.fixed_at, self._tiles, self._format, output, received.damage
        )

    def write_blocks(
        self, values: torch.Tensor, hashes: torch.Tensor, last: torch.Tensor | None, sections: TileSections
    ) -> tuple[int, int]:
        """Adds the sections of changed blocks. Costs two launches. Without `last`, the unit is sent as it is, since all
        exponents with the plane take as much. Returns 0 reused blocks, since the host does not know how many changed."""
        kernels, tiles, fmt = self._kernels, self._tiles, self._format
        if last is None:
            self._add_full(sections, NUM_SECTIONS["exponent_block"])
            return tiles.num_blocks, 0
        changed = (hashes != last).any(dim=1).to(torch.uint8)
        sizes, ranks = kernels.block_sizes(changed, tiles)
        first = sections.num_sections
        sections.sizes.append(sizes)
        sections.packs.append(lambda room: kernels.pack_blocks(values, tiles, fmt, changed, ranks, _from(room, first)))
        return tiles.num_blocks, 0

    def write_exponent_changes(self, values: torch.Tensor, last: torch.Tensor | None, sections: TileSections) -> None:
        """Adds the sections of changed exponents. Costs two launches. Without `last`, the unit is sent as it is."""
        kernels, tiles, fmt = self._kernels, self._tiles, self._format
        if last is None:
            self._add_full(sections, NUM_SECTIONS["exponent_delta"])
            return
        scan = kernels.scan_exponents(values, last, tiles, fmt)
        first = sections.num_sections
        sections.sizes.append(kernels.change_sizes(scan, tiles, 0))
        sections.packs.append(lambda room: kernels.pack_exponents(values, last, tiles, fmt, scan, _from(room, first)))

    def write_value_changes(
        self, values: torch.Tensor, rows: torch.Tensor | None, is_flat: bool, sections: TileSections
    ) -> None:
        """Adds the sections of changed values. Costs two launches. Without `rows`, the unit is sent as it is."""
        kernels, tiles, fmt = self._kernels, self._tiles, self._format
        if rows is None:
            self._add_full(sections, NUM_SECTIONS["value_delta"])
            return
        last = rows[self.unit.rank]
        scan = kernels.scan_values(values, last, tiles, fmt, BYTE_ESCAPE)
        first = sections.num_sections
        sections.sizes.append(kernels.change_sizes(scan, tiles, fmt.item_bytes))
        sections.packs.append(
            lambda room: kernels.pack_values(values, last, tiles, fmt, BYTE_ESCAPE, scan, _from(room, first))
        )

    def _add_full(self, sections: TileSections, num_sections: int) -> None:
        sections.sizes.append(torch.zeros(num_sections, dtype=torch.int64, device=self._device))
        sections.is_full = True

    # reading

    def read_blocks(self, received: TileReceived, exponents: torch.Tensor) -> None:
        """Puts the sent blocks into the peers' exponents. Costs one launch."""
        self._kernels.put_blocks(received.payloads, self._tiles, exponents, received.damage)

    def read_exponent_changes(self, received: TileReceived, exponents: torch.Tensor) -> None:
        """Applies the peers' changes to their exponents. Costs one launch."""
        self._kernels.apply_exponents(received.payloads, self._tiles, exponents, received.damage)

    def merge(self, exponents: torch.Tensor, received: TileReceived, output: torch.Tensor) -> None:
        """Merges exponents and planes into values. Costs one launch."""
        self._kernels.merge_rows(exponents, received.payloads, received.fixed_at, self._tiles, self._format, output)

    def read_value_changes(self, received: TileReceived, rows: torch.Tensor, is_flat: bool) -> None:
        """Applies the peers' changes to their rows. Costs one launch."""
        self._kernels.apply_values(received.payloads, self._tiles, self._format, BYTE_ESCAPE, rows, received.damage)

    def copy_values(self, rows: torch.Tensor, output: torch.Tensor, is_flat: bool) -> None:
        """Copies the peers' rows into an output. Costs one launch."""
        self._kernels.copy_out(rows, self.unit.rank, self._tiles, output)


def _from(room: SectionRoom, first: int) -> SectionRoom:
    """The same room, for the unit whose first section has number `first`."""
    return SectionRoom(room.arena, room.table, room.arena_at, first, room.sections_at)


def _integers(values: torch.Tensor) -> torch.Tensor:
    """Views floats as integers to copy them: copies of floats may quiet signalling NaNs on some devices."""
    return values.view(FORMATS[values.dtype].int_dtype)


def units_by_codec(codecs: Sequence[str]) -> list[list[int]]:
    """The numbers of the runs of each codec, in the order in which the codecs first come."""
    numbers: dict[str, list[int]] = {}
    for number, codec in enumerate(codecs):
        numbers.setdefault(codec, []).append(number)
    return list(numbers.values())

"""Peers and runs as axes: what a launch works on when it handles all runs of all peers of a gather at once.

A *channel* gathers one flat buffer [world_size, n]; a rank's shard is [n]. A *unit* is all *runs* (stretches) of the shard that
have the same codec. A *tile* is up to 2048 consecutive values of one run: a CTA handles a tile, a thread eight values.

    flat      ...[ run 0 ]......[ run 1      ]...     where the values are in the shard; the gaps belong to other units
    state     [ run 0 |0][ run 1      |0]             what a rank remembers, padded to blocks or to 64 values
    planes    [ run 0 |0][ run 1      |0]             what is sent of every value, padded to 64 values

`TileKernels` is what such launches do. There are two implementations with the same bits: `cuda`, launched from PTX, whose
functions never wait for the device; and `reference_tiles`, readable torch, which is the yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.kernels.formats import FloatFormat
from fsdp_ciera.kernels.heads import ALIGNMENT, TABLE_ENTRY_BYTES

CTA_VALUES = 2048
OCTET_VALUES = 8
"""Values of a thread, and so of a byte of the bitmap of changes."""
TILE_BYTES = CTA_VALUES // OCTET_VALUES
"""Of the bitmap of a tile."""
PLANE_PADDING = 64
"""Runs are padded to so many values in the planes: then a run's bits of level 1 begin at a byte."""
GROUP_BLOCKS = 64
"""Blocks that a CTA handles."""
FAR = 15
"""The nibble of an exponent that is so far below the largest of its tile, or further."""

Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tiles:
    """Where the values of a unit are. Made once, with the plan; the tables are on the device."""

    table: torch.Tensor
    """int64 [num_tiles, 4]: start in the flat buffer, in the state, in the planes, and number of values; in runs' order."""
    num_tiles: int
    num_plane_values: int
    """Length of the planes in values: every run is padded to a multiple of 64."""
    num_state_values: int
    """Length of the unit's state in values."""
    blocks: torch.Tensor | None
    """int64 [num_blocks, 2]: start in the flat buffer, number of values. Block b is at b * block_size in the state."""
    num_blocks: int
    block_size: int
    """0: no blocks."""
    state_is_flat: bool
    """The state is the flat buffer itself, gaps and all."""
    num_flat_values: int
    """The flat buffer has at least so many values."""


def make_tiles(
    runs: Sequence[tuple[int, int]], device: torch.device | str, *, block_size: int = 0, state_is_flat: bool = False
) -> Tiles:
    """The tiles of runs (start in the flat buffer, number of values), which must not overlap. Copies the tables to the device.

    block_size: a multiple of 8; every run is then padded to whole blocks in the state, otherwise to 64 values.
    state_is_flat: the state has the places of the flat buffer, so it has no blocks.

    Worked example: runs (0, 2100) and (3000, 10). Planes begin at 0 and 2112, the next multiple of 64, and have 2176 values.
    Tiles are (0, 0, 0, 2048), (2048, 2048, 2048, 52), (3000, 2112, 2112, 10). With blocks of 512 the second run begins at
    2560 in the state, which has 3072 values; blocks are (0, 512), (512, 512), (1024, 512), (1536, 512), (2048, 52), (3000, 10).
    """
    assert block_size >= 0 and block_size % OCTET_VALUES == 0, f"blocks of {block_size} values"
    assert not (block_size and state_is_flat), "a state with the flat buffer's places has no whole blocks"
    state_padding = block_size or PLANE_PADDING
    tiles: list[Table] = [np.empty((0, 4), np.int64)]
    blocks: list[Table] = [np.empty((0, 2), np.int64)]
    num_plane_values = num_state_values = num_flat_values = 0
    for start, num_values in runs:
        steps = np.arange(0, num_values, CTA_VALUES, dtype=np.int64)
        state = start if state_is_flat else num_state_values
        tiles.append(
            np.stack([start + steps, state + steps, num_plane_values + steps, _left(steps, num_values, CTA_VALUES)], 1)
        )
        if block_size:
            steps = np.arange(0, num_values, block_size, dtype=np.int64)
            blocks.append(np.stack([start + steps, _left(steps, num_values, block_size)], 1))
        num_plane_values += _rounded_up(num_values, PLANE_PADDING)
        num_state_values += _rounded_up(num_values, state_padding)
        num_flat_values = max(num_flat_values, start + num_values)
    assert num_plane_values < 1 << 32, f"a unit of {num_plane_values} values: offsets in payloads have 32 bits"
    table, block_table = np.concatenate(tiles), np.concatenate(blocks)
    return Tiles(
        torch.from_numpy(table).to(device),
        len(table),
        num_plane_values,
        num_flat_values if state_is_flat else num_state_values,
        torch.from_numpy(block_table).to(device) if block_size else None,
        len(block_table),
        block_size,
        state_is_flat,
        num_flat_values,
    )


def _left(starts: Table, num_values: int, most: int) -> Table:
    """How many values begin at each start, at most `most`."""
    return np.minimum(num_values - starts, most)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Scan:
    """What changed in a unit. On the device."""

    bits: torch.Tensor
    """uint8 [num_tiles * 256]: one bit a value of each tile, the first value lowest; 0 behind the last value."""
    up_to: torch.Tensor
    """int64 [num_tiles + 1, 3]: how many bytes of `bits` that are not 0, moves and literals the tiles before each have; the
    last row has the totals."""


@dataclass(frozen=True)
class SymbolScan:
    """The exponents of a unit, by tile. On the device."""

    tops: torch.Tensor
    """uint8 [num_tiles]: the largest exponent of each."""
    up_to: torch.Tensor
    """int64 [num_tiles + 1]: how many exponents that are `FAR` or more below their top the tiles before each have; at last the
    total."""


@dataclass(frozen=True)
class Payloads:
    """The payloads of all ranks of a gather, and where the sections of one unit are in them."""

    data: torch.Tensor
    """uint8 [world_size, payload_bytes]. Rows may be further apart; they begin at multiples of 16 bytes."""
    own: int
    """The rank that is not decoded; world_size when there is none."""
    row_ok: torch.Tensor
    """int32 [world_size]: 0 where a rank's payload must not be decoded (`check_heads`)."""
    table_at: int
    """The byte where the table begins, a multiple of 8."""
    sections_at: int
    """The byte where the first section of the payload begins, before it is rounded up."""
    first: int
    """Number of the unit's first section in the table."""

    def __post_init__(self) -> None:
        rows_apart = self.data.stride(0) if len(self.data) > 1 else 0
        assert self.data.dtype == torch.uint8 and self.data.stride(1) == 1, (self.data.dtype, self.data.stride())
        assert self.data.data_ptr() % ALIGNMENT == 0 == rows_apart % ALIGNMENT, (self.data.data_ptr(), rows_apart)
        assert self.row_ok.shape == (len(self.data),) and self.row_ok.dtype == torch.int32, self.row_ok.shape
        assert self.row_ok.is_contiguous() and self.table_at % TABLE_ENTRY_BYTES == 0 <= self.own <= len(self.data)

    @property
    def num_peers(self) -> int:
        """Ranks that are decoded."""
        return len(self.data) - (self.own < len(self.data))

    def has_table_of(self, num_sections: int) -> bool:
        """Whether the table entries of so many sections of the unit lie in the payload."""
        return self.table_at + TABLE_ENTRY_BYTES * (self.first + num_sections) <= self.data.shape[1]


@dataclass(frozen=True)
class SectionRoom:
    """Where sections are written before they are sent."""

    arena: torch.Tensor
    """uint8 [capacity], from a multiple of 16 bytes on."""
    table: torch.Tensor
    """int64 [num_sections], the table of the whole payload (`section_table`)."""
    arena_at: int
    """The byte of the payload that the arena's first byte stands for, a multiple of 16."""
    first: int
    """Number of the unit's first section in the table."""
    sections_at: int | None = None
    """The byte where the first section of the payload begins, before it is rounded up. `None`: where the arena does."""

    def __post_init__(self) -> None:
        assert self.arena.dtype == torch.uint8 and self.arena.is_contiguous(), self.arena.dtype
        assert self.table.dtype == torch.int64 and self.table.is_contiguous(), self.table.dtype
        assert self.arena.data_ptr() % ALIGNMENT == 0 == self.arena_at % ALIGNMENT, self.arena_at


class TileKernels(Protocol):
    """What both implementations have. F is bf16, fp16 or fp32; a shard has dtype F. Nothing is copied to or from the device.

    Functions that read payloads set bits of `damage`, int32 [1], see `heads.Damage`; they never touch what is outside of a
    payload, whatever is in it. What does not fit together is left alone, a tile (or 64 blocks) as a whole.
    """

    # changes of values, and of exponents

    def scan_values(self, fresh: torch.Tensor, last: torch.Tensor, tiles: Tiles, fmt: FloatFormat, escape: int) -> Scan:
        """F [n] against the state, F [num_state_values] -> what changed. See changes.py for moves and escapes."""
        ...

    def scan_exponents(self, fresh: torch.Tensor, last_exponents: torch.Tensor, tiles: Tiles, fmt: FloatFormat) -> Scan:
        """The exponents of F [n] against the state, uint8 [num_state_values] -> what changed. There are no literals."""
        ...

    def change_sizes(self, scan: Scan, tiles: Tiles, item_bytes: int) -> torch.Tensor:
        """Bytes of the sections OFFSETS, LEVEL1, LEVEL2, MOVES, LITERALS -> int64 [5]; all 0 when nothing changed.

        item_bytes: of a literal. 0 (exponents): no LITERALS, so int64 [4].
        """
        ...

    def pack_values(
        self,
        fresh: torch.Tensor,
        last: torch.Tensor,
        tiles: Tiles,
        fmt: FloatFormat,
        escape: int,
        scan: Scan,
        sections: SectionRoom,
    ) -> None:
        """Writes the five sections. Writes nothing when nothing changed, or when the payload has more bytes than the arena."""
        ...  # fmt: skip

    def pack_exponents(
        self,
        fresh: torch.Tensor,
        last_exponents: torch.Tensor,
        tiles: Tiles,
        fmt: FloatFormat,
        scan: Scan,
        sections: SectionRoom,
    ) -> None:
        """Writes the first four sections; otherwise as `pack_values`."""
        ...  # fmt: skip

    def apply_values(
        self, payloads: Payloads, tiles: Tiles, fmt: FloatFormat, escape: int, rows: torch.Tensor, damage: torch.Tensor
    ) -> None:
        """Moves the states of all ranks but `own`, F [world_size, at least num_state_values], in place.

        Rows may be any number of values apart. A tile without changes is neither read nor written.
        """
        ...

    def apply_exponents(self, payloads: Payloads, tiles: Tiles, rows: torch.Tensor, damage: torch.Tensor) -> None:
        """The same of exponents, uint8 [num_peers, num_state_values]: peers are all ranks but `own`, in order."""
        ...

    # planes

    def split_tiles(
        self,
        values: torch.Tensor,
        tiles: Tiles,
        fmt: FloatFormat,
        low: torch.Tensor | None,
        top: torch.Tensor | None,
        exponents: torch.Tensor | None,
    ) -> None:
        """F [n] -> low uint8 [num_plane_values * low_bytes], top uint8 [num_plane_values * top_bits / 8], exponents uint8
        [num_state_values]: what is given. Padding is written as 0. See reference.split_planes for the planes."""
        ...  # fmt: skip

    def split_rows(self, rows: torch.Tensor, own: int, tiles: Tiles, fmt: FloatFormat, exponents: torch.Tensor) -> None:
        """Shards of all ranks, F [world_size, n] -> the exponents of those that are not `own`, uint8 [num_peers,
        num_state_values]. Padding is written as 0."""
        ...

    def merge_rows(
        self,
        exponents: torch.Tensor,
        payloads: Payloads,
        fixed_at: int,
        tiles: Tiles,
        fmt: FloatFormat,
        out: torch.Tensor,
    ) -> None:
        """The inverse: exponents uint8 [num_peers, num_state_values], and the planes that begin at byte `fixed_at` of each
        payload, low and behind it top -> F [world_size, n]. Leaves the row of `own` alone, and those that are not ok."""
        ...  # fmt: skip

    def copy_out(self, rows: torch.Tensor, own: int, tiles: Tiles, out: torch.Tensor) -> None:
        """States of all ranks, F [world_size, at least num_state_values] -> shards, F [world_size, n]. Leaves `own` alone."""
        ...

    # exponents as symbols

    def scan_symbols(self, values: torch.Tensor, tiles: Tiles, fmt: FloatFormat) -> SymbolScan:
        """F [n] -> the largest exponent of each tile, and how many are too far below it."""
        ...

    def symbol_sizes(self, scan: SymbolScan, tiles: Tiles) -> torch.Tensor:
        """Bytes of the sections OFFSETS, TOPS, ESCAPES -> int64 [3]."""
        ...

    def pack_symbols(
        self, values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, scan: SymbolScan, sections: SectionRoom
    ) -> None:
        """Writes the three sections. Writes nothing when the payload has more bytes than the arena."""
        ...

    def put_nibbles(
        self, values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, tops: torch.Tensor, nibbles: torch.Tensor
    ) -> None:
        """F [n] and the tops of its tiles, uint8 [num_tiles] -> nibbles uint8 [num_plane_values / 2]: how far each exponent is
        below its top, or `FAR`; the first value in the lower half of a byte. Padding is written as 0."""
        ...

    def merge_symbols(
        self, payloads: Payloads, fixed_at: int, tiles: Tiles, fmt: FloatFormat, out: torch.Tensor, damage: torch.Tensor
    ) -> None:
        """The planes low, top and nibbles that begin at byte `fixed_at` of each payload, and its sections -> F [world_size, n].
        Leaves the row of `own` alone, and those that are not ok."""
        ...

    # blocks of exponents

    def hash_blocks(
        self, values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, last_hashes: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """F [n] -> hashes int64 [num_blocks, 2] (see reference.hash_blocks), and uint8 [num_blocks]: 1 where they differ from
        `last_hashes`, int64 [num_blocks, 2]; everywhere without."""
        ...

    def block_sizes(self, changed: torch.Tensor, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [num_blocks] -> bytes of the sections BITS, OFFSETS, EXPONENTS, int64 [3], all 0 when nothing changed; and
        ranks, int64 [num_blocks + 1]: how many changed blocks there are before each, and in all."""
        ...

    def pack_blocks(
        self,
        values: torch.Tensor,
        tiles: Tiles,
        fmt: FloatFormat,
        changed: torch.Tensor,
        ranks: torch.Tensor,
        sections: SectionRoom,
    ) -> None:
        """Writes the three sections. Writes nothing when nothing changed, or when the payload has more bytes than the arena."""
        ...  # fmt: skip

    def put_blocks(self, payloads: Payloads, tiles: Tiles, rows: torch.Tensor, damage: torch.Tensor) -> None:
        """Changed blocks of all ranks but `own` -> their exponents, uint8 [num_peers, num_state_values]."""
        ...

    # payloads

    def section_table(self, sizes: torch.Tensor, sections_at: int, coding: int) -> torch.Tensor:
        """Bytes of all sections of a payload, int64 [num_sections] -> its table, int64 [num_sections]; see heads.py."""
        ...

    def checksum(self, data: torch.Tensor) -> torch.Tensor:
        """Rows of any dtype, any number of values apart -> int64 [rows]. See reference.checksum."""
        ...

    def write_head(
        self,
        payload: torch.Tensor,
        name: int,
        own_checksum: torch.Tensor,
        expected_checksum: torch.Tensor,
        payload_bytes: torch.Tensor | int,
    ) -> None:
        """The head of this rank's payload, into its first 32 bytes. Its name is BROKEN_PROMISE instead of `name` where the
        checksums, int64 [1], differ. payload_bytes: an int, or int64 [1]."""
        ...  # fmt: skip

    def check_heads(
        self,
        heads: torch.Tensor,
        own: int,
        name: int,
        damage: torch.Tensor,
        decoded_checksums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """uint8 [world_size, at least 32], rows any number of bytes apart -> int32 [world_size]: 0 where a rank's payload must
        not be decoded, since its head is not that of the gather `name`.

        The head of `own` counts like the others: a rank that broke its promise must learn it with them. decoded_checksums,
        int64 [world_size], are compared with the checksums in the heads that are right, but for `own`; where they differ the
        values are wrong, and the result is 0 as well.
        """
        ...

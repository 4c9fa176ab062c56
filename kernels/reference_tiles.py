"""The tile kernels (tiles.TileKernels) as readable torch: exact on every device, the yardstick of `cuda`.

They take peers, runs and tiles one after the other, and they wait for the device. What a function does with one tile is said in
reference.py and changes.py; what is added here is how tiles, sections and peers are put together.

The codings of a unit:

    changes    OFFSETS   u32 [num_tiles + 1, 3]: how many bytes of level 2, moves and literals the tiles before each have
               LEVEL1    a bit for each byte of the tiles' bitmaps, 1 where it is not 0; padded to 64 values as planes are
               LEVEL2    the bytes that are not 0, side by side
               MOVES     a byte for each changed value
               LITERALS  values that are too far for a move; exponents have none
    blocks     BITS      a bit for each block of exponents, 1 where it changed
               OFFSETS   u32 [groups + 1]: how many changed blocks the groups of 64 blocks before each have
               EXPONENTS of the changed blocks, a byte each, side by side; 0 behind the last value of a run
    symbols    OFFSETS   u32 [num_tiles + 1]: how many escapes the tiles before each have
               TOPS      a byte for each tile: its largest exponent
               ESCAPES   exponents that are 15 or more below, a byte each
               and NIBBLES in the fixed part, half a byte a value: how far its exponent is below the top of its tile, or 15

All sections of a unit in which nothing changed are empty; those of symbols never are.

Worked example, changes: bf16, two runs (0, 20) and (30, 3), of which values 1, 17 and 31 of the flat buffer went up by one and
value 19 became 1.0, with escape 255. Tiles are (0, 0, 0, 20) and (30, 64, 64, 3). Their bitmaps are the bytes 0b10, 0, 0b1010
and 0b10: not 0 are the first and third byte of the one, and the first of the other. So LEVEL1 is 0b101, 0b1; LEVEL2 is 0b10,
0b1010, 0b10; MOVES 2, 2, 255, 2; LITERALS 0x3F80; OFFSETS (0, 0, 0), (2, 3, 1), (3, 4, 1): 36, 2, 3, 4 and 2 bytes.

Worked example, blocks: of three blocks of 8 exponents the second and third changed. BITS is 0b110, OFFSETS 0, 2, EXPONENTS has
16 bytes.

Worked example, symbols: bf16, the run (0, 3) of 1.0, -0.25 and 0.0 has exponents 127, 125 and 0. TOPS is 127, NIBBLES 0x20,
0x0F and 30 zeros, since runs are padded to 64 values; ESCAPES 0, OFFSETS 0, 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch

from fsdp_ciera.kernels import reference
from fsdp_ciera.kernels.changes import BYTE_ESCAPE, Changes, Form, Received
from fsdp_ciera.kernels.formats import FloatFormat, packed_bytes
from fsdp_ciera.kernels.heads import (
    ALIGNMENT,
    BROKEN_PROMISE,
    CODING_SHIFT,
    FAILED,
    HEAD,
    HEAD_BYTES,
    MAGIC,
    TABLE_ENTRY_BYTES,
    TILES,
    WIRE_VERSION,
    Damage,
)
from fsdp_ciera.kernels.reference import pack_bits, unpack_bits
from fsdp_ciera.kernels.tiles import (
    FAR,
    GROUP_BLOCKS,
    PLANE_PADDING,
    TILE_BYTES,
    Payloads,
    Scan,
    SectionRoom,
    SymbolScan,
    Tiles,
)

_LENGTHS = (1 << CODING_SHIFT) - 1
_UNSIGNED = (1 << 64) - 1


class _Tile(NamedTuple):
    """A row of the table of tiles."""

    start: int
    state: int
    plane: int
    num_values: int

    @property
    def flat(self) -> slice:
        return slice(self.start, self.start + self.num_values)

    @property
    def in_state(self) -> slice:
        return slice(self.state, self.state + self.num_values)


def _tiles_of(tiles: Tiles) -> Iterator[_Tile]:
    return (_Tile(*row) for row in tiles.table.tolist())


def _words(values: torch.Tensor) -> torch.Tensor:
    """Bit patterns, as integers; a view."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])


def _exponents(values: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    exponents = torch.empty(len(values), dtype=torch.uint8, device=values.device)
    reference.split_planes(values, fmt, exponents)
    return exponents


def _set(damage: torch.Tensor, bit: Damage) -> None:
    damage |= int(bit)


# ---- changes, sender


class _Unit(NamedTuple):
    """Values or exponents of a unit and their state; `fmt` is `None` for exponents."""

    fresh: torch.Tensor
    last: torch.Tensor
    fmt: FloatFormat
    of_exponents: bool
    escape: int

    def changes(self, tile: _Tile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> bitmap uint8 [ceil(values / 8)], moves, literals."""
        now, before = self.fresh[tile.flat], self.last[tile.in_state].clone()
        if self.of_exponents:
            now = _exponents(now, self.fmt)
        fmt = None if self.of_exponents else self.fmt
        found: Changes = reference.find_changes(now, before, fmt, Form(escape=self.escape))
        assert found.changed is not None
        return found.changed, found.moves, found.literals


def _scan(unit: _Unit, tiles: Tiles) -> Scan:
    device = unit.fresh.device
    bits = torch.zeros(tiles.num_tiles, TILE_BYTES, dtype=torch.uint8, device=device)
    counts = [[0, 0, 0]]
    for number, tile in enumerate(_tiles_of(tiles)):
        changed, moves, literals = unit.changes(tile)
        bits[number, : len(changed)] = changed
        counts.append([int(changed.count_nonzero()), len(moves), len(literals)])
    return Scan(bits.view(-1), torch.tensor(counts, dtype=torch.int64, device=device).cumsum(0))


def scan_values(fresh: torch.Tensor, last: torch.Tensor, tiles: Tiles, fmt: FloatFormat, escape: int) -> Scan:
    """See TileKernels. The worked example has bits 0b10, 0, 0b1010, 0, ... and 0b10, 0, ..., 256 bytes a tile."""
    return _scan(_Unit(fresh, last, fmt, False, escape), tiles)


def scan_exponents(fresh: torch.Tensor, last_exponents: torch.Tensor, tiles: Tiles, fmt: FloatFormat) -> Scan:
    """See TileKernels."""
    return _scan(_Unit(fresh, last_exponents, fmt, True, BYTE_ESCAPE), tiles)


def change_sizes(scan: Scan, tiles: Tiles, item_bytes: int) -> torch.Tensor:
    """See TileKernels. The worked example gives 36, 2, 3, 4, 2."""
    level2, moves, literals = scan.up_to[-1].tolist()
    sizes = [12 * (tiles.num_tiles + 1), tiles.num_plane_values // PLANE_PADDING, level2, moves, literals * item_bytes]
    if not moves:
        sizes = [0] * len(sizes)
    return torch.tensor(sizes[: 5 if item_bytes else 4], dtype=torch.int64, device=scan.up_to.device)


def _pack(unit: _Unit, tiles: Tiles, scan: Scan, sections: SectionRoom) -> None:
    if not int(scan.up_to[-1, 1]) or not _has_room(sections):
        return
    level1, level2, moves, literals = [], [], [], []
    for tile in _tiles_of(tiles):
        changed, moves_here, literals_here = unit.changes(tile)
        bits_of_bytes = torch.zeros(-(-len(changed) // 8) * 8, dtype=torch.uint8, device=changed.device)
        bits_of_bytes[: len(changed)] = changed != 0
        level1.append(pack_bits(bits_of_bytes, 1))
        level2.append(changed[changed != 0])
        moves.append(moves_here)
        literals.append(literals_here)
    offsets = scan.up_to.to(torch.int32)  # of which the lower 32 bits count, as unsigned numbers
    parts = [offsets, *(torch.cat(part) for part in (level1, level2, moves, literals))]
    for number, part in enumerate(parts[: 4 if unit.of_exponents else 5]):
        _write_section(sections, number, part)


def pack_values(
    fresh: torch.Tensor,
    last: torch.Tensor,
    tiles: Tiles,
    fmt: FloatFormat,
    escape: int,
    scan: Scan,
    sections: SectionRoom,
) -> None:
    """See TileKernels."""
    _pack(_Unit(fresh, last, fmt, False, escape), tiles, scan, sections)


def pack_exponents(
    fresh: torch.Tensor, last_exponents: torch.Tensor, tiles: Tiles, fmt: FloatFormat, scan: Scan, sections: SectionRoom
) -> None:
    """See TileKernels."""
    _pack(_Unit(fresh, last_exponents, fmt, True, BYTE_ESCAPE), tiles, scan, sections)


# ---- sections


def section_table(sizes: torch.Tensor, sections_at: int, coding: int) -> torch.Tensor:
    """See TileKernels.

    >>> table = section_table(torch.tensor([10, 0, 5]), 64, 9)
    >>> [(entry >> 56, entry & (1 << 56) - 1) for entry in table.tolist()]
    [(9, 74), (9, 80), (9, 85)]
    """
    entries, end = [], sections_at
    for size in sizes.tolist():
        end = _rounded_up(end) + size
        entries.append(coding << CODING_SHIFT | end)
    return torch.tensor(entries, dtype=torch.int64, device=sizes.device)


def _rounded_up(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _has_room(sections: SectionRoom) -> bool:
    """Whether the whole payload has."""
    return (int(sections.table[-1]) & _LENGTHS) - sections.arena_at <= len(sections.arena)


def _write_section(sections: SectionRoom, number: int, data: torch.Tensor) -> None:
    """Section `number` of the unit."""
    first = sections.first + number
    before = sections.arena_at if sections.sections_at is None else sections.sections_at
    if first:
        before = int(sections.table[first - 1]) & _LENGTHS
    start = _rounded_up(before) - sections.arena_at
    raw = data.contiguous().view(-1).view(torch.uint8)
    sections.arena[start : start + len(raw)] = raw


def _sections_of(payload: torch.Tensor, payloads: Payloads, count: int) -> list[torch.Tensor] | None:
    """The unit's sections in one payload, as bytes; `None` where they do not lie in it or have another coding."""
    assert payloads.has_table_of(count)
    before = payloads.first > 0
    start = payloads.table_at + TABLE_ENTRY_BYTES * (payloads.first - before)
    entries = payload[start : start + TABLE_ENTRY_BYTES * (count + before)].clone().view(torch.int64).tolist()
    end = entries.pop(0) & _LENGTHS if before else payloads.sections_at
    found = []
    for entry in entries:
        begin, end = _rounded_up(end), entry & _LENGTHS
        is_ours = (entry & _UNSIGNED) >> CODING_SHIFT == TILES
        if not begin <= end <= len(payload) or (begin < end and not is_ours):
            return None
        found.append(payload[begin:end])
    return found


def _offsets(section: torch.Tensor) -> torch.Tensor:
    """Bytes of u32 numbers -> int64."""
    return section.clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _peers(payloads: Payloads) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(number among the peers, rank, payload) of each payload that may be decoded."""
    ranks = [rank for rank in range(len(payloads.data)) if rank != payloads.own]
    for peer, rank in enumerate(ranks):
        if payloads.row_ok[rank]:
            yield peer, rank, payloads.data[rank]


# ---- changes, receiver


def _apply(
    sections: list[torch.Tensor] | None, tiles: Tiles, fmt: FloatFormat | None, escape: int, row: torch.Tensor
) -> bool:
    """Moves one row of the state. -> whether all fits together."""
    if sections is None:
        return False
    if not any(map(len, sections)):
        return True
    offset_bytes, level1, level2, moves, *rest = sections
    literals = rest[0] if rest else moves[:0]
    item_bytes = row.element_size()
    if len(offset_bytes) != 12 * (tiles.num_tiles + 1) or len(level1) != tiles.num_plane_values // PLANE_PADDING:
        return False
    offsets = _offsets(offset_bytes).view(-1, 3)
    level2_total, moves_total, literals_total = offsets[-1].tolist()
    if [len(level2), len(moves), len(literals)] != [level2_total, moves_total, literals_total * item_bytes]:
        return False
    all_fits = True
    for number, tile in enumerate(_tiles_of(tiles)):
        here, behind = offsets[number], offsets[number + 1]
        fits = bool((here <= behind).all() and (behind <= offsets[-1]).all()) and (number > 0 or not here.any())
        if fits:
            parts = [
                part[int(a) : int(b)]
                for part, a, b in zip((level2, moves), here.tolist(), behind.tolist(), strict=False)
            ]
            literals_here = literals[int(here[2]) * item_bytes : int(behind[2]) * item_bytes]
            fits = _apply_tile(row[tile.in_state], tile, fmt, escape, level1, parts[0], parts[1], literals_here)
        all_fits &= fits
    return all_fits


def _apply_tile(
    values: torch.Tensor, tile: _Tile, fmt: FloatFormat | None, escape: int, level1: torch.Tensor, level2: torch.Tensor,
    moves: torch.Tensor, literals: torch.Tensor,
) -> bool:  # fmt: skip
    """Moves the values of a tile [num_values] by what is sent of it. -> whether all fits together; if not, it does not."""
    num_bytes = packed_bytes(tile.num_values, 1)
    first = tile.plane // PLANE_PADDING
    is_changed = unpack_bits(level1[first : first + packed_bytes(num_bytes, 1)], num_bytes, 1).view(torch.bool)
    if int(is_changed.sum()) != len(level2):
        return False
    bitmap = torch.zeros(num_bytes, dtype=torch.uint8, device=values.device)
    bitmap[is_changed] = level2
    if reference.count_bits(bitmap, tile.num_values) != len(moves):  # bits behind the last value do not count
        return False
    if fmt is not None and int((moves == escape).sum()) * values.element_size() != len(literals):
        return False
    literal_words = literals.clone().view(_words(values).dtype)
    received = Received(Form(escape=escape), bitmap, None, moves[:0], moves, literal_words)
    reference.apply_changes(values, fmt, received)
    return True


def apply_values(
    payloads: Payloads, tiles: Tiles, fmt: FloatFormat, escape: int, rows: torch.Tensor, damage: torch.Tensor
) -> None:
    """See TileKernels."""
    for _, rank, payload in _peers(payloads):
        if not _apply(_sections_of(payload, payloads, 5), tiles, fmt, escape, rows[rank]):
            _set(damage, Damage.DAMAGED)


def apply_exponents(payloads: Payloads, tiles: Tiles, rows: torch.Tensor, damage: torch.Tensor) -> None:
    """See TileKernels."""
    for peer, _, payload in _peers(payloads):
        if not _apply(_sections_of(payload, payloads, 4), tiles, None, BYTE_ESCAPE, rows[peer]):
            _set(damage, Damage.DAMAGED)


# ---- planes


def _padded_ends(tiles: Tiles) -> Iterator[tuple[_Tile, int, int]]:
    """Each tile with the values it has in the planes and in the state, padding included: up to where the next one begins."""
    table = list(_tiles_of(tiles))
    for tile, behind in zip_longest(table, table[1:]):
        plane_end = behind.plane if behind else tiles.num_plane_values
        state_end = behind.state if behind else tiles.num_state_values
        yield tile, plane_end - tile.plane, state_end - tile.state


def split_tiles(
    values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, low: torch.Tensor | None, top: torch.Tensor | None,
    exponents: torch.Tensor | None,
) -> None:  # fmt: skip
    """See TileKernels.

    Worked example, fp16: the run (0, 4) has values 1.0, -2.0, 0.5, -0.0; low is 0, 1, 0, 1 and 60 zeros, top 24 zeros,
    and exponents 15, 16, 14, 0 and 60 zeros.
    """
    assert exponents is None or not tiles.state_is_flat, "padding would be written over what is between the runs"
    for tile, num_in_plane, num_in_state in _padded_ends(tiles):
        padded = torch.zeros(max(num_in_plane, num_in_state), dtype=fmt.int_dtype, device=values.device)
        padded[: tile.num_values] = _words(values)[tile.flat]
        in_plane = padded[:num_in_plane].view(fmt.dtype)
        if exponents is not None:
            exponents[tile.state : tile.state + num_in_state] = _exponents(padded.view(fmt.dtype), fmt)[:num_in_state]
        if low is not None:
            low_here, top_here = _plane_slices(tile, num_in_plane, fmt)
            top_part = top[top_here] if fmt.top_bits and top is not None else None
            reference.split_planes(in_plane, fmt, None, low[low_here], top_part)


def _plane_slices(tile: _Tile, num_values: int, fmt: FloatFormat) -> tuple[slice, slice]:
    """The tile's bytes in the planes low and top."""
    start, stop = tile.plane, tile.plane + num_values
    return (
        slice(start * fmt.low_bytes, stop * fmt.low_bytes),
        slice(packed_bytes(start, fmt.top_bits), packed_bytes(stop, fmt.top_bits)),
    )


def split_rows(rows: torch.Tensor, own: int, tiles: Tiles, fmt: FloatFormat, exponents: torch.Tensor) -> None:
    """See TileKernels."""
    peers = [row for rank, row in enumerate(rows) if rank != own]
    for row, into in zip(peers, exponents, strict=True):
        split_tiles(row, tiles, fmt, None, None, into)


def merge_rows(
    exponents: torch.Tensor, payloads: Payloads, fixed_at: int, tiles: Tiles, fmt: FloatFormat, out: torch.Tensor
) -> None:
    """See TileKernels."""
    low_bytes = tiles.num_plane_values * fmt.low_bytes
    top_bytes = packed_bytes(tiles.num_plane_values, fmt.top_bits)
    assert fixed_at + low_bytes + top_bytes <= payloads.data.shape[1]
    for peer, rank, payload in _peers(payloads):
        low = payload[fixed_at : fixed_at + low_bytes]
        top = payload[fixed_at + low_bytes : fixed_at + low_bytes + top_bytes]
        for tile in _tiles_of(tiles):
            low_here, top_here = _plane_slices(tile, tile.num_values, fmt)
            reference.merge_planes(
                exponents[peer, tile.in_state], low[low_here], top[top_here] if fmt.top_bits else None, fmt,
                out[rank, tile.flat],
            )  # fmt: skip


def copy_out(rows: torch.Tensor, own: int, tiles: Tiles, out: torch.Tensor) -> None:
    """See TileKernels."""
    for rank in range(len(rows)):
        for tile in _tiles_of(tiles):
            if rank != own:
                _words(out)[rank, tile.flat] = _words(rows)[rank, tile.in_state]


# ---- symbols


def scan_symbols(values: torch.Tensor, tiles: Tiles, fmt: FloatFormat) -> SymbolScan:
    """See TileKernels. The worked example has tops 127, and 0, 1 escapes."""
    tops, counts = [], [0]
    for tile in _tiles_of(tiles):
        exponents = _exponents(values[tile.flat], fmt)
        tops.append(int(exponents.max()))
        counts.append(int((tops[-1] - exponents.to(torch.int16) >= FAR).sum()))
    device = values.device
    return SymbolScan(
        torch.tensor(tops, dtype=torch.uint8, device=device),
        torch.tensor(counts, dtype=torch.int64, device=device).cumsum(0),
    )


def symbol_sizes(scan: SymbolScan, tiles: Tiles) -> torch.Tensor:
    """See TileKernels. The worked example gives 8, 1, 1."""
    sizes = [4 * (tiles.num_tiles + 1), tiles.num_tiles, int(scan.up_to[-1])]
    return torch.tensor(sizes, dtype=torch.int64, device=scan.up_to.device)


def pack_symbols(values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, scan: SymbolScan, sections: SectionRoom) -> None:
    """See TileKernels."""
    if not _has_room(sections):
        return
    escapes = [scan.tops[:0]]
    for tile, top in zip(_tiles_of(tiles), scan.tops.tolist(), strict=True):
        exponents = _exponents(values[tile.flat], fmt)
        escapes.append(exponents[top - exponents.to(torch.int16) >= FAR])
    for number, part in enumerate((scan.up_to.to(torch.int32), scan.tops, torch.cat(escapes))):
        _write_section(sections, number, part)


def put_nibbles(
    values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, tops: torch.Tensor, nibbles: torch.Tensor
) -> None:
    """See TileKernels."""
    for (tile, num_in_plane, _), top in zip(_padded_ends(tiles), tops.tolist(), strict=True):
        below = torch.zeros(num_in_plane, dtype=torch.uint8, device=values.device)
        below[: tile.num_values] = (top - _exponents(values[tile.flat], fmt).to(torch.int16)).clamp(max=FAR)
        nibbles[tile.plane // 2 : (tile.plane + num_in_plane) // 2] = below[::2] | below[1::2] << 4


def merge_symbols(
    payloads: Payloads, fixed_at: int, tiles: Tiles, fmt: FloatFormat, out: torch.Tensor, damage: torch.Tensor
) -> None:
    """See TileKernels."""
    low_bytes = tiles.num_plane_values * fmt.low_bytes
    top_bytes = packed_bytes(tiles.num_plane_values, fmt.top_bits)
    for _, rank, payload in _peers(payloads):
        low, top, nibbles = payload[fixed_at:].split_with_sizes(
            [low_bytes, top_bytes, len(payload) - fixed_at - low_bytes - top_bytes]
        )
        sections, fits = _sections_of(payload, payloads, 3), True
        if sections is None or [len(sections[0]), len(sections[1])] != [4 * (tiles.num_tiles + 1), tiles.num_tiles]:
            _set(damage, Damage.DAMAGED)
            continue
        offsets, tops, escapes = _offsets(sections[0]).tolist(), sections[1].tolist(), sections[2]
        for number, tile in enumerate(_tiles_of(tiles)):
            begin, end = offsets[number : number + 2]
            packed = nibbles[tile.plane // 2 : (tile.plane + tile.num_values + 1) // 2]
            below = torch.stack([packed & 15, packed >> 4], 1).view(-1)[: tile.num_values]
            is_far = below == FAR
            if offsets[-1] != len(escapes) or not begin <= end <= len(escapes) or int(is_far.sum()) != end - begin:
                fits = False
                continue
            if not number and begin:
                fits = False
                continue
            exponents = tops[number] - below  # wraps around where nothing can tell that it is damaged
            exponents[is_far] = escapes[begin:end]
            low_here, top_here = _plane_slices(tile, tile.num_values, fmt)
            reference.merge_planes(
                exponents, low[low_here], top[top_here] if fmt.top_bits else None, fmt, out[rank, tile.flat]
            )
        if not fits:
            _set(damage, Damage.DAMAGED)


# ---- blocks of exponents


def hash_blocks(
    values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, last_hashes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See TileKernels."""
    assert tiles.blocks is not None
    hashes = torch.empty(tiles.num_blocks, 2, dtype=torch.int64, device=values.device)
    for number, (start, num_values) in enumerate(tiles.blocks.tolist()):
        hashes[number] = reference.hash_blocks(values[start : start + num_values], fmt, tiles.block_size)[0]
    if last_hashes is None:
        return hashes, torch.ones(tiles.num_blocks, dtype=torch.uint8, device=values.device)
    return hashes, (hashes != last_hashes).any(dim=1).to(torch.uint8)


def block_sizes(changed: torch.Tensor, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """See TileKernels.

    Worked example: of three blocks of 8 the second and third changed: 1, 8 and 16 bytes, and ranks 0, 0, 1, 2.
    """
    ranks = torch.zeros(tiles.num_blocks + 1, dtype=torch.int64, device=changed.device)
    ranks[1:] = changed.to(torch.int64).cumsum(0)
    num_changed = int(ranks[-1])
    sizes = [packed_bytes(tiles.num_blocks, 1), 4 * (_num_groups(tiles) + 1), num_changed * tiles.block_size]
    return torch.tensor(sizes if num_changed else [0] * 3, dtype=torch.int64, device=changed.device), ranks


def _num_groups(tiles: Tiles) -> int:
    return -(-tiles.num_blocks // GROUP_BLOCKS)


def pack_blocks(
    values: torch.Tensor,
    tiles: Tiles,
    fmt: FloatFormat,
    changed: torch.Tensor,
    ranks: torch.Tensor,
    sections: SectionRoom,
) -> None:
    """See TileKernels."""
    assert tiles.blocks is not None
    if not int(ranks[-1]) or not _has_room(sections):
        return
    exponents = torch.zeros(int(ranks[-1]), tiles.block_size, dtype=torch.uint8, device=values.device)
    for number, (start, num_values) in enumerate(tiles.blocks.tolist()):
        if changed[number]:
            exponents[int(ranks[number]), :num_values] = _exponents(values[start : start + num_values], fmt)
    offsets = torch.cat([ranks[:-1:GROUP_BLOCKS], ranks[-1:]]).to(torch.int32)
    for number, part in enumerate((pack_bits(changed, 1), offsets, exponents)):
        _write_section(sections, number, part)


def put_blocks(payloads: Payloads, tiles: Tiles, rows: torch.Tensor, damage: torch.Tensor) -> None:
    """See TileKernels."""
    for peer, _, payload in _peers(payloads):
        if not _put(_sections_of(payload, payloads, 3), tiles, rows[peer]):
            _set(damage, Damage.DAMAGED)


def _put(sections: list[torch.Tensor] | None, tiles: Tiles, row: torch.Tensor) -> bool:
    """Replaces the changed blocks of one row. -> whether all fits together; a group of blocks that does not stays."""
    if sections is None:
        return False
    if not any(map(len, sections)):
        return True
    bits, offset_bytes, exponents = sections
    if len(bits) != packed_bytes(tiles.num_blocks, 1) or len(offset_bytes) != 4 * (_num_groups(tiles) + 1):
        return False
    offsets = _offsets(offset_bytes).tolist()
    if len(exponents) != offsets[-1] * tiles.block_size:
        return False
    blocks = row[: tiles.num_blocks * tiles.block_size].view(-1, tiles.block_size)
    changed = unpack_bits(bits, tiles.num_blocks, 1).view(torch.bool)
    all_fits = True
    for group, (here, behind) in enumerate(pairwise(offsets)):
        of_group = slice(group * GROUP_BLOCKS, (group + 1) * GROUP_BLOCKS)
        fits = here <= behind <= offsets[-1] and (group > 0 or here == 0)
        fits = fits and int(changed[of_group].sum()) == behind - here
        if fits:
            sent = exponents[here * tiles.block_size : behind * tiles.block_size]
            blocks[of_group][changed[of_group]] = sent.view(-1, tiles.block_size)
        all_fits &= fits
    return all_fits


# ---- checksums and heads


def checksum(data: torch.Tensor) -> torch.Tensor:
    """See TileKernels."""
    return reference.checksum(data)


def write_head(
    payload: torch.Tensor, name: int, own_checksum: torch.Tensor, expected_checksum: torch.Tensor,
    payload_bytes: torch.Tensor | int,
) -> None:  # fmt: skip
    """See TileKernels."""
    checksum = int(own_checksum) & _UNSIGNED
    is_kept = checksum == int(expected_checksum) & _UNSIGNED
    fields = [name if is_kept else BROKEN_PROMISE, checksum, int(payload_bytes), MAGIC, WIRE_VERSION, ALIGNMENT]
    raw = b"".join(
        field.to_bytes(HEAD[key].itemsize, "little") for field, key in zip(fields, HEAD.names or (), strict=True)
    )
    payload[:HEAD_BYTES] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(payload.device)


def check_heads(
    heads: torch.Tensor, own: int, name: int, damage: torch.Tensor, decoded_checksums: torch.Tensor | None = None
) -> torch.Tensor:
    """See TileKernels."""
    decoded: Sequence[int | None] = [None] * len(heads) if decoded_checksums is None else decoded_checksums.tolist()
    row_ok = torch.zeros(len(heads), dtype=torch.int32, device=heads.device)
    for rank, (raw, found) in enumerate(zip(heads, decoded, strict=True)):
        head = raw[:HEAD_BYTES].cpu().clone().numpy().view(HEAD)[0]
        wrong = None
        if (head["magic"], head["wire_version"], head["alignment"]) != (MAGIC, WIRE_VERSION, ALIGNMENT):
            wrong = Damage.FOREIGN
        elif head["name"] != name:
            reserved = {BROKEN_PROMISE: Damage.BROKEN_PROMISE, FAILED: Damage.FAILED}
            wrong = reserved.get(int(head["name"]), Damage.OTHER_GATHER)
        elif found is not None and rank != own and found & _UNSIGNED != head["checksum"]:
            wrong = Damage.WRONG_VALUES
        if wrong is None:
            row_ok[rank] = 1
        else:
            _set(damage, wrong)
    return row_ok

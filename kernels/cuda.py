"""The tile kernels on CUDA (tiles.TileKernels): launches of native/kernels.cu on torch's current stream.

No function here waits for the device or copies to or from it, and how many launches one makes depends neither on the number
of peers nor on that of runs. Counts stay on the device; what is wrong with payloads is said by bits of a flag there.

    sender      scan -> change_sizes -> section_table -> pack, for values or exponents; hash -> block_sizes -> ... for blocks;
                scan -> symbol_sizes -> ..., and put_nibbles, for symbols
    receiver    check_heads -> apply, or put, then merge; for symbols merge alone

What the functions do is said in tiles.py, and in reference_tiles.py with worked examples.
"""

from __future__ import annotations

import torch

from fsdp_ciera.kernels import launch
from fsdp_ciera.kernels.changes import BYTE_ESCAPE
from fsdp_ciera.kernels.formats import FloatFormat, packed_bytes
from fsdp_ciera.kernels.heads import ALIGNMENT, CODING_SHIFT, HEAD_BYTES
from fsdp_ciera.kernels.launch import Argument
from fsdp_ciera.kernels.tiles import (
    GROUP_BLOCKS,
    PLANE_PADDING,
    TILE_BYTES,
    Payloads,
    Scan,
    SectionRoom,
    SymbolScan,
    Tiles,
)

NUM_THREADS = 256
"""Of a CTA; kThreads of native/cta.cuh."""
NUM_WARPS = NUM_THREADS // 32
CTA_BYTES = 8 * NUM_THREADS
"""Of a row, that a CTA of checksum handles at once."""
MOST_CHECKSUM_CTAS = 1024
"""A row's others follow in a loop: each CTA ends in atomic additions."""


def _launch(name: str, grid: tuple[int, int], *args: Argument | None) -> None:
    """On the device of the first argument that is a tensor. `None` is a null pointer."""
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    values = (0 if arg is None else arg for arg in args)
    launch.kernel_module(device).launch(name, grid, NUM_THREADS, *values, device=device)


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a kernel fills. (Apart, so that tests can lend memory of which they know what was written.)"""
    return torch.empty(shape, dtype=dtype, device=device)


def _payload_args(payloads: Payloads) -> tuple[Argument, ...]:
    """struct Payloads of native/payloads.cuh."""
    data = payloads.data
    return (
        data, data.stride(0), data.shape[1], payloads.own, payloads.row_ok, payloads.table_at, payloads.sections_at,
        payloads.first,
    )  # fmt: skip


def _room_args(room: SectionRoom) -> tuple[Argument, ...]:
    """struct SectionRoom of native/payloads.cuh."""
    sections_at = room.arena_at if room.sections_at is None else room.sections_at
    return room.arena, len(room.arena), room.table, len(room.table), room.arena_at, sections_at, room.first


# ---- changes


def scan_values(fresh: torch.Tensor, last: torch.Tensor, tiles: Tiles, fmt: FloatFormat, escape: int) -> Scan:
    """See TileKernels. Reads both once."""
    assert last.dtype == fmt.dtype
    return _scan(f"scan_values_{fmt.name}", fresh, last, tiles, fmt, escape)


def scan_exponents(fresh: torch.Tensor, last_exponents: torch.Tensor, tiles: Tiles, fmt: FloatFormat) -> Scan:
    """See TileKernels. Reads both once."""
    assert last_exponents.dtype == torch.uint8
    return _scan(f"scan_exponents_{fmt.name}", fresh, last_exponents, tiles, fmt, BYTE_ESCAPE)


def _scan(kernel: str, fresh: torch.Tensor, last: torch.Tensor, tiles: Tiles, fmt: FloatFormat, escape: int) -> Scan:
    _check_flat(fresh, tiles, fmt)
    _check_state(last, tiles)
    bits = _room((tiles.num_tiles * TILE_BYTES,), torch.uint8, fresh.device)
    counts = torch.zeros(3, tiles.num_tiles + 1, dtype=torch.int64, device=fresh.device)
    _launch(kernel, (tiles.num_tiles, 1), fresh, last, tiles.table, tiles.num_tiles, escape, bits, counts)
    # One long sum over all three rows, which torch spreads over the device, where three short ones would have a CTA each. What
    # a row begins with, a 0 and so the total of the rows before it, is then subtracted.
    sums = counts.view(-1).cumsum(0).view(3, -1)
    up_to = torch.empty(tiles.num_tiles + 1, 3, dtype=torch.int64, device=fresh.device)
    torch.sub(sums.t(), sums[:, 0], out=up_to)
    return Scan(bits, up_to)


def _check_flat(values: torch.Tensor, tiles: Tiles, fmt: FloatFormat) -> None:
    assert values.dtype == fmt.dtype and values.dim() == 1 and values.is_contiguous(), (values.dtype, values.shape)
    assert len(values) >= tiles.num_flat_values, (len(values), tiles.num_flat_values)


def _check_state(state: torch.Tensor, tiles: Tiles) -> None:
    assert state.dim() == 1 and state.is_contiguous() and len(state) >= tiles.num_state_values, state.shape


def _check_rows(rows: torch.Tensor, num_rows: int, num_values: int) -> None:
    assert rows.dim() == 2 and len(rows) == num_rows and rows.shape[1] >= num_values, (rows.shape, num_rows, num_values)
    assert rows.stride(1) == 1 or rows.shape[1] < 2, rows.stride()


def change_sizes(scan: Scan, tiles: Tiles, item_bytes: int) -> torch.Tensor:
    """See TileKernels."""
    level2, moves, literals = range(3)
    totals = scan.up_to[-1]
    sizes = torch.empty(5 if item_bytes else 4, dtype=torch.int64, device=totals.device)
    sizes[0].fill_(12 * (tiles.num_tiles + 1))
    sizes[1].fill_(tiles.num_plane_values // PLANE_PADDING)
    sizes[2:4].copy_(totals[level2 : moves + 1])
    if item_bytes:
        torch.mul(totals[literals:], item_bytes, out=sizes[4:])
    return sizes.mul_(totals[moves] > 0)


def pack_values(
    fresh: torch.Tensor,
    last: torch.Tensor,
    tiles: Tiles,
    fmt: FloatFormat,
    escape: int,
    scan: Scan,
    sections: SectionRoom,
) -> None:
    """See TileKernels. Reads values only where they changed."""
    assert last.dtype == fmt.dtype
    _pack(f"pack_values_{fmt.name}", fresh, last, tiles, fmt, escape, scan, sections)


def pack_exponents(
    fresh: torch.Tensor, last_exponents: torch.Tensor, tiles: Tiles, fmt: FloatFormat, scan: Scan, sections: SectionRoom
) -> None:
    """See TileKernels. Reads values only where their exponents changed."""
    assert last_exponents.dtype == torch.uint8
    _pack(f"pack_exponents_{fmt.name}", fresh, last_exponents, tiles, fmt, BYTE_ESCAPE, scan, sections)


def _pack(
    kernel: str, fresh: torch.Tensor, last: torch.Tensor, tiles: Tiles, fmt: FloatFormat, escape: int, scan: Scan,
    sections: SectionRoom,
) -> None:  # fmt: skip
    _check_flat(fresh, tiles, fmt)
    _check_state(last, tiles)
    assert len(scan.bits) == tiles.num_tiles * TILE_BYTES and scan.up_to.is_contiguous()
    _launch(
        kernel, (tiles.num_tiles, 1), fresh, last, tiles.table, tiles.num_tiles, escape, scan.bits, scan.up_to,
        *_room_args(sections),
    )  # fmt: skip


def apply_values(
    payloads: Payloads, tiles: Tiles, fmt: FloatFormat, escape: int, rows: torch.Tensor, damage: torch.Tensor
) -> None:
    """See TileKernels."""
    assert rows.dtype == fmt.dtype and payloads.has_table_of(5)
    _check_rows(rows, len(payloads.data), tiles.num_state_values)
    _launch(
        f"apply_values_{fmt.name}", (tiles.num_tiles, payloads.num_peers), *_payload_args(payloads), tiles.table,
        tiles.num_tiles, tiles.num_plane_values, escape, rows, rows.stride(0), damage,
    )  # fmt: skip


def apply_exponents(payloads: Payloads, tiles: Tiles, rows: torch.Tensor, damage: torch.Tensor) -> None:
    """See TileKernels."""
    assert rows.dtype == torch.uint8 and payloads.has_table_of(4)
    _check_rows(rows, payloads.num_peers, tiles.num_state_values)
    _launch(
        "apply_exponents", (tiles.num_tiles, payloads.num_peers), *_payload_args(payloads), tiles.table,
        tiles.num_tiles, tiles.num_plane_values, rows, rows.stride(0), damage,
    )  # fmt: skip


# ---- planes


def split_tiles(
    values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, low: torch.Tensor | None, top: torch.Tensor | None,
    exponents: torch.Tensor | None,
) -> None:  # fmt: skip
    """See TileKernels."""
    _check_flat(values, tiles, fmt)
    if exponents is not None:
        _check_state(exponents, tiles)
    for plane, num_bytes in (
        (low, tiles.num_plane_values * fmt.low_bytes),
        (top, packed_bytes(tiles.num_plane_values, fmt.top_bits)),
    ):
        assert plane is None or (len(plane) >= num_bytes and plane.is_contiguous()), (plane.shape, num_bytes)
    assert top is None or low is not None, "top bits are written with the low bytes"
    _split(values, 0, 1, 1, tiles, fmt, low, top, exponents, 0)


def split_rows(rows: torch.Tensor, own: int, tiles: Tiles, fmt: FloatFormat, exponents: torch.Tensor) -> None:
    """See TileKernels."""
    num_peers = len(rows) - (own < len(rows))
    assert rows.dtype == fmt.dtype
    _check_rows(rows, len(rows), tiles.num_flat_values)
    _check_rows(exponents, num_peers, tiles.num_state_values)
    _split(rows, rows.stride(0), own, num_peers, tiles, fmt, None, None, exponents, exponents.stride(0))


def _split(
    rows: torch.Tensor, rows_stride: int, own: int, num_peers: int, tiles: Tiles, fmt: FloatFormat,
    low: torch.Tensor | None, top: torch.Tensor | None, exponents: torch.Tensor | None, exponents_stride: int,
) -> None:  # fmt: skip
    assert exponents is None or (exponents.dtype == torch.uint8 and not tiles.state_is_flat), "see [Note: Padding]"
    _launch(
        f"split_{fmt.name}", (tiles.num_tiles, num_peers), rows, rows_stride, own, tiles.table, tiles.num_tiles,
        tiles.num_plane_values, tiles.num_state_values, low, top, exponents, exponents_stride,
    )  # fmt: skip


def merge_rows(
    exponents: torch.Tensor, payloads: Payloads, fixed_at: int, tiles: Tiles, fmt: FloatFormat, out: torch.Tensor
) -> None:
    """See TileKernels."""
    top_at = fixed_at + tiles.num_plane_values * fmt.low_bytes
    assert top_at + packed_bytes(tiles.num_plane_values, fmt.top_bits) <= payloads.data.shape[1]
    assert exponents.dtype == torch.uint8 and out.dtype == fmt.dtype and not tiles.state_is_flat
    _check_rows(exponents, payloads.num_peers, tiles.num_state_values)
    _check_rows(out, len(payloads.data), tiles.num_flat_values)
    data = payloads.data
    _launch(
        f"merge_rows_{fmt.name}", (tiles.num_tiles, payloads.num_peers), exponents, exponents.stride(0), data,
        data.stride(0), payloads.own, payloads.row_ok, fixed_at, top_at, tiles.table, out, out.stride(0),
    )  # fmt: skip


def copy_out(rows: torch.Tensor, own: int, tiles: Tiles, out: torch.Tensor) -> None:
    """See TileKernels."""
    assert rows.dtype == out.dtype and rows.element_size() in (2, 4), (rows.dtype, out.dtype)
    _check_rows(rows, len(out), tiles.num_state_values)
    _check_rows(out, len(rows), tiles.num_flat_values)
    num_peers = len(rows) - (own < len(rows))
    _launch(
        f"copy_out_{8 * rows.element_size()}", (tiles.num_tiles, num_peers), rows, rows.stride(0), own, tiles.table, out,
        out.stride(0),
    )  # fmt: skip


# ---- symbols


def scan_symbols(values: torch.Tensor, tiles: Tiles, fmt: FloatFormat) -> SymbolScan:
    """See TileKernels. Reads the values once."""
    _check_flat(values, tiles, fmt)
    tops = _room((tiles.num_tiles,), torch.uint8, values.device)
    counts = torch.zeros(tiles.num_tiles + 1, dtype=torch.int64, device=values.device)
    _launch(f"scan_symbols_{fmt.name}", (tiles.num_tiles, 1), values, tiles.table, tops, counts)
    return SymbolScan(tops, counts.cumsum(0))


def symbol_sizes(scan: SymbolScan, tiles: Tiles) -> torch.Tensor:
    """See TileKernels."""
    sizes = torch.empty(3, dtype=torch.int64, device=scan.up_to.device)
    sizes[0].fill_(4 * (tiles.num_tiles + 1))
    sizes[1].fill_(tiles.num_tiles)
    sizes[2:].copy_(scan.up_to[-1:])
    return sizes


def pack_symbols(values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, scan: SymbolScan, sections: SectionRoom) -> None:
    """See TileKernels. Reads tiles that have escapes only."""
    _check_flat(values, tiles, fmt)
    _check_tops(scan.tops, tiles)
    assert len(scan.up_to) == tiles.num_tiles + 1 and scan.up_to.is_contiguous()
    _launch(
        f"pack_symbols_{fmt.name}", (tiles.num_tiles, 1), values, tiles.table, tiles.num_tiles, scan.tops, scan.up_to,
        *_room_args(sections),
    )  # fmt: skip


def _check_tops(tops: torch.Tensor, tiles: Tiles) -> None:
    assert tops.dtype == torch.uint8 and len(tops) == tiles.num_tiles and tops.is_contiguous(), (tops.dtype, tops.shape)


def put_nibbles(
    values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, tops: torch.Tensor, nibbles: torch.Tensor
) -> None:
    """See TileKernels. Reads the values once."""
    _check_flat(values, tiles, fmt)
    _check_tops(tops, tiles)
    assert nibbles.dtype == torch.uint8 and nibbles.is_contiguous(), nibbles.dtype
    assert len(nibbles) >= tiles.num_plane_values // 2, (len(nibbles), tiles.num_plane_values)
    _launch(
        f"put_nibbles_{fmt.name}", (tiles.num_tiles, 1), values, tiles.table, tiles.num_tiles, tiles.num_plane_values,
        tops, nibbles,
    )  # fmt: skip


def merge_symbols(
    payloads: Payloads, fixed_at: int, tiles: Tiles, fmt: FloatFormat, out: torch.Tensor, damage: torch.Tensor
) -> None:
    """See TileKernels."""
    top_at = fixed_at + tiles.num_plane_values * fmt.low_bytes
    nibbles_at = top_at + packed_bytes(tiles.num_plane_values, fmt.top_bits)
    assert nibbles_at + tiles.num_plane_values // 2 <= payloads.data.shape[1]
    assert out.dtype == fmt.dtype and payloads.has_table_of(3)
    _check_rows(out, len(payloads.data), tiles.num_flat_values)
    _launch(
        f"merge_symbols_{fmt.name}", (tiles.num_tiles, payloads.num_peers), *_payload_args(payloads), fixed_at, top_at,
        nibbles_at, tiles.table, tiles.num_tiles, out, out.stride(0), damage,
    )  # fmt: skip


# ---- blocks of exponents


def hash_blocks(
    values: torch.Tensor, tiles: Tiles, fmt: FloatFormat, last_hashes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See TileKernels. Reads the values once."""
    _check_flat(values, tiles, fmt)
    assert tiles.blocks is not None
    assert last_hashes is None or (last_hashes.shape == (tiles.num_blocks, 2) and last_hashes.is_contiguous())
    hashes = _room((tiles.num_blocks, 2), torch.int64, values.device)
    changed = _room((tiles.num_blocks,), torch.uint8, values.device)
    _launch(
        f"hash_blocks_{fmt.name}", (-(-tiles.num_blocks // NUM_WARPS), 1), values, tiles.blocks, tiles.num_blocks,
        tiles.block_size, last_hashes, hashes, changed,
    )  # fmt: skip
    return hashes, changed


def block_sizes(changed: torch.Tensor, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """See TileKernels."""
    ranks = torch.zeros(tiles.num_blocks + 1, dtype=torch.int64, device=changed.device)
    torch.cumsum(changed, 0, dtype=torch.int64, out=ranks[1:])
    sizes = torch.empty(3, dtype=torch.int64, device=changed.device)
    sizes[0].fill_(packed_bytes(tiles.num_blocks, 1))
    sizes[1].fill_(4 * (_num_groups(tiles) + 1))
    torch.mul(ranks[-1:], tiles.block_size, out=sizes[2:])
    return sizes.mul_(ranks[-1] > 0), ranks


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
    """See TileKernels. Reads changed blocks only."""
    _check_flat(values, tiles, fmt)
    assert tiles.blocks is not None
    assert len(changed) == tiles.num_blocks == len(ranks) - 1 and changed.is_contiguous() and ranks.is_contiguous()
    _launch(
        f"pack_blocks_{fmt.name}", (_num_groups(tiles), 1), values, tiles.blocks, tiles.num_blocks, tiles.block_size,
        changed, ranks, *_room_args(sections),
    )  # fmt: skip


def put_blocks(payloads: Payloads, tiles: Tiles, rows: torch.Tensor, damage: torch.Tensor) -> None:
    """See TileKernels."""
    assert rows.dtype == torch.uint8 and payloads.has_table_of(3)
    _check_rows(rows, payloads.num_peers, tiles.num_state_values)
    _launch(
        "put_blocks", (_num_groups(tiles), payloads.num_peers), *_payload_args(payloads), tiles.num_blocks,
        tiles.block_size, rows, rows.stride(0), damage,
    )  # fmt: skip


# ---- sections


def section_table(sizes: torch.Tensor, sections_at: int, coding: int) -> torch.Tensor:
    """See TileKernels."""
    rounded = (sizes + (ALIGNMENT - 1)).bitwise_and_(-ALIGNMENT)
    ends = rounded.cumsum(0).sub_(rounded).add_(sizes)  # from the first section on
    return ends.add_(-(-sections_at // ALIGNMENT) * ALIGNMENT).bitwise_or_(coding << CODING_SHIFT)


# ---- checksums and heads


def checksum(data: torch.Tensor) -> torch.Tensor:
    """See TileKernels. Rows whose values are not side by side are copied first."""
    sums = torch.zeros(len(data), dtype=torch.int64, device=data.device)
    if not len(data):
        return sums
    raw = data if data[0].is_contiguous() else data.contiguous()
    row_bytes = raw[0].numel() * raw.element_size()
    num_ctas = min(-(-row_bytes // CTA_BYTES), MOST_CHECKSUM_CTAS)
    _launch("checksum", (num_ctas, len(raw)), raw, raw.stride(0) * raw.element_size(), row_bytes, sums)
    _launch("finish_checksums", (-(-len(raw) // NUM_THREADS), 1), sums, len(raw))
    return sums


def write_head(
    payload: torch.Tensor, name: int, own_checksum: torch.Tensor, expected_checksum: torch.Tensor,
    payload_bytes: torch.Tensor | int,
) -> None:  # fmt: skip
    """See TileKernels."""
    assert payload.dtype == torch.uint8 and payload.is_contiguous() and len(payload) >= HEAD_BYTES
    known, on_device = (payload_bytes, None) if isinstance(payload_bytes, int) else (0, payload_bytes)
    _launch("write_head", (1, 1), payload, name, own_checksum, expected_checksum, on_device, known)


def check_heads(
    heads: torch.Tensor, own: int, name: int, damage: torch.Tensor, decoded_checksums: torch.Tensor | None = None
) -> torch.Tensor:
    """See TileKernels."""
    assert heads.dtype == torch.uint8
    _check_rows(heads, len(heads), HEAD_BYTES)
    assert decoded_checksums is None or (len(decoded_checksums) == len(heads) and decoded_checksums.is_contiguous())
    row_ok = _room((len(heads),), torch.int32, heads.device)
    _launch(
        "check_heads", (-(-len(heads) // NUM_THREADS), 1), heads, heads.stride(0), len(heads), own, name,
        decoded_checksums, row_ok, damage,
    )  # fmt: skip
    return row_ok

"""The torch reference of the tile kernels against plain Python written apart: worked examples, all patterns of 16 bits, ragged
runs, round trips between several ranks, what is noticed of damage, heads.
"""

from __future__ import annotations

import doctest
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels_reference import changed_values, exponent, named, plain_planes, random_values, unsigned, values_of

from fsdp_ciera.kernels import heads, reference, reference_tiles
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.heads import DAMAGE_MEANINGS, HEAD, HEAD_BYTES, TILES, Damage, meanings_of
from fsdp_ciera.kernels.tiles import Payloads, SectionRoom, Tiles, make_tiles
from kernel_cases import (
    BF16,
    FP16,
    NAME,
    NUM_SECTIONS,
    Damages,
    Layout,
    Runs,
    Unit,
    encoded,
    layout_of,
    padded_rows,
    payload_of,
    receive,
    sections_in,
    sent_payloads,
    some_heads,
    symbol_values,
    whole,
    words_of,
)

FORMAT_LIST = list(FORMATS.values())


@st.composite
def some_runs(draw: st.DrawFn, most_values: int = 3000) -> Runs:
    """Up to four, with gaps, of any lengths, some empty."""
    runs, end = [], 0
    for _ in range(draw(st.integers(1, 4))):
        start = end + draw(st.integers(0, 70))
        count = draw(st.one_of(st.integers(0, 130), st.integers(0, most_values)))
        runs.append((start, count))
        end = start + count
    return tuple(runs)


# ---- tiles


def test_worked_example_of_tiles() -> None:
    tiles = make_tiles([(0, 2100), (3000, 10)], "cpu")
    assert tiles.table.tolist() == [[0, 0, 0, 2048], [2048, 2048, 2048, 52], [3000, 2112, 2112, 10]]
    assert (tiles.num_tiles, tiles.num_plane_values, tiles.num_state_values) == (3, 2176, 2176)
    assert (tiles.blocks, tiles.num_blocks, tiles.block_size) == (None, 0, 0)
    tiles = make_tiles([(0, 2100), (3000, 10)], "cpu", block_size=512)
    assert tiles.table.tolist() == [[0, 0, 0, 2048], [2048, 2048, 2048, 52], [3000, 2560, 2112, 10]]
    assert (tiles.num_plane_values, tiles.num_state_values, tiles.num_blocks) == (2176, 3072, 6)
    assert tiles.blocks is not None
    assert tiles.blocks.tolist() == [[0, 512], [512, 512], [1024, 512], [1536, 512], [2048, 52], [3000, 10]]
    tiles = make_tiles([(0, 2100), (3000, 10)], "cpu", state_is_flat=True)
    assert tiles.table.tolist() == [[0, 0, 0, 2048], [2048, 2048, 2048, 52], [3000, 3000, 2112, 10]]
    assert tiles.num_state_values == tiles.num_flat_values == 3010


@settings(max_examples=100, deadline=None)
@given(some_runs(20_000), st.sampled_from([0, 8, 64, 512, 4096]))
def test_tiles_hold_each_value_once(runs: Runs, block_size: int) -> None:
    tiles = make_tiles(runs, "cpu", block_size=block_size)
    padding = block_size or 64
    flat = [start + k for start, count in runs for k in range(count)]
    assert [start + k for start, _, _, count in tiles.table.tolist() for k in range(count)] == flat
    state, plane = [], []
    places = {place: number for number, place in enumerate(flat)}
    starts, state_end, plane_end = [], 0, 0
    for start, count in runs:
        starts.append((start, count, state_end, plane_end))
        state_end += -(-count // padding) * padding
        plane_end += -(-count // 64) * 64
    for start, count, at, plane_at in starts:
        state += [at + k for k in range(count)]
        plane += [plane_at + k for k in range(count)]
        assert all(places[start + k] == len(state) - count + k for k in (0, count - 1) if count)
    assert [at + k for _, at, _, count in tiles.table.tolist() for k in range(count)] == state
    assert [at + k for _, _, at, count in tiles.table.tolist() for k in range(count)] == plane
    assert (tiles.num_state_values, tiles.num_plane_values) == (state_end, plane_end)
    if tiles.blocks is not None:
        in_blocks = [(start + k, block * block_size + k) for block, (start, count) in enumerate(tiles.blocks.tolist())
                     for k in range(count)]  # fmt: skip
        assert in_blocks == list(zip(flat, state, strict=True)) and tiles.num_blocks * block_size == state_end


def test_tiles_that_cannot_be() -> None:
    for options in ({"block_size": 12}, {"block_size": 64, "state_is_flat": True}):
        with pytest.raises(AssertionError):
            make_tiles([(0, 100)], "cpu", **options)  # type: ignore[arg-type]


# ---- sections of changes


def test_worked_example_of_changes() -> None:
    tiles = make_tiles([(0, 20), (30, 3)], "cpu")
    last = values_of([0x4000 + k for k in range(33)], BF16)
    fresh = last.clone()
    for place in (1, 17, 31):
        words_of(fresh)[place] += 1
    words_of(fresh)[19] = 0x3F80
    state = torch.zeros(tiles.num_state_values, dtype=torch.bfloat16)
    words_of(state)[:20], words_of(state)[64:67] = words_of(last)[:20], words_of(last)[30:]
    scan = reference_tiles.scan_values(fresh, state, tiles, BF16, 255)
    bits = scan.bits.view(2, 256)
    assert bits[0, :4].tolist() == [0b10, 0, 0b1010, 0] and bits[1, :2].tolist() == [0b10, 0]
    assert int(bits.count_nonzero()) == 3
    assert scan.up_to.tolist() == [[0, 0, 0], [2, 3, 1], [3, 4, 1]]
    sizes = reference_tiles.change_sizes(scan, tiles, 2)
    assert sizes.tolist() == [36, 2, 3, 4, 2]
    table = reference_tiles.section_table(sizes, 0, TILES)
    arena = torch.full((128,), 9, dtype=torch.uint8)
    reference_tiles.pack_values(fresh, state, tiles, BF16, 255, scan, SectionRoom(arena, table, 0, 0))
    packed = bytes(arena.tolist())
    assert struct.unpack("<9I", packed[:36]) == (0, 0, 0, 2, 3, 1, 3, 4, 1)
    assert list(packed[48:50]) == [0b101, 0b1] and list(packed[64:67]) == [0b10, 0b1010, 0b10]
    assert list(packed[80:84]) == [2, 2, 255, 2] and packed[96:98] == b"\x80\x3f"
    assert packed[36:48] == b"\x09" * 12 and packed[98:] == b"\x09" * 30
    payload = torch.zeros(1, 176, dtype=torch.uint8)
    payload[0, :40] = table.view(torch.uint8)
    payload[0, 48:] = arena
    moved = reference_tiles.section_table(sizes, 48, TILES)
    payload[0, :40] = moved.view(torch.uint8)
    damage = torch.zeros(1, dtype=torch.int32)
    payloads = Payloads(payload, 1, torch.ones(1, dtype=torch.int32), 0, 48, 0)
    rows = state.clone()[None]
    reference_tiles.apply_values(payloads, tiles, BF16, 255, rows, damage)
    assert unsigned(rows[0, :20]) == unsigned(fresh[:20]) and unsigned(rows[0, 64:67]) == unsigned(fresh[30:])
    assert not damage.any()


def test_worked_example_of_blocks() -> None:
    tiles = make_tiles([(0, 24)], "cpu", block_size=8)
    changed = torch.tensor([0, 1, 1], dtype=torch.uint8)
    sizes, ranks = reference_tiles.block_sizes(changed, tiles)
    assert sizes.tolist() == [1, 8, 16] and ranks.tolist() == [0, 0, 1, 2]
    values = values_of([0x3F80 + (k << 7) for k in range(24)], BF16)
    table, arena = reference_tiles.section_table(sizes, 0, TILES), torch.zeros(64, dtype=torch.uint8)
    reference_tiles.pack_blocks(values, tiles, BF16, changed, ranks, SectionRoom(arena, table, 0, 0))
    assert arena[0] == 0b110 and struct.unpack("<2I", bytes(arena[16:24].tolist())) == (0, 2)
    assert arena[32:48].tolist() == [127 + 8 + k for k in range(16)]


def test_worked_example_of_symbols() -> None:
    tiles, values = make_tiles([(0, 3)], "cpu"), torch.tensor([1.0, -0.25, 0.0]).bfloat16()
    scan = reference_tiles.scan_symbols(values, tiles, BF16)
    assert scan.tops.tolist() == [127] and scan.up_to.tolist() == [0, 1]
    sizes = reference_tiles.symbol_sizes(scan, tiles)
    assert sizes.tolist() == [8, 1, 1]
    payload = torch.full((1, 208), 9, dtype=torch.uint8)
    table = reference_tiles.section_table(sizes, 24 + 64 + 32, TILES)
    payload[0, :24] = table.view(torch.uint8)
    low, nibbles = payload[0, 24:88], payload[0, 88:120]
    reference_tiles.split_tiles(values, tiles, BF16, low, None, None)
    reference_tiles.put_nibbles(values, tiles, BF16, scan.tops, nibbles)
    assert low.tolist() == [0, 1] + [0] * 62 and nibbles.tolist() == [0x20, 0x0F] + [0] * 30
    reference_tiles.pack_symbols(values, tiles, BF16, scan, SectionRoom(payload[0, 128:], table, 128, 0, 120))
    packed = bytes(payload[0, 128:].tolist())
    assert struct.unpack("<2I", packed[:8]) == (0, 1) and packed[16] == 127 and packed[32] == 0
    assert packed[8:16] + packed[17:32] + packed[33:] == b"\x09" * (8 + 15 + 47)
    out, damage = torch.full((1, 5), 7.0).bfloat16(), torch.zeros(1, dtype=torch.int32)
    payloads = Payloads(payload, 1, torch.ones(1, dtype=torch.int32), 0, 120, 0)
    reference_tiles.merge_symbols(payloads, 24, tiles, BF16, out, damage)
    assert out.tolist() == [[1.0, -0.25, 0.0, 7.0, 7.0]] and not damage.any()
    payload[0, 128] = 1  # the first offset
    reference_tiles.merge_symbols(payloads, 24, tiles, BF16, out.zero_(), damage)
    assert not out.any() and damage.item() == Damage.DAMAGED


def test_exponents_around_the_farthest_nibble() -> None:
    """14 below the top is a nibble, 15 below an escape; each tile has its own top."""
    below = [0, 14, 15, 16, 100] + [0] * 2043 + [0, 20]
    exponents = [120 - one for one in below[:2048]] + [30 - one for one in below[2048:]]
    values = values_of([one << 7 for one in exponents], BF16)
    tiles = make_tiles([(0, 2050)], "cpu")
    scan = reference_tiles.scan_symbols(values, tiles, BF16)
    assert scan.tops.tolist() == [120, 30] and scan.up_to.tolist() == [0, 3, 4]
    nibbles = torch.full((1056,), 9, dtype=torch.uint8)
    reference_tiles.put_nibbles(values, tiles, BF16, scan.tops, nibbles)
    assert nibbles.tolist() == [0xE0, 0xFF, 0x0F] + [0] * 1021 + [0xF0] + [0] * 31
    table = reference_tiles.section_table(reference_tiles.symbol_sizes(scan, tiles), 0, TILES)
    arena = torch.zeros(64, dtype=torch.uint8)
    reference_tiles.pack_symbols(values, tiles, BF16, scan, SectionRoom(arena, table, 0, 0))
    assert struct.unpack("<3I", bytes(arena[:12].tolist())) == (0, 3, 4) and arena[16:18].tolist() == [120, 30]
    assert arena[32:36].tolist() == [105, 104, 20, 10]


def test_worked_example_of_planes() -> None:
    tiles = make_tiles([(0, 4)], "cpu")
    values = torch.tensor([1.0, -2.0, 0.5, -0.0]).half()
    low, top, exponents = (torch.full((size,), 9, dtype=torch.uint8) for size in (64, 24, 64))
    reference_tiles.split_tiles(values, tiles, FP16, low, top, exponents)
    assert low.tolist() == [0, 1, 0, 1] + [0] * 60 and top.tolist() == [0] * 24
    assert exponents.tolist() == [15, 16, 14, 0] + [0] * 60


def test_docstrings() -> None:
    for module in (reference_tiles, heads):
        results = doctest.testmod(module)
        assert results.attempted > 0 and results.failed == 0


def plain_decode(
    sections: list[bytes], tiles: Tiles, last: list[int], fmt: FloatFormat | None, escape: int
) -> list[int]:
    """The state after the changes that sections say, value by value, from the definition of the coding."""
    if not any(sections):
        return list(last)
    offsets = struct.unpack(f"<{len(sections[0]) // 4}I", sections[0])
    bits_of_level1 = [byte >> k & 1 for byte in sections[1] for k in range(8)]
    level2, moves = sections[2], sections[3]
    item_bytes = fmt.item_bytes if fmt else 1
    raw = sections[4] if fmt else b""
    literals = [int.from_bytes(raw[k : k + item_bytes], "little") for k in range(0, len(raw), item_bytes)]
    state, used = list(last), [0, 0, 0]  # bytes of level 2, moves, literals
    for number, (_, at, plane, count) in enumerate(tiles.table.tolist()):
        assert list(offsets[3 * number : 3 * number + 3]) == used
        for octet in range(0, count, 8):
            if not bits_of_level1[(plane + octet) // 8]:
                continue
            byte = level2[used[0]]
            used[0] += 1
            assert byte and byte >> min(8, count - octet) == 0, "a bit behind the last value, or none at all"
            for place in (at + octet + k for k in range(8) if byte >> k & 1):
                symbol = moves[used[1]]
                used[1] += 1
                if fmt is None:
                    state[place] = (state[place] + symbol) % 256
                elif symbol == escape:
                    state[place] = literals[used[2]]
                    used[2] += 1
                else:
                    state[place] = plain_moved(state[place], symbol, 8 * item_bytes)
    assert used == [len(level2), len(moves), len(literals)] == list(offsets[-3:])
    assert sum(bits_of_level1) == len(level2), "a bit of the padding"
    return state


def plain_moved(pattern: int, symbol: int, width: int) -> int:
    """A bit pattern after a move in zigzag form, in the order of the numbers."""
    distance = symbol // 2 if symbol % 2 == 0 else -(symbol + 1) // 2
    sign, most = 1 << (width - 1), 1 << width
    rank = pattern if pattern < sign else -1 - (pattern - sign)
    rank = (rank + distance + sign) % most - sign
    return rank if rank >= 0 else sign + (-1 - rank)


def check_changes(unit: Unit, kind: str, first: int) -> None:
    """What the reference sends, decoded by plain Python and by the reference."""
    layout, fmt = Layout(kind, first), unit.fmt if kind == "values" else None
    sections = [bytes(section.tolist()) for section in sections_in(payload_of(unit, layout, 0), layout)]
    last = unit.state(unit.last[0]) if kind == "values" else unit.exponents(unit.last[0])
    fresh = unit.state(unit.fresh[0]) if kind == "values" else unit.exponents(unit.fresh[0])
    state = plain_decode(sections, unit.tiles, unsigned(last), fmt, unit.escape)
    rows, damage = last.clone()[None], torch.zeros(1, dtype=torch.int32)
    payloads = sent_payloads(unit, layout, own=1)
    receive(reference_tiles, kind, payloads, unit, unit.tiles, rows, damage)
    assert unsigned(rows[0]) == state and not damage.any()
    for _, at, _, count in unit.tiles.table.tolist():
        assert state[at : at + count] == unsigned(fresh[at : at + count])
    sizes = [len(section) for section in sections]
    changed = sum(section != b"" for section in sections)
    assert sizes == encoded(unit, kind, 0).sizes.tolist() and changed in (0, 3, 4, 5)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMAT_LIST), st.sampled_from(["values", "exponents"]), some_runs(), st.floats(0, 1),
    st.sampled_from([0, 1, 15, 255]), st.booleans(), st.integers(0, 1),
)  # fmt: skip
def test_changes_equal_plain_integers(
    fmt: FloatFormat, kind: str, runs: Runs, share: float, escape: int, state_is_flat: bool, first: int
) -> None:
    check_changes(Unit(fmt, runs, share, escape, 1, state_is_flat=state_is_flat), kind, first)


@pytest.mark.parametrize("kind", ["values", "exponents"])
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=named)
@pytest.mark.parametrize("step", [1, -8, 127, 1 << 15])
def test_every_16_bit_pattern_changes(fmt: FloatFormat, kind: str, step: int) -> None:
    last = values_of(list(range(1 << 16)), fmt)
    fresh = values_of([(pattern + step) % (1 << 16) for pattern in range(1 << 16)], fmt)
    check_changes(Unit(fmt, whole(1 << 16), world_size=1, shards=(fresh,), past=(last,)), kind, 1)


def test_nothing_is_written_without_room_or_changes() -> None:
    for kind in NUM_SECTIONS:
        for share, missing in ((0.0, 0), (0.3, 1), (0.3, 10_000)):
            if kind == "symbols" and not missing:  # there are some in any case
                continue
            unit, layout = Unit(BF16, ((0, 300), (310, 41)), share, block_size=64), Layout(kind)
            found = encoded(unit, kind, 0)
            assert bool(found.sizes.any()) == (share > 0)
            table = layout.table(found.sizes)
            arena = torch.full((max(0, layout.end(table) - layout.arena_at - missing),), 9, dtype=torch.uint8)
            found.pack(reference_tiles, SectionRoom(arena, table, layout.arena_at, 1), unit.tiles)
            assert (arena == 9).all()


# ---- between ranks


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=named)
@pytest.mark.parametrize("own", [0, 2, 4])
def test_values_between_ranks(fmt: FloatFormat, own: int) -> None:
    """scan -> pack -> apply -> copy_out, two gathers in a row, the second one without a change of the third rank."""
    unit = Unit(fmt, ((5, 2100), (2110, 1), (2200, 333)), 0.2, 15, world_size=4)
    damage, layout = torch.zeros(1, dtype=torch.int32), Layout("values")
    rows = torch.stack([unit.state(last) for last in unit.last])
    third = tuple(changed_values(values, 0.1, 5) if rank != 2 else values for rank, values in enumerate(unit.fresh))
    again = replace(unit, shards=third, past=tuple(unit.fresh))
    for turn in (unit, again):
        reference_tiles.apply_values(sent_payloads(turn, layout, own), unit.tiles, fmt, 15, rows, damage)
    assert not damage.any()
    assert not encoded(again, "values", 2).sizes.any()
    out = torch.stack(unit.last)
    reference_tiles.copy_out(rows, own, unit.tiles, out)
    for rank in range(4):
        wanted = unit.last[rank].clone()
        for start, count in unit.runs if rank != own else ():
            words_of(wanted)[start : start + count] = words_of(again.fresh[rank])[start : start + count]
        assert unsigned(out[rank]) == unsigned(wanted)


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=named)
@pytest.mark.parametrize("kind", ["exponents", "blocks"])
@pytest.mark.parametrize("own", [0, 2, 3])
def test_exponents_between_ranks(fmt: FloatFormat, kind: str, own: int) -> None:
    """A raw gather fills the states (split_rows); then what changed and the planes travel, and give the values (merge_rows)."""
    unit = Unit(fmt, ((5, 2100), (2110, 1), (2200, 333)), 0.02, world_size=3, block_size=64)
    tiles, peers = unit.tiles, [rank for rank in range(3) if rank != own]
    exponents = torch.full((len(peers), tiles.num_state_values), 9, dtype=torch.uint8)
    reference_tiles.split_rows(torch.stack(unit.last), own, tiles, fmt, exponents)
    assert not exponents[:, 2100:2112].any(), "the padding of a run"
    plane_bytes = tiles.num_plane_values * fmt.low_bytes, packed_bytes(tiles.num_plane_values, fmt.top_bits)
    layout = Layout(kind, fixed_bytes=sum(plane_bytes))
    payloads, damage = sent_payloads(unit, layout, own), torch.zeros(1, dtype=torch.int32)
    fixed_at = HEAD_BYTES + 8 * layout.num_sections
    data = padded_rows(payloads.data)
    for payload, fresh in zip(data, unit.fresh, strict=True):
        low, top = payload[fixed_at : layout.sections_at].split(plane_bytes)
        reference_tiles.split_tiles(fresh, tiles, fmt, low, top if fmt.top_bits else None, None)
    payloads = replace(payloads, data=data)
    receive(reference_tiles, kind, payloads, unit, tiles, exponents, damage)
    out = torch.stack(unit.last)
    reference_tiles.merge_rows(exponents, payloads, fixed_at, tiles, fmt, out)
    assert not damage.any()
    for rank in range(3):
        wanted = unit.last[rank].clone()
        for start, count in unit.runs if rank != own else ():
            words_of(wanted)[start : start + count] = words_of(unit.fresh[rank])[start : start + count]
        assert unsigned(out[rank]) == unsigned(wanted)


def plain_symbols(exponents: list[int]) -> tuple[int, list[int], list[int]]:
    """Of a tile: top, nibbles, escapes, from the definition of the coding."""
    top = max(exponents)
    return top, [min(15, top - one) for one in exponents], [one for one in exponents if top - one >= 15]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMAT_LIST), some_runs(), st.integers(0, 100), st.sampled_from([14, 15, 255]))
def test_symbols_equal_plain_integers(fmt: FloatFormat, runs: Runs, seed: int, most_below: int) -> None:
    num_values = max(start + count for start, count in runs)
    shards = tuple(symbol_values(fmt, num_values, seed + rank, most_below) for rank in range(2))
    unit = Unit(fmt, runs, shards=shards)
    layout = layout_of(unit, "symbols")
    tops: list[int] = []
    nibbles: list[int] = []
    escapes: list[int] = []
    offsets = [0]
    for start, count in runs:
        for first in range(start, start + count, 2048):
            here = unsigned(unit.fresh[0][first : min(first + 2048, start + count)])
            top, of_tile, far = plain_symbols([exponent(pattern, fmt) for pattern in here])
            tops.append(top)
            nibbles += of_tile
            escapes += far
            offsets.append(len(escapes))
        nibbles += [0] * (-count % 64)
    payload = payload_of(unit, layout, 0)
    found = [bytes(section.tolist()) for section in sections_in(payload, layout)]
    assert found == [struct.pack(f"<{len(offsets)}I", *offsets), bytes(tops), bytes(escapes)]
    packed = payload[layout.sections_at - len(nibbles) // 2 : layout.sections_at].tolist()
    assert packed == [one | other << 4 for one, other in zip(nibbles[::2], nibbles[1::2], strict=True)]
    out, damage = torch.stack(unit.last), torch.zeros(1, dtype=torch.int32)
    receive(reference_tiles, "symbols", sent_payloads(unit, layout, own=1), unit, unit.tiles, out, damage)
    wanted = unit.last[0].clone()
    for start, count in runs:
        words_of(wanted)[start : start + count] = words_of(unit.fresh[0])[start : start + count]
    assert unsigned(out[0]) == unsigned(wanted) and unsigned(out[1]) == unsigned(unit.last[1]) and not damage.any()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMAT_LIST), some_runs(), st.sampled_from([0, 8, 64, 512]), st.integers(0, 2**32))
def test_planes_of_runs_are_those_of_plain_integers(fmt: FloatFormat, runs: Runs, block_size: int, seed: int) -> None:
    tiles = make_tiles(runs, "cpu", block_size=block_size)
    values = random_values(max(start + count for start, count in runs), fmt, seed)
    sizes = (
        tiles.num_plane_values * fmt.low_bytes,
        packed_bytes(tiles.num_plane_values, fmt.top_bits),
        tiles.num_state_values,
    )
    low, top, exponents = (torch.full((size,), 9, dtype=torch.uint8) for size in sizes)
    reference_tiles.split_tiles(values, tiles, fmt, low, top if fmt.top_bits else None, exponents)
    in_planes: list[int] = []
    in_state: list[int] = []
    padding = block_size or 64
    for start, count in runs:
        patterns = unsigned(values[start : start + count])
        in_planes += patterns + [0] * (-count % 64)
        in_state += [exponent(pattern, fmt) for pattern in patterns] + [0] * (-count % padding)
    _, plain_low, plain_top = plain_planes(in_planes, fmt)
    assert low.tolist() == plain_low and exponents.tolist() == in_state
    assert not fmt.top_bits or top.tolist() == plain_top


def test_states_with_the_flat_places_are_not_split_into() -> None:
    tiles = make_tiles([(0, 5)], "cpu", state_is_flat=True)
    with pytest.raises(AssertionError, match="between the runs"):
        reference_tiles.split_tiles(torch.zeros(5).half(), tiles, FP16, None, None, torch.zeros(64, dtype=torch.uint8))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMAT_LIST), some_runs(1500), st.sampled_from([8, 64, 512]), st.floats(0, 0.2))
def test_blocks_of_runs(fmt: FloatFormat, runs: Runs, block_size: int, share: float) -> None:
    """Hashes are those of the blocks by themselves, and where exponents changed they do."""
    unit = Unit(fmt, runs, share, block_size=block_size)
    tiles = unit.tiles
    hashes, _ = reference_tiles.hash_blocks(unit.last[0], tiles, fmt, None)
    now, changed = reference_tiles.hash_blocks(unit.fresh[0], tiles, fmt, hashes)
    number = 0
    for start, count in runs:
        for first in range(start, start + count, block_size):
            block = slice(first, min(first + block_size, start + count))
            assert now[number].tolist() == reference.hash_blocks(unit.fresh[0][block], fmt, block_size)[0].tolist()
            of_block = [[exponent(p, fmt) for p in unsigned(values[block])] for values in (unit.last[0], unit.fresh[0])]
            assert bool(changed[number]) == (of_block[0] != of_block[1])
            number += 1
    assert number == tiles.num_blocks
    assert reference_tiles.hash_blocks(unit.fresh[0], tiles, fmt, None)[1].tolist() == [1] * number


# ---- damage

DAMAGED_UNITS = {
    "values": Unit(BF16, ((0, 2048), (2050, 37)), 0.3, world_size=3),
    "exponents": Unit(BF16, ((0, 2048), (2050, 37)), 0.3, world_size=3),
    "blocks": Unit(BF16, ((0, 1200), (1300, 37)), 0.1, world_size=3, block_size=16),
    "symbols": Unit(BF16, ((0, 2048), (2050, 37)), world_size=3),
}


@pytest.mark.parametrize("kind", NUM_SECTIONS)
def test_damage_is_noticed_and_parts_are_decoded_as_a_whole_or_not_at_all(kind: str) -> None:
    unit = DAMAGED_UNITS[kind]
    payloads, damages = sent_payloads(unit, layout_of(unit, kind), own=0), Damages(unit, kind, 2)
    of_values = kind in ("values", "symbols")
    states: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"values": unit.state, "symbols": torch.clone}
    state = states.get(kind, unit.exponents)
    before, after = (torch.stack([words_of(state(shard)) for shard in shards]) for shards in (unit.last, unit.fresh))
    if not of_values:
        before, after = before[1:], after[1:]
    size = 16 * 64 if kind == "blocks" else 2048
    assert len(damages.noticed) >= 40
    kept = 0
    for name, damage in damages.noticed.items():
        rows, flag = before.clone(), torch.zeros(1, dtype=torch.int32)
        of_dtype = rows.view(unit.fmt.dtype) if of_values else rows
        receive(reference_tiles, kind, damage(payloads), unit, unit.tiles, of_dtype, flag)
        assert flag.item() == Damage.DAMAGED, name
        parts = [rows[-1][start : start + size] for start in range(0, rows.shape[1], size)]
        stay = [torch.equal(part, before[-1][k * size :][:size]) for k, part in enumerate(parts)]
        assert any(stay), name
        kept += not all(stay)
        if name != "nearly all is missing":
            other = after[-2] if of_values else after[0]
            for start, in_state, _, count in unit.tiles.table.tolist():
                at = start if kind == "symbols" else in_state
                assert torch.equal(rows[-2][at : at + count], other[at : at + count]), f"{name}: another rank's row"
    assert kept >= 3, "what is damaged in one part must not keep the others back"


def test_rows_that_are_not_ok_are_left_alone() -> None:
    """Whatever is in their payloads, nobody looks."""
    for kind, unit in DAMAGED_UNITS.items():
        payloads = sent_payloads(unit, layout_of(unit, kind), own=3)
        noise = padded_rows(payloads.data)
        noise[:] = 5
        payloads = replace(payloads, row_ok=torch.zeros(3, dtype=torch.int32), data=noise)
        dtype = unit.fmt.dtype if kind in ("values", "symbols") else torch.uint8
        rows, flag = torch.full((3, unit.tiles.num_state_values), 7, dtype=dtype), torch.zeros(1, dtype=torch.int32)
        receive(reference_tiles, kind, payloads, unit, unit.tiles, rows, flag)
        assert not flag.any() and (rows == 7).all()


# ---- heads


def test_heads_are_laid_out_as_the_wire_format_says() -> None:
    assert HEAD.itemsize == HEAD_BYTES == 32
    payload, one = torch.full((40,), 9, dtype=torch.uint8), torch.tensor([-2])
    reference_tiles.write_head(payload, NAME, one, one.clone(), torch.tensor([1 << 33]))
    expected = struct.pack("<QQQ4sHH", NAME, (1 << 64) - 2, 1 << 33, b"CIER", 5, 16)
    assert bytes(payload.tolist()) == expected + b"\x09" * 8
    reference_tiles.write_head(payload, NAME, one, torch.tensor([5]), 12)
    assert bytes(payload[:32].tolist()) == struct.pack("<QQQ4sHH", 0, (1 << 64) - 2, 12, b"CIER", 5, 16)


def test_what_is_found_wrong_with_heads() -> None:
    right = some_heads(1)[0]

    def with_field(name: str, value: int) -> torch.Tensor:
        head = right.numpy().copy().view(HEAD)
        head[name] = value
        return torch.from_numpy(head.view("u1"))

    cases = [
        (right, 0), (with_field("name", 0), Damage.BROKEN_PROMISE), (with_field("name", 1), Damage.FAILED),
        (with_field("name", NAME + 1), Damage.OTHER_GATHER), (with_field("magic", 7), Damage.FOREIGN),
        (with_field("wire_version", 4), Damage.FOREIGN), (with_field("alignment", 1), Damage.FOREIGN),
        (with_field("payload_bytes", 999), 0),
    ]  # fmt: skip
    for head, bit in cases:
        damage = torch.zeros(1, dtype=torch.int32)
        row_ok = reference_tiles.check_heads(torch.stack([right, head, right]), 3, NAME, damage)
        assert row_ok.tolist() == [1, int(not bit), 1] and damage.item() == bit
    every = torch.stack([head for head, _ in cases])
    damage = torch.zeros(1, dtype=torch.int32)
    reference_tiles.check_heads(every, 1, NAME, damage)
    assert damage.item() == 2 + 4 + 8 + 32, "the head of the own row counts too"


def test_decoded_checksums_are_compared_but_for_the_own_row() -> None:
    checksum = int(some_heads(1)[0, 8:16].clone().view(torch.int64))
    for own, sums, ok in ((3, [0, 0, 0], [1, 1, 1]), (3, [0, 1, 0], [1, 0, 1]), (1, [0, 1, 0], [1, 1, 1])):
        damage = torch.zeros(1, dtype=torch.int32)
        decoded = torch.tensor([checksum ^ other for other in sums])
        row_ok = reference_tiles.check_heads(some_heads(1).expand(3, -1), own, NAME, damage, decoded)
        assert row_ok.tolist() == ok and damage.item() == (0 if all(ok) else Damage.WRONG_VALUES)


def test_every_kind_of_damage_has_a_meaning() -> None:
    assert list(DAMAGE_MEANINGS) == list(Damage) and all(DAMAGE_MEANINGS.values())
    assert meanings_of(0) == [] and meanings_of(63) == list(DAMAGE_MEANINGS.values())
    assert meanings_of(Damage.DAMAGED | Damage.FOREIGN) == [
        DAMAGE_MEANINGS[Damage.DAMAGED],
        DAMAGE_MEANINGS[Damage.FOREIGN],
    ]


def test_payloads_and_rooms_say_what_they_need() -> None:
    data, ok = torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, dtype=torch.int32)
    Payloads(data, 2, ok, 32, 40, 0)
    for wrong in (
        lambda: Payloads(data[:, 1:], 2, ok, 32, 40, 0),
        lambda: Payloads(data[:, :40].contiguous(), 2, ok, 32, 40, 0),
        lambda: Payloads(data, 3, ok, 32, 40, 0),
        lambda: Payloads(data, 2, ok[:1], 32, 40, 0),
        lambda: Payloads(data, 2, ok, 33, 40, 0),
        lambda: SectionRoom(data[0, 1:], torch.zeros(1, dtype=torch.int64), 0, 0),
        lambda: SectionRoom(data[0], torch.zeros(1, dtype=torch.int64), 8, 0),
    ):
        with pytest.raises(AssertionError):
            wrong()

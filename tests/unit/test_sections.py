"""Sections of a payload: how symbols and positions are stored, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_ciera.backends.base import PayloadPlan
from fsdp_ciera.backends.cpu import read_sections
from fsdp_ciera.codecs.positions import read_positions, write_positions
from fsdp_ciera.codecs.sections import Coding, Form, SectionWriter, StoredSection, SymbolReader
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.heads import FAILED, HEAD, HEAD_BYTES, Damage
from fsdp_ciera.kernels.reference import CHUNK_VALUES, gaps_of_bits, pack_bits
from loops import CPU


def bits_at(positions: list[int], num_values: int) -> torch.Tensor:
    mask = torch.zeros(num_values, dtype=torch.uint8)
    mask[positions] = 1
    return pack_bits(mask, 1)


def test_positions_worked_example() -> None:
    bits = bits_at([2, 3, 300], 400)
    gaps = gaps_of_bits(bits, 400).numpy()
    assert gaps.tolist() == [2, 0, 255, 41]
    section = StoredSection(Coding.PLAIN, gaps)
    found, count = read_positions(section, 400)
    assert torch.equal(found, bits) and count == 3
    with pytest.raises(CieraDecodeError, match="lead out of 300 values"):
        read_positions(section, 300)
    with pytest.raises(CieraDecodeError, match="mark none"):
        read_positions(StoredSection(Coding.PLAIN, gaps[:3]), 400)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.1, 0.7, 1.0])
def test_positions_of_more_than_a_chunk(share: float) -> None:
    num_values = 2 * CHUNK_VALUES + 77
    mask = torch.rand(num_values, generator=torch.Generator().manual_seed(0)) < share
    bits = pack_bits(mask.to(torch.uint8), 1)
    room = np.empty(len(bits), np.uint8)
    writer = SectionWriter(room)
    write_positions(writer, bits, num_values, int(mask.sum()))
    ((coding, num_bytes),) = writer.entries
    assert (coding in (Coding.BITMAP, Coding.BITMAP_ZSTD)) == (share > 0.1), (share, coding)
    found, count = read_positions(StoredSection(coding, room[:num_bytes]), num_values)
    assert torch.equal(found, bits) and count == mask.sum()


def test_a_damaged_bitmap_is_refused() -> None:
    for bitmap in ([255, 255], [255], [255, 1, 0]):  # 9 values: bits behind the last, a byte too few, one too many
        with pytest.raises(CieraDecodeError):
            read_positions(StoredSection(Coding.BITMAP, np.array(bitmap, np.uint8)), 9)


def write_section(symbols: np.ndarray, width_bits: int = 8) -> tuple[Coding, np.ndarray]:
    room = np.empty(len(symbols) + 1, np.uint8)
    writer = SectionWriter(room)
    writer.code(lambda: np.array_split(symbols, 3), len(symbols), width_bits)
    ((coding, num_bytes),) = writer.entries
    assert num_bytes == writer.num_bytes
    return coding, room[:num_bytes]


@pytest.mark.parametrize(
    ("symbols", "width_bits", "coding"),
    [
        (np.full(1000, 7, np.uint8), 8, Coding.ZSTD),
        (np.arange(32, dtype=np.uint8), 8, Coding.PLAIN),
        (np.random.default_rng(1).integers(256, size=500, dtype=np.uint8), 8, Coding.PLAIN),
        (np.random.default_rng(1).integers(32, size=500, dtype=np.uint8), 5, Coding.PACKED),
        (np.random.default_rng(1).integers(32, size=17, dtype=np.uint8), 5, Coding.PACKED),
        (np.empty(0, np.uint8), 8, Coding.PLAIN),
        (np.empty(0, np.uint8), 5, Coding.PLAIN),
    ],
)
def test_a_section_takes_its_smallest_form(symbols: np.ndarray, width_bits: int, coding: Coding) -> None:
    chosen, data = write_section(symbols, width_bits)
    assert chosen == coding
    assert len(data) <= -(-len(symbols) * width_bits // 8)
    reader = SymbolReader(StoredSection(coding, data), len(symbols), symbol_bits=width_bits)
    parts = [reader.read(count).copy() for count in (len(symbols) // 2, 0, len(symbols) - len(symbols) // 2)]
    reader.finish()
    assert np.array_equal(np.concatenate(parts), symbols)


def test_a_section_with_anything_behind_or_missing_is_refused() -> None:
    coding, frame = write_section(np.full(1000, 7, np.uint8))
    assert coding == Coding.ZSTD
    for damaged in (np.append(frame, np.uint8(9)), np.concatenate([frame, frame]), frame[:-1]):
        reader = SymbolReader(StoredSection(coding, damaged), 1000)
        with pytest.raises(CieraDecodeError):
            reader.read(1000)
            reader.finish()
    reader = SymbolReader(StoredSection(coding, frame), 1000)
    reader.read(999)
    with pytest.raises(CieraDecodeError, match="1 symbols too many"):
        reader.finish()
    with pytest.raises(CieraDecodeError, match="too few"):
        reader.read(2)
    for num_symbols, most in ((999, 0), (1001, 0), (None, 999)):
        with pytest.raises(CieraDecodeError, match="holds 1000 symbols"):
            SymbolReader(StoredSection(coding, frame), num_symbols, most)


def test_the_smallest_of_several_forms_is_taken() -> None:
    noise = np.random.default_rng(0).integers(256, size=100, dtype=np.uint8)
    room = np.empty(200, np.uint8)
    writer = SectionWriter(room)
    writer.code_smallest([Form(np.append(noise, noise[:1])), Form(noise, Coding.BITMAP, Coding.BITMAP_ZSTD)])
    writer.code_smallest([Form(noise[:50]), Form(np.zeros(100, np.uint8), Coding.BITMAP, Coding.BITMAP_ZSTD)])
    assert [coding for coding, _ in writer.entries] == [Coding.BITMAP, Coding.BITMAP_ZSTD]
    assert writer.entries[0][1] == 100 > writer.entries[1][1]
    assert np.array_equal(room[:100], noise)


def codecs_of(num_sections: int) -> Any:
    """One codec with a state."""
    return [SimpleNamespace(stateless=False, num_sections=num_sections)]


def test_table_and_sections_round_trip() -> None:
    plan = PayloadPlan((HEAD_BYTES + 16,), (5,), (0,), 2, HEAD_BYTES + 16 + 5, 1)
    writer = SectionWriter(np.empty(1000, np.uint8))
    writer.code(lambda: [np.arange(10, dtype=np.uint8)], 10)
    writer.code(lambda: [np.zeros(400, np.uint8)], 400)
    encoded = CPU.seal(plan, codecs_of(2), writer, 1 << 40)
    assert encoded.num_bytes == plan.sections_at + writer.num_bytes
    payload = CPU.payload(plan, encoded, encoded.num_bytes + 3)
    plan.fixed(payload, 0)[:] = torch.arange(5, dtype=torch.uint8)
    checksum = torch.tensor([-7])
    CPU.stamp(payload, 12345, checksum, checksum, encoded.payload_bytes)
    stored = read_sections(plan, payload, encoded.num_bytes)
    assert [section.coding for section in stored] == [Coding.PLAIN, Coding.ZSTD]
    assert [len(section.data) for section in stored] == [num_bytes for _, num_bytes in writer.entries]
    assert stored[0].data.tolist() == list(range(10))
    assert payload[plan.fixed_at[0] : plan.sections_at].tolist() == list(range(5))
    head = payload[:HEAD_BYTES].numpy().view(HEAD)[0]
    assert (int(head["name"]), int(head["checksum"])) == (12345, 2**64 - 7)
    assert int(head["payload_bytes"]) == encoded.num_bytes
    for length in (
        encoded.num_bytes - 1,
        encoded.num_bytes + 1,
        plan.sections_at - 1,
        encoded.num_bytes + 4,
        HEAD_BYTES,
    ):
        with pytest.raises(CieraDecodeError):
            read_sections(plan, payload, length)


def test_nothing_changed_is_a_head_and_nothing_else() -> None:
    plan = PayloadPlan((HEAD_BYTES + 16,), (0,), (0,), 2, HEAD_BYTES + 16, 1)
    for coding, expected in ((Coding.PLAIN, HEAD_BYTES), (Coding.ALL, HEAD_BYTES + 16)):
        writer = SectionWriter(np.empty(9, np.uint8))
        writer.empty()
        writer.empty(coding)
        encoded = CPU.seal(plan, codecs_of(2), writer, 1 << 40)
        assert encoded.num_bytes == expected
        payload = CPU.payload(plan, encoded, 100)
        assert [section.coding for section in read_sections(plan, payload, expected)] == [Coding.PLAIN, coding]


def test_a_payload_as_large_as_the_shard_is_not_kept() -> None:
    plan = PayloadPlan((HEAD_BYTES + 8,), (100,), (0,), 1, HEAD_BYTES + 108, 1)
    writer = SectionWriter(np.empty(99, np.uint8))
    writer.reserve(10)
    assert CPU.seal(plan, codecs_of(1), writer, 151).num_bytes == 150
    encoded = CPU.seal(plan, codecs_of(1), writer, 150)
    assert (encoded.num_bytes, len(encoded.data), int(encoded.repeat_bytes)) == (150, 0, 140)


def test_heads_say_whose_gather_it_is() -> None:
    heads = torch.zeros(3, HEAD_BYTES, dtype=torch.uint8)
    one, other = torch.tensor([1]), torch.tensor([2])
    for flag, row in (
        (Damage(0), None),
        (Damage.OTHER_GATHER, (78, one)),
        (Damage.BROKEN_PROMISE, (77, other)),
        (Damage.FAILED, (FAILED, one)),
        (Damage.FOREIGN, None),
    ):
        for head in heads:
            CPU.stamp(head, 77, one, one, other)
        if row is not None:
            CPU.stamp(heads[1], row[0], row[1], one, other)
        if flag == Damage.FOREIGN:
            heads[1, 24] ^= 1
        damage = torch.zeros(1, dtype=torch.int32)
        row_ok = CPU.check_heads(heads, 0, 77, damage)
        assert int(damage) == flag
        assert row_ok.tolist() == [1, int(flag == 0), 1]

"""The torch reference of the kernels: worked examples from the docstrings, then all bit patterns and ragged sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.reference import (
    CHUNK_VALUES,
    HASH_SEEDS,
    checksum,
    hash_blocks,
    merge_planes,
    pack_bits,
    split_planes,
    splitmix64,
    unpack_bits,
)

MASK = (1 << 64) - 1


def mix(word: int) -> int:
    """SplitMix64's finaliser in plain integers, written apart from the torch form."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def test_splitmix64_gives_the_published_sequence() -> None:
    # the first outputs of SplitMix64 seeded with 0, as in the generator's published test vector
    gamma = 0x9E3779B97F4A7C15
    states = torch.tensor([(k * gamma & MASK) - ((k * gamma & MASK) >> 63 << 64) for k in (1, 2, 3)])
    assert [v & MASK for v in splitmix64(states).tolist()] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip


@pytest.mark.parametrize("block_size", [64, 512, 1024])
def test_hash_equals_plain_integers(block_size: int) -> None:
    exponents = torch.randint(256, (3, block_size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = []
    for block in exponents.tolist():
        words = [int.from_bytes(bytes(block[i : i + 8]), "little") for i in range(0, block_size, 8)]
        expected.append(
            [
                mix(sum(mix(w ^ (s + (j + 1) * 0x9E3779B97F4A7C15 & MASK)) for j, w in enumerate(words)) & MASK ^ s)
                for s in HASH_SEEDS
            ]
        )
    assert [[v & MASK for v in row] for row in hash_blocks(exponents).tolist()] == expected


def test_a_change_of_any_one_exponent_changes_both_hashes() -> None:
    base = torch.full((1, 512), 120, dtype=torch.uint8)
    changed = base.repeat(512, 1)
    changed[torch.arange(512), torch.arange(512)] = 121
    assert (hash_blocks(changed) != hash_blocks(base)).all()
    assert len({tuple(row) for row in hash_blocks(changed).tolist()}) == 512


def test_split_worked_example() -> None:
    exponents, remainder = split_planes(torch.tensor([[1.0, -2.0, 0.5, -0.0]]).bfloat16(), FORMATS[torch.bfloat16])
    assert exponents.tolist() == [[127, 128, 126, 0]]
    assert remainder.tolist() == [[0, 1, 0, 1]]


def test_pack_worked_example() -> None:
    assert pack_bits(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8), 3).tolist() == [[209, 8]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_survives(dtype: torch.dtype) -> None:
    fmt = FORMATS[dtype]
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(1, -1)
    exponents, remainder = split_planes(bits.view(dtype), fmt)
    assert remainder.shape[1] == fmt.remainder_bytes(1 << 16) == (1 << 16) * (16 - fmt.exponent_bits) // 8
    assert torch.equal(merge_planes(exponents, remainder, fmt).view(torch.int16), bits)
    unsigned = bits.to(torch.int32) & 0xFFFF
    assert torch.equal(
        exponents.to(torch.int32), (unsigned >> (15 - fmt.exponent_bits)) & ((1 << fmt.exponent_bits) - 1)
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(FORMATS.values())), st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**32))
def test_split_and_merge_of_any_length(fmt: FloatFormat, num_values: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (rows, num_values * fmt.item_bytes), dtype=torch.uint8, generator=generator)
    values = raw.view(fmt.dtype)
    exponents, remainder = split_planes(values, fmt)
    assert remainder.shape == (rows, fmt.remainder_bytes(num_values))
    assert torch.equal(merge_planes(exponents, remainder, fmt).view(torch.uint8), raw)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 50), st.integers(1, 8), st.integers(0, 2**32))
def test_packed_bits_of_any_width(num_values: int, width_bits: int, seed: int) -> None:
    values = torch.randint(
        1 << width_bits, (2, num_values), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    packed = pack_bits(values, width_bits)
    assert packed.shape == (2, packed_bytes(num_values, width_bits))
    assert torch.equal(unpack_bits(packed, num_values, width_bits), values)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**32))
def test_checksum_sees_every_changed_byte_and_every_swap(num_bytes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (1, num_bytes), dtype=torch.uint8, generator=generator)
    changed = data.repeat(num_bytes, 1)
    changed[torch.arange(num_bytes), torch.arange(num_bytes)] += 1
    assert (checksum(changed) != checksum(data)).all()
    rolled = data.roll(8, dims=1)
    assert torch.equal(rolled, data) == bool(checksum(rolled) == checksum(data))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("num_values", [CHUNK_VALUES - 1, CHUNK_VALUES, CHUNK_VALUES + 1, 2 * CHUNK_VALUES + 13])
def test_lengths_around_a_chunk(fmt: FloatFormat, num_values: int) -> None:
    raw = torch.randint(
        256, (2, num_values * fmt.item_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_values)
    )
    values = raw.view(fmt.dtype)
    exponents, remainder = split_planes(values, fmt)
    for start in range(0, num_values - 8, num_values // 5):
        alone, _ = split_planes(values[:, start : start + 8].contiguous(), fmt)
        assert torch.equal(alone, exponents[:, start : start + 8])
    wide = torch.zeros(2, num_values + 3, dtype=fmt.dtype)
    merge_planes(exponents, remainder, fmt, wide[:, 1:-2])
    assert torch.equal(wide[:, 1:-2].contiguous().view(torch.uint8), raw)
    assert not wide[:, 0].view(fmt.int_dtype).any() and not wide[:, -2:].contiguous().view(fmt.int_dtype).any()


def test_checksum_of_more_than_a_chunk() -> None:
    data = torch.randint(256, (1, 8 * CHUNK_VALUES + 21), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    words = [int.from_bytes(bytes(data[0, i : i + 8].tolist()), "little") for i in range(0, data.shape[1], 8)]
    expected = mix(sum(word * (2 * j + 1) for j, word in enumerate(words)) & MASK)
    assert int(checksum(data)) & MASK == expected


def test_checksum_is_one_of_bytes_and_not_of_alignment() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    assert checksum(data[3:75].view(1, -1)) == checksum(data[3:75].clone().view(1, -1))

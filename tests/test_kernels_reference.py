"""The torch reference of the kernels: worked examples from the docstrings, all bit patterns, ragged sizes.

And the host kernels that the codecs call (fsdp_ciera.kernels.ops) against it, bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ciera.kernels import ops
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


def random_values(rows: int, num_values: int, fmt: FloatFormat, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (rows, num_values * fmt.item_bytes), dtype=torch.uint8, generator=generator)
    return raw.view(fmt.dtype)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_split_and_merge_into_given_tensors(fmt: FloatFormat) -> None:
    values = random_values(2, 1000, fmt, 0)
    exponents, remainder = split_planes(values, fmt)
    wide = [torch.full((2, size + 5), 9, dtype=torch.uint8) for size in (1000, fmt.remainder_bytes(1000))]
    given = (wide[0][:, 2:-3], wide[1][:, 2:-3])
    split_planes(values, fmt, out=given)
    assert torch.equal(given[0], exponents) and torch.equal(given[1], remainder)
    for tensor in wide:
        assert bool((tensor[:, :2] == 9).all()) and bool((tensor[:, -3:] == 9).all())
    out = torch.zeros_like(values)
    assert merge_planes(*given, fmt, out=out) is out
    assert torch.equal(out.view(fmt.int_dtype), values.view(fmt.int_dtype))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize(
    "num_values", [1, 7, 4096, ops.CHUNK_VALUES - 1, ops.CHUNK_VALUES + 1, 2 * ops.CHUNK_VALUES + 13]
)
def test_host_split_and_merge_equal_the_reference(fmt: FloatFormat, num_values: int) -> None:
    values = random_values(1, num_values, fmt, num_values)
    expected_exponents, expected_remainder = split_planes(values, fmt)
    words = fmt.words(values[0])
    for chunk_values in (ops.CHUNK_VALUES, 1000):
        plane, exponents = (np.full(size + 1, 9, np.uint8) for size in (fmt.remainder_bytes(num_values), num_values))
        parts = [
            (chunk, part.copy()) for chunk, part in ops.split(words, fmt, plane[:-1], exponents[:-1], chunk_values)
        ]
        assert plane[-1] == exponents[-1] == 9
        assert np.array_equal(plane[:-1], expected_remainder[0].numpy())
        assert np.array_equal(exponents[:-1], expected_exponents[0].numpy())
        assert np.array_equal(np.concatenate([part for _, part in parts]), exponents[:-1])
        assert [chunk.stop for chunk, _ in parts] == [*range(chunk_values, num_values, chunk_values), num_values]
    alone = np.concatenate([part.copy() for _, part in ops.split(words, fmt)])
    assert np.array_equal(alone, exponents[:-1])
    plane_only = np.empty_like(plane[:-1])
    for _ in ops.split(words, fmt, plane_only, with_exponents=False):
        pass
    assert np.array_equal(plane_only, plane[:-1])
    out = np.zeros((1, num_values), words.dtype)
    merger = ops.Merger(fmt, num_values)
    for chunk in ops.chunks_of(num_values):
        merger.merge(exponents[None, chunk], plane[None, :-1], chunk, out[:, chunk])
    assert np.array_equal(out[0], words)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_host_merge_of_strided_rows_equals_the_reference(fmt: FloatFormat, rows: int) -> None:
    values = random_values(rows, 5003, fmt, rows)
    exponents, remainder = (plane.numpy() for plane in split_planes(values, fmt))
    wide = np.zeros((rows, 2, 5005), f"<u{fmt.item_bytes}")
    ops.merge_rows(np.pad(exponents, ((0, 0), (1, 2)))[:, 1:-2], np.pad(remainder, ((0, 0), (3, 1)))[:, 3:-1], fmt,
                   wide[:, 1, 1:-1])  # fmt: skip
    assert np.array_equal(wide[:, 1, 1:-1], fmt.words(values))
    assert not wide[:, 0].any() and not wide[:, 1, 0].any() and not wide[:, 1, -1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_host_split_of_every_16_bit_pattern(dtype: torch.dtype) -> None:
    fmt = FORMATS[dtype]
    words = np.arange(1 << 16, dtype="<u2")
    plane = np.empty(fmt.remainder_bytes(1 << 16), np.uint8)
    ((_, exponents),) = ops.split(words, fmt, plane)
    assert np.array_equal(exponents, (words >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1))
    out = np.empty((1, 1 << 16), "<u2")
    ops.merge_rows(exponents[None], plane[None], fmt, out)
    assert np.array_equal(out[0], words)


@pytest.mark.parametrize("block_size", [64, 512, 4096])
def test_host_hash_equals_the_reference(block_size: int) -> None:
    exponents = np.random.default_rng(0).integers(256, size=(23, block_size), dtype=np.uint8)
    hashes = np.empty((23, 2), np.uint64)
    hasher = ops.BlockHasher(block_size, 10)
    for blocks in ops.chunks_of(23, 10):
        hasher.add(exponents[blocks], hashes[blocks])
    hasher.finish(hashes)
    assert np.array_equal(hashes.view(np.int64), hash_blocks(torch.from_numpy(exponents)).numpy())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 50), st.integers(1, 8), st.integers(0, 2**32))
def test_host_packing_equals_the_reference(num_values: int, width_bits: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(1 << width_bits, size=(2, num_values), dtype=np.uint8)
    packed = ops.pack_bits(values, width_bits)
    assert np.array_equal(packed, pack_bits(torch.from_numpy(values), width_bits).numpy())
    assert np.array_equal(ops.unpack_bits(packed, num_values, width_bits), values)
    nibbles = values[0] & 15
    assert np.array_equal(ops.pack_nibbles(nibbles), pack_bits(torch.from_numpy(nibbles[None]), 4)[0].numpy())
    assert np.array_equal(ops.unpack_nibbles(ops.pack_nibbles(nibbles))[:num_values], nibbles)


def order(bits: int, width: int) -> int:
    """The rank of a bit pattern among the numbers, written apart: sign and magnitude -> two's complement."""
    magnitude = bits & ((1 << (width - 1)) - 1)
    return magnitude if bits >> (width - 1) == 0 else -1 - magnitude


@pytest.mark.parametrize("escape", [15, 255])
def test_moves_equal_plain_integers_and_wrap_around(escape: int) -> None:
    fmt = FORMATS[torch.bfloat16]
    rng = np.random.default_rng(0)
    last = np.concatenate([rng.integers(1 << 16, size=3000), np.full(5, 0x7FFF), np.full(5, 0xFFFF)]).astype("<u2")
    fresh = (last + rng.integers(-200, 200, size=len(last))).astype("<u2")
    fresh[::3] = rng.integers(1 << 16, size=len(fresh[::3]))
    fresh[1::7] = last[1::7]
    moves = ops.Moves(fmt, len(last), escape)
    symbols = moves.encode(fresh, last).copy()
    for symbol, one, before in zip(symbols.tolist(), fresh.tolist(), last.tolist(), strict=True):
        change = (order(one, 16) - order(before, 16) + (1 << 15)) % (1 << 16) - (1 << 15)
        assert symbol == min(escape, 2 * change if change >= 0 else -2 * change - 1)
    back = last.copy()
    moves.decode(back, symbols, back)
    assert np.array_equal(back[symbols < escape], fresh[symbols < escape])
    assert {0, 1, 2, escape} <= set(symbols.tolist())


@pytest.mark.parametrize("share", [0.0, 0.005, 0.05, 0.099, 0.5, 1.0])
@pytest.mark.parametrize("num_values", [1, 9, 5000])
def test_changes_are_found_whatever_their_share(share: float, num_values: int) -> None:
    rng = np.random.default_rng(0)
    finder = ops.ChangeFinder(num_values)
    for _ in range(3):  # one finder, many chunks: nothing of the last one may stay
        last = rng.integers(1 << 16, size=num_values).astype("<u2")
        mask = rng.random(num_values) < share
        assert finder.compare(last + mask, last) == mask.sum()
        assert np.array_equal(finder.positions(), np.flatnonzero(mask))
        assert np.array_equal(finder.bitmap(), np.packbits(mask, bitorder="little"))
        mask = rng.random(num_values) < share
        assert finder.load(np.packbits(mask, bitorder="little"), num_values) == mask.sum()
        assert np.array_equal(finder.positions(), np.flatnonzero(mask))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("num_values", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_small_and_large_values_are_counted_and_found(dtype: torch.dtype, num_values: int, share: float) -> None:
    fmt = FORMATS[dtype]
    generator = torch.Generator().manual_seed(num_values)
    boundary = 120 if fmt.exponent_bits == 8 else 8
    finder = ops.SizeFinder(fmt, 2000, boundary)
    finder.look_at(fmt.words(torch.zeros(2000, dtype=dtype)))  # what an earlier, longer look leaves must not count
    values = torch.randn(num_values, generator=generator).to(dtype) * 0.02
    exponents, _ = split_planes(values.view(1, -1), fmt)
    small = (exponents[0] < boundary).numpy()
    assert finder.look_at(fmt.words(values)) == small.sum()
    assert np.array_equal(finder.is_small(), small)
    picked = np.flatnonzero(torch.rand(num_values, generator=generator).numpy() < share)
    before = finder.num_small_before(picked)
    assert before.tolist() == [int(small[:position].sum()) for position in picked]
    small_ranks, large_ranks = before[small[picked]], (picked - before)[~small[picked]]
    small_positions, large_positions = finder.positions_of(small_ranks, large_ranks)
    assert sorted([*small_positions, *large_positions]) == picked.tolist()
    assert small[small_positions].all() and not small[large_positions].any()

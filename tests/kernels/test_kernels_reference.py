"""The torch reference of the kernels against plain Python integers written apart: worked examples, all bit patterns, ragged
lengths, lengths around a chunk.

test_host_build.py compares the host build with the reference, and takes the worked examples and values from here.
"""

from __future__ import annotations

import doctest
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_ciera.kernels import reference
from fsdp_ciera.kernels.changes import Among, Form, Received, Used
from fsdp_ciera.kernels.dispatch import Kernels
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.reference import CHUNK_VALUES, HASH_SEEDS, pack_bits, splitmix64, unpack_bits

MASK = (1 << 64) - 1
BF16, FP16, FP32 = (FORMATS[dtype] for dtype in (torch.bfloat16, torch.float16, torch.float32))
BYTE_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


# ---- values


def named(value: object) -> str:
    """What a test's parameter is called."""
    return value.name if isinstance(value, FloatFormat) else str(value)


def unsigned(values: torch.Tensor) -> list[int]:
    """The bit patterns of values or bytes, as Python integers."""
    width = 8 * values.element_size()
    return [number & ((1 << width) - 1) for number in values.view(BYTE_TYPES[values.element_size()]).tolist()]


def values_of(patterns: list[int], fmt: FloatFormat | None) -> torch.Tensor:
    """The inverse; without a format they are bytes."""
    if fmt is None:
        return torch.tensor(patterns, dtype=torch.uint8)
    width = 8 * fmt.item_bytes
    signed = [number - (number >> (width - 1) << width) for number in patterns]
    return torch.tensor(signed, dtype=fmt.int_dtype).view(fmt.dtype)


def special_patterns(fmt: FloatFormat) -> list[int]:
    """Both zeros, denormals, the least and the largest normal, infinities, quiet and signalling NaNs with payloads; +, -."""
    most = (1 << fmt.exponent_bits) - 1 << fmt.mantissa_bits
    quiet = 1 << (fmt.mantissa_bits - 1)
    magnitudes = [0, 1, 2, quiet, 2 * quiet - 1, 2 * quiet, most - 1, most, most + 1, most + quiet, most + quiet + 5,
                  most + 2 * quiet - 1]  # fmt: skip
    return [magnitude | sign << fmt.sign_bit for magnitude in magnitudes for sign in (0, 1)]


def random_values(num_values: int, fmt: FloatFormat | None, seed: int) -> torch.Tensor:
    """Random bit patterns, normally distributed values, and special ones, mixed; or random bytes."""
    generator = torch.Generator().manual_seed(seed)
    item_bytes = 1 if fmt is None else fmt.item_bytes
    raw = torch.randint(256, (num_values * item_bytes,), dtype=torch.uint8, generator=generator)
    if fmt is None:
        return raw
    kind = torch.randint(8, (num_values,), generator=generator)
    normal = (0.02 * torch.randn(num_values, generator=generator)).to(fmt.dtype).view(fmt.int_dtype)
    special = values_of(special_patterns(fmt), fmt).view(fmt.int_dtype)
    special = special[torch.randint(len(special), (num_values,), generator=generator)]
    bits = torch.where(kind < 4, raw.view(fmt.int_dtype), torch.where(kind < 7, normal, special))
    return bits.view(fmt.dtype)


def changed_values(last: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """A `share` of them moved: half of these by up to 12 patterns, some by up to 200, the others to anywhere."""
    generator = torch.Generator().manual_seed(seed + 1)
    bits = last.view(BYTE_TYPES[last.element_size()])
    raw = torch.randint(256, (bits.nbytes,), dtype=torch.uint8, generator=generator).view(bits.dtype)
    near, further = (torch.randint(-most, most + 1, bits.shape, generator=generator) for most in (12, 200))
    kind = torch.rand(bits.shape, generator=generator)
    moved = torch.where(
        kind < 0.5, bits + near.to(bits.dtype), torch.where(kind < 0.8, bits + further.to(bits.dtype), raw)
    )
    return torch.where(torch.rand(bits.shape, generator=generator) < share, moved, bits).view(last.dtype)


# ---- the kernels once more, in plain integers


def mix(word: int) -> int:
    """SplitMix64's finaliser."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def exponent(pattern: int, fmt: FloatFormat) -> int:
    """The exponent of a bit pattern."""
    return pattern >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1


def plain_hash(patterns: list[int], fmt: FloatFormat, block_size: int) -> list[list[int]]:
    """Of each block of values."""
    hashes = []
    for start in range(0, len(patterns), block_size):
        block = bytes(exponent(one, fmt) for one in patterns[start : start + block_size]).ljust(block_size, b"\0")
        words = [int.from_bytes(block[i : i + 8], "little") for i in range(0, block_size, 8)]
        hashes.append(
            [
                mix(sum(mix(w ^ (s + (j + 1) * 0x9E3779B97F4A7C15 & MASK)) for j, w in enumerate(words)) & MASK ^ s)
                for s in HASH_SEEDS
            ]
        )
    return hashes


def plain_checksum(row: bytes) -> int:
    """Of one row of bytes."""
    words = [int.from_bytes(row[i : i + 8], "little") for i in range(0, len(row), 8)]
    return mix(sum(mix(word ^ ((j + 1) * 0x9E3779B97F4A7C15 & MASK)) for j, word in enumerate(words)) & MASK)


def plain_pack(numbers: list[int], width: int) -> list[int]:
    """Numbers of `width` bits -> bytes, the first number lowest."""
    packed = sum(number << (k * width) for k, number in enumerate(numbers))
    return list(packed.to_bytes((len(numbers) * width + 7) // 8, "little"))


def plain_bitmap(flags: list[bool]) -> list[int]:
    """As `plain_pack` of width 1, in linear time."""
    return [sum(flag << k for k, flag in enumerate(flags[i : i + 8])) for i in range(0, len(flags), 8)]


def plain_planes(patterns: list[int], fmt: FloatFormat) -> tuple[list[int], list[int], list[int]]:
    """Exponents, low bytes, top bits."""
    low, top = [], []
    for pattern in patterns:
        mantissa, sign = pattern & (1 << fmt.mantissa_bits) - 1, pattern >> fmt.sign_bit
        remainder = mantissa << 1 | sign
        low += list(remainder.to_bytes(4, "little")[: fmt.low_bytes])
        top.append(remainder >> 8 * fmt.low_bytes)
    return [exponent(one, fmt) for one in patterns], low, plain_pack(top, fmt.top_bits)


def order(pattern: int, width: int) -> int:
    """The rank of a bit pattern among the numbers: sign and magnitude -> two's complement."""
    magnitude = pattern & ((1 << (width - 1)) - 1)
    return magnitude if pattern >> (width - 1) == 0 else -1 - magnitude


def plain_move(fresh: int, last: int, fmt: FloatFormat | None, escape: int) -> int:
    """The symbol of a change. Distances wrap around."""
    if fmt is None:
        return (fresh - last) % 256
    width = 8 * fmt.item_bytes
    distance = (order(fresh, width) - order(last, width) + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
    return min(escape, 2 * distance if distance >= 0 else -2 * distance - 1)


@dataclass
class PlainChanges:
    """What `find_changes` has to find, as lists; `of_small` and `of_large` are changed bits counted among each of the two."""

    changed: list[bool]
    small: list[bool]
    small_moves: list[int]
    moves: list[int]
    literals: list[int]

    @property
    def of_small(self) -> list[bool]:
        """Of each small value, whether it changed."""
        return [flag for flag, small in zip(self.changed, self.small, strict=True) if small]

    @property
    def of_large(self) -> list[bool]:
        """Of each large value, whether it changed."""
        return [flag for flag, small in zip(self.changed, self.small, strict=True) if not small]

    def received(self, fmt: FloatFormat | None, form: Form) -> Received:
        """What the receiver has of it."""
        bits, small_bits = (
            torch.tensor(plain_bitmap(one), dtype=torch.uint8) for one in (self.of_large, self.of_small)
        )
        literals = values_of(self.literals, fmt)
        return Received(
            form,
            None if form.everywhere else bits,
            small_bits if form.boundary else None,
            torch.tensor(self.small_moves, dtype=torch.uint8),
            torch.tensor(self.moves, dtype=torch.uint8),
            literals if fmt is None else literals.view(fmt.int_dtype),
        )

    def used(self) -> Used:
        """All of it."""
        return Used(sum(self.small), len(self.small_moves), len(self.moves), len(self.literals))


def plain_changes(fresh: list[int], last: list[int], fmt: FloatFormat | None, form: Form) -> PlainChanges:
    """`find_changes` a value at a time."""
    found = PlainChanges([], [], [], [], [])
    for start in range(0, len(fresh), CHUNK_VALUES):
        large_literals: list[int] = []
        for one, before in zip(fresh[start:][:CHUNK_VALUES], last[start:][:CHUNK_VALUES], strict=True):
            small = fmt is not None and exponent(before, fmt) < form.boundary
            found.small.append(small)
            found.changed.append(form.everywhere or one != before)
            if not found.changed[-1]:
                continue
            escape = form.small_escape if small else form.escape
            move = plain_move(one, before, fmt, escape)
            (found.small_moves if small else found.moves).append(move)
            if fmt is not None and move == escape:
                (found.literals if small else large_literals).append(one)
        found.literals += large_literals
    return found


def plain_gaps(positions: list[int]) -> list[int]:
    """The symbols of the gaps before each set bit."""
    gaps, last = [], -1
    for position in positions:
        escapes, rest = divmod(position - last - 1, 255)
        gaps += [255] * escapes + [rest]
        last = position
    return gaps


# ---- worked examples: the numbers of the docstrings and of native/*.cuh


def check_worked_examples(kernels: Kernels) -> None:
    """Each kernel's worked example."""
    values = torch.tensor([1.0, -2.0, 0.5, -0.0])
    for fmt, patterns, exponents in (
        (BF16, [0x3F80, 0xC000, 0x3F00, 0x8000], [127, 128, 126, 0]),
        (FP16, [0x3C00, 0xC000, 0x3800, 0x8000], [15, 16, 14, 0]),
    ):
        assert unsigned(values.to(fmt.dtype)) == patterns
        planes = [torch.full((size,), 9, dtype=torch.uint8) for size in (4, 4, packed_bytes(4, fmt.top_bits))]
        kernels.split_planes(values.to(fmt.dtype), fmt, *planes)
        assert [plane.tolist() for plane in planes] == [exponents, [0, 1, 0, 1], [0] * len(planes[2])]
        out = torch.full((4,), 7.0, dtype=fmt.dtype)
        kernels.merge_planes(*planes, fmt, out)  # type: ignore[call-arg]
        assert unsigned(out) == patterns

    hashes = kernels.hash_blocks(torch.cat([values, torch.zeros(4)]).bfloat16(), BF16, 8)
    assert [one & MASK for one in hashes[0].tolist()] == [0x6D9C5C8C2291EF39, 0xE55B79BFE0EBA6F6]
    assert kernels.hash_blocks(values.bfloat16(), BF16, 8).tolist() == hashes.tolist()

    sums = kernels.checksum(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8))
    assert [one & MASK for one in sums.tolist()] == [0xF16840C310650E2A]

    last = [0x3F80, 0xC000, 0x3F00, 0x0000]
    for replaced, moves, literals in ((0x8001, [2, 3], []), (0x3F80, [2, 15], [0x3F80])):
        fresh = [0x3F81, 0xC000, 0x3F00, replaced]
        before = values_of(last, BF16)
        found = kernels.find_changes(values_of(fresh, BF16), before, BF16, Form(escape=15))
        assert unsigned(before) == last
        assert found.changed is not None and found.changed.tolist() == [0b1001]
        assert found.small is None and found.num_small == 0 == len(found.small_moves)
        assert (found.moves.tolist(), unsigned(found.literals)) == (moves, literals)
        row, out = values_of(last, BF16), values_of([0] * 4, BF16)
        received = Received(Form(escape=15), found.changed, None, found.small_moves, found.moves, found.literals)
        assert kernels.apply_changes(row, BF16, received, out) == Used(0, 0, 2, len(literals))
        assert unsigned(row) == unsigned(out) == fresh

    bits, among = (torch.tensor([bitmap], dtype=torch.uint8) for bitmap in (0b1101, 0b1001))
    for flip, expected in ((False, 0b11), (True, 0b10)):
        assert kernels.gather_bits(bits, 4, Among(among, flip)).tolist() == [expected]
        assert kernels.gaps_of_bits(bits, 4, Among(among, flip)).tolist() == ([1] if flip else [0, 0])
    assert kernels.count_bits(bits, 4) == 3

    marked = pack_bits(torch.zeros(400, dtype=torch.uint8).index_fill_(0, torch.tensor([2, 3, 300]), 1), 1)
    gaps = kernels.gaps_of_bits(marked, 400)
    assert gaps.tolist() == [2, 0, 255, 41]
    back = kernels.bits_of_gaps(gaps, 400)
    assert back is not None and torch.equal(back, marked)


def test_worked_examples() -> None:
    check_worked_examples(reference)
    assert pack_bits(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 3).tolist() == [209, 8]


def test_docstrings_of_the_reference() -> None:
    results = doctest.testmod(reference)
    assert results.attempted > 0 and results.failed == 0


# ---- hash and checksum


def test_splitmix64_gives_the_published_sequence() -> None:
    # the first outputs of SplitMix64 seeded with 0, as in the generator's published test vector
    gamma = 0x9E3779B97F4A7C15
    states = torch.tensor([(k * gamma & MASK) - ((k * gamma & MASK) >> 63 << 64) for k in (1, 2, 3)])
    assert [v & MASK for v in splitmix64(states).tolist()] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip
    assert [v & MASK for v in splitmix64(torch.tensor([0, 1, -1])).tolist()] == [0, 0x5692161D100B05E5, mix(MASK)]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=named)
@pytest.mark.parametrize("block_size", [8, 24, 64, 512, 1024])
@pytest.mark.parametrize("num_values", [0, 1, 63, 1024, 3 * 1024 + 5])
def test_hash_equals_plain_integers(fmt: FloatFormat, block_size: int, num_values: int) -> None:
    values = random_values(num_values, fmt, block_size)
    hashes = reference.hash_blocks(values, fmt, block_size)
    assert hashes.shape == (-(-num_values // block_size), 2)
    assert [[v & MASK for v in row] for row in hashes.tolist()] == plain_hash(unsigned(values), fmt, block_size)


@pytest.mark.parametrize("block_size", [64, 3000, 2 * CHUNK_VALUES])
def test_hash_of_more_than_a_chunk(block_size: int) -> None:
    values = random_values(2 * CHUNK_VALUES + 77, BF16, 0)
    hashes = reference.hash_blocks(values, BF16, block_size)
    assert [[v & MASK for v in row] for row in hashes.tolist()] == plain_hash(unsigned(values), BF16, block_size)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=named)
def test_hash_sees_any_one_exponent_and_nothing_else(fmt: FloatFormat) -> None:
    base = values_of([0x1234] * 512, fmt).view(fmt.int_dtype)
    one_each = torch.eye(512, dtype=fmt.int_dtype).view(-1)
    base = base.repeat(512)
    hashes = reference.hash_blocks((base + (one_each << fmt.mantissa_bits)).view(fmt.dtype), fmt, 512)
    assert (hashes != reference.hash_blocks(base.view(fmt.dtype), fmt, 512)).all()
    assert len({tuple(row) for row in hashes.tolist()}) == 512
    mantissa_or_sign = (base ^ one_each) ^ (one_each << fmt.sign_bit)
    unchanged = reference.hash_blocks(mantissa_or_sign.view(fmt.dtype), fmt, 512)
    assert torch.equal(unchanged, reference.hash_blocks(base.view(fmt.dtype), fmt, 512))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**32))
def test_checksum_sees_every_changed_byte_and_every_swap(num_bytes: int, seed: int) -> None:
    data = random_values(num_bytes, None, seed).view(1, -1)
    changed = data.repeat(num_bytes, 1)
    changed[torch.arange(num_bytes), torch.arange(num_bytes)] += 1
    assert (reference.checksum(changed) != reference.checksum(data)).all()
    rolled = data.roll(8, dims=1)
    assert torch.equal(rolled, data) == bool(reference.checksum(rolled) == reference.checksum(data))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, 8, 13, 8 * CHUNK_VALUES, 8 * CHUNK_VALUES + 21])
def test_checksum_equals_plain_integers(rows: int, num_bytes: int) -> None:
    data = random_values(rows * num_bytes, None, num_bytes).view(rows, num_bytes)
    expected = [plain_checksum(bytes(row)) for row in data.tolist()]
    assert [one & MASK for one in reference.checksum(data).tolist()] == expected


@pytest.mark.parametrize(
    ("dtype", "first", "step"), [(torch.bfloat16, 3, 4), (torch.float16, 3, 4), (torch.float32, 1, 2)]
)
def test_checksum_sees_flipped_signs(dtype: torch.dtype, first: int, step: int) -> None:
    """The highest bit of a word weighs 2**63: in a sum of multiples of words an even number of such flips would cancel."""
    values = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    flipped = values.clone()
    flipped[:, first::step] *= -1
    assert reference.checksum(flipped) != reference.checksum(values)


def test_checksum_is_one_of_bytes_and_not_of_alignment_strides_or_dtype() -> None:
    data = random_values(2 * 100, None, 0)
    expected = reference.checksum(data[3:75].clone().view(1, -1))
    assert torch.equal(reference.checksum(data[3:75].view(1, -1)), expected)
    assert torch.equal(reference.checksum(data.view(2, 100)[:, 3:75])[:1], expected)
    for dtype in FORMATS:
        assert torch.equal(reference.checksum(data[3:75].clone().view(dtype).view(1, -1)), expected)


# ---- planes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 50), st.integers(1, 8), st.integers(0, 2**32))
def test_packed_bits_of_any_width(num_values: int, width_bits: int, seed: int) -> None:
    values = random_values(num_values, None, seed) & (1 << width_bits) - 1
    packed = pack_bits(values, width_bits)
    assert packed.tolist() == plain_pack(values.tolist(), width_bits)
    assert len(packed) == packed_bytes(num_values, width_bits)
    assert torch.equal(unpack_bits(packed, num_values, width_bits), values)


def check_planes(values: torch.Tensor, fmt: FloatFormat) -> None:
    """Split and merge against plain integers, all planes and one at a time, and nothing written beside them."""
    num_values, patterns = len(values), unsigned(values)
    expected = plain_planes(patterns, fmt)
    sizes = (num_values, num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits))
    assert sizes[1] + sizes[2] == fmt.remainder_bytes(num_values)
    for wanted in ((1, 1, 1), (1, 0, 0), (0, 1, 1), (1, 1, 0)):
        wide = [torch.full((size + 5,), 9, dtype=torch.uint8) for size in sizes]
        given = [plane[2 : size + 2] for plane, size in zip(wide, sizes, strict=True)]
        reference.split_planes(values, fmt, *(one if want else None for one, want in zip(given, wanted, strict=True)))
        for plane, want, numbers in zip(wide, wanted, expected, strict=True):
            inside = numbers if want else [9] * len(numbers)
            assert plane.tolist() == [9, 9, *inside, 9, 9, 9]
    exponents, low, top = (torch.tensor(numbers, dtype=torch.uint8) for numbers in expected)
    wide_out = values_of([9] * (num_values + 3), fmt)
    reference.merge_planes(exponents, low, top if fmt.top_bits else None, fmt, wide_out[1:-2])
    assert unsigned(wide_out) == [9, *patterns, 9, 9]


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=named)
def test_every_16_bit_pattern_survives(fmt: FloatFormat) -> None:
    check_planes(values_of(list(range(1 << 16)), fmt), fmt)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(FORMATS.values())), st.integers(0, 300), st.integers(0, 2**32))
def test_split_and_merge_of_any_length(fmt: FloatFormat, num_values: int, seed: int) -> None:
    check_planes(random_values(num_values, fmt, seed), fmt)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=named)
def test_split_and_merge_of_special_values(fmt: FloatFormat) -> None:
    check_planes(values_of(special_patterns(fmt), fmt), fmt)
    assert {0, (1 << fmt.exponent_bits) - 1} <= set(plain_planes(special_patterns(fmt), fmt)[0])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=named)
@pytest.mark.parametrize("num_values", [CHUNK_VALUES - 1, CHUNK_VALUES, CHUNK_VALUES + 1, 2 * CHUNK_VALUES + 13])
def test_planes_of_lengths_around_a_chunk(fmt: FloatFormat, num_values: int) -> None:
    """Against parts of them, which test_split_and_merge_of_any_length compares with plain integers."""
    values = random_values(num_values, fmt, num_values)
    exponents, low, top = planes = [
        torch.full((size,), 9, dtype=torch.uint8)
        for size in (num_values, num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits))
    ]
    reference.split_planes(values, fmt, *planes)
    for start in {0, 8 * 999, *range(CHUNK_VALUES - 304, num_values, CHUNK_VALUES)}:
        stop = min(start + 504, num_values)
        expected = plain_planes(unsigned(values[start:stop]), fmt)
        assert exponents[start:stop].tolist() == expected[0]
        assert low[start * fmt.low_bytes : stop * fmt.low_bytes].tolist() == expected[1]
        first = packed_bytes(start, fmt.top_bits)
        assert top[first : first + len(expected[2])].tolist() == expected[2]
    wide = torch.zeros(num_values + 3, dtype=fmt.int_dtype).view(fmt.dtype)
    reference.merge_planes(exponents, low, top, fmt, wide[1:-2])
    assert torch.equal(wide[1:-2].view(fmt.int_dtype), values.view(fmt.int_dtype))
    assert not wide[:1].view(fmt.int_dtype).any() and not wide[-2:].view(fmt.int_dtype).any()


# ---- changes


BOUNDARIES = {BF16: [0, 1, 119, 255], FP16: [0, 1, 9, 31], FP32: [0, 1, 119, 255], None: [0]}


def forms_of(fmt: FloatFormat | None) -> st.SearchStrategy[Form]:
    """All ways to write changes down that a codec may ask for."""
    escapes = st.sampled_from([15, 255])
    sparse = st.builds(Form, escapes, st.just(False), st.sampled_from(BOUNDARIES[fmt]), escapes)
    return st.one_of(sparse, st.builds(Form, escapes, st.just(True)))


def check_changes(fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat | None, form: Form) -> None:
    """Both ways against plain integers."""
    patterns, before = unsigned(fresh), unsigned(last)
    expected = plain_changes(patterns, before, fmt, form)
    found = reference.find_changes(fresh, last, fmt, form)
    assert (unsigned(fresh), unsigned(last)) == (patterns, before)
    assert (found.changed is None, found.small is None) == (form.everywhere, not form.boundary)
    assert found.changed is None or found.changed.tolist() == plain_bitmap(expected.changed)
    assert found.small is None or found.small.tolist() == plain_bitmap(expected.small)
    assert found.num_small == sum(expected.small)
    assert (found.small_moves.tolist(), found.moves.tolist()) == (expected.small_moves, expected.moves)
    assert unsigned(found.literals) == expected.literals
    assert found.small_moves.dtype == found.moves.dtype == torch.uint8
    received, integers = expected.received(fmt, form), BYTE_TYPES[last.element_size()]
    for out in (None, torch.zeros_like(last.view(integers))):
        row = last.clone()
        assert (
            reference.apply_changes(row, fmt, received, None if out is None else out.view(last.dtype))
            == expected.used()
        )
        assert torch.equal(row.view(integers), fresh.view(integers))
        assert out is None or torch.equal(out, fresh.view(integers))


@settings(max_examples=200, deadline=None)
@given(
    st.data(), st.sampled_from([*FORMATS.values(), None]), st.integers(0, 400), st.floats(0, 1), st.integers(0, 2**32)
)
def test_changes_equal_plain_integers(
    data: st.DataObject, fmt: FloatFormat | None, num_values: int, share: float, seed: int
) -> None:
    last = random_values(num_values, fmt, seed)
    check_changes(changed_values(last, share, seed), last, fmt, data.draw(forms_of(fmt)))


@pytest.mark.parametrize(
    ("form", "num_values"),
    [
        (Form(15), CHUNK_VALUES - 1),
        (Form(255, everywhere=True), CHUNK_VALUES + 1),
        (Form(15, boundary=119, small_escape=255), CHUNK_VALUES),
        (Form(255, boundary=119, small_escape=15), CHUNK_VALUES + 70),
    ],
    ids=named,
)
def test_changes_around_a_chunk(form: Form, num_values: int) -> None:
    last = random_values(num_values, BF16, num_values)
    check_changes(changed_values(last, 0.3, num_values), last, BF16, form)


def test_literals_of_small_values_come_first_in_each_chunk() -> None:
    fresh, last = (values_of([pattern] * 2 * CHUNK_VALUES, BF16) for pattern in (0x0000, 0x3F80))
    last[1::2] = 0  # small
    last[:4], last[CHUNK_VALUES : CHUNK_VALUES + 4] = (values_of([0x3F80, 0x0000] * 2, BF16) for _ in range(2))
    fresh.view(torch.int16).copy_(last.view(torch.int16))
    for start, first in ((0, 0x4000), (CHUNK_VALUES, 0x4004)):
        fresh[start : start + 4] = values_of([first, first + 1, first + 2, first + 3], BF16)
    found = reference.find_changes(fresh, last, BF16, Form(15, boundary=1, small_escape=15))
    assert unsigned(found.literals) == [0x4001, 0x4003, 0x4000, 0x4002, 0x4005, 0x4007, 0x4004, 0x4006]


@pytest.mark.parametrize("escape", [15, 255])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=named)
def test_moves_of_special_values_and_around_the_end(fmt: FloatFormat, escape: int) -> None:
    """The largest pattern of either sign is next to the other: distances wrap around."""
    specials, width = special_patterns(fmt), 8 * fmt.item_bytes
    pairs = [(one, other) for one in specials for other in specials]
    pairs += [((one + step) % (1 << width), one) for one in specials for step in range(-130, 131)]
    fresh, last = (values_of([pair[k] for pair in pairs], fmt) for k in (0, 1))
    check_changes(fresh, last, fmt, Form(escape, everywhere=True))
    check_changes(fresh, last, fmt, Form(escape))
    ends = (1 << (width - 1)) - 1, (1 << width) - 1
    assert plain_move(*ends, fmt, escape) == 1 and plain_move(*ends[::-1], fmt, escape) == 2
    there, back = (values_of([*one], fmt) for one in (ends, ends[::-1]))
    moves = reference.find_changes(there, back, fmt, Form(escape)).moves
    assert moves.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("fmt", "step"), [(BF16, 1), (BF16, -8), (BF16, 1 << 15), (FP16, 127), (FP16, -128)], ids=named
)
def test_every_16_bit_pattern_moves(fmt: FloatFormat, step: int) -> None:
    last = values_of(list(range(1 << 16)), fmt)
    fresh = values_of([(pattern + step) % (1 << 16) for pattern in range(1 << 16)], fmt)
    check_changes(fresh, last, fmt, Form(15 if step % 2 else 255))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=named)
def test_literals_may_come_as_values(fmt: FloatFormat) -> None:
    """value_delta decodes them into a tensor of the format's dtype."""
    last, form = random_values(300, fmt, 0), Form(15)
    fresh = changed_values(last, 0.5, 0)
    received = plain_changes(unsigned(fresh), unsigned(last), fmt, form).received(fmt, form)
    assert len(received.literals)
    as_values = Received(
        form, received.bits, None, received.small_moves, received.moves, received.literals.view(fmt.dtype)
    )
    reference.apply_changes(last, fmt, as_values)
    assert unsigned(last) == unsigned(fresh)


def test_bits_that_are_missing_or_lead_out_of_a_class_change_nothing() -> None:
    last = values_of([0x3F80] * 12 + [0] * 4, BF16)
    moves = torch.tensor([2, 2, 2], dtype=torch.uint8)
    bits, small_bits = torch.tensor([1], dtype=torch.uint8), torch.tensor([0b1100_0001], dtype=torch.uint8)
    form = Form(255, boundary=1)
    received = Received(form, bits, small_bits, moves, moves[:1], last[:0].view(torch.int16))
    assert reference.apply_changes(last, BF16, received) == Used(4, 1, 1, 0)
    assert unsigned(last) == [0x3F81] + [0x3F80] * 11 + [1, 0, 0, 0]
    none = moves[:0]
    received = Received(form, none, none, none, none, last[:0].view(torch.int16))
    before = unsigned(last)
    assert reference.apply_changes(last, BF16, received) == Used(4, 0, 0, 0)
    assert unsigned(last) == before


# ---- bitmaps


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2000), st.floats(0, 1), st.integers(0, 2**32))
@example(600, 0.002, 3)
def test_bitmaps_equal_plain_integers(num_values: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    flags, among = ((torch.rand(num_values, generator=generator) < one).tolist() for one in (share, 0.5))
    bits, chosen = (torch.tensor(plain_bitmap(one), dtype=torch.uint8) for one in (flags, among))
    assert reference.count_bits(bits, num_values) == sum(flags)
    for flip in (False, True):
        kept = [flag for flag, choose in zip(flags, among, strict=True) if choose != flip]
        assert reference.gather_bits(bits, num_values, Among(chosen, flip)).tolist() == plain_bitmap(kept)
        gaps_among = plain_gaps([position for position, flag in enumerate(kept) if flag])
        assert reference.gaps_of_bits(bits, num_values, Among(chosen, flip)).tolist() == gaps_among
    gaps = reference.gaps_of_bits(bits, num_values)
    assert gaps.tolist() == plain_gaps([position for position, flag in enumerate(flags) if flag])
    back = reference.bits_of_gaps(gaps, num_values)
    assert back is not None and torch.equal(back, bits)


def test_bits_behind_the_last_value_do_not_count() -> None:
    bits = torch.full((2,), 255, dtype=torch.uint8)
    assert reference.count_bits(bits, 11) == 11
    assert len(reference.gaps_of_bits(bits, 11)) == 11
    for flip, gathered in ((False, [255, 7]), (True, [])):
        assert reference.gather_bits(bits, 11, Among(bits, flip)).tolist() == gathered


BAD_GAPS = [
    ("one behind the last value", [10], 10),
    ("behind the last value after others", [3, 6], 10),
    ("far behind it", [255, 255, 255, 3], 10),
    ("an open gap", [3, 255], 400),
    ("nothing but an open gap", [255], 400),
    ("a value of none", [0], 0),
]


@pytest.mark.parametrize(("what_is_wrong", "gaps", "num_values"), BAD_GAPS, ids=[one[0] for one in BAD_GAPS])
def test_gaps_that_lead_out_are_refused(what_is_wrong: str, gaps: list[int], num_values: int) -> None:
    assert reference.bits_of_gaps(torch.tensor(gaps, dtype=torch.uint8), num_values) is None
    fitting = reference.bits_of_gaps(torch.tensor([*gaps, 0], dtype=torch.uint8), 2000)
    assert fitting is not None and len(fitting) == 250

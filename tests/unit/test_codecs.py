"""Codecs and wire format without a process group: one sender, several receivers, any sequence of changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from changes_of_values import FORMS, NAMES, changed, random_bits
from fsdp_ciera.backends.cpu import HostEncoded
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.codecs.sections import Coding, Form, SectionWriter
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.gather.layout import build_layout
from fsdp_ciera.gather.loopback import Loopback
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.heads import HEAD_BYTES
from fsdp_ciera.kernels.reference import CHUNK_VALUES, gaps_of_bits, pack_bits
from loops import data_bytes, gather, make_loop, sections_of


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(list(FORMATS)),
    sizes=st.lists(st.integers(0, 200), min_size=4, max_size=4).filter(any),
    codecs=st.lists(st.sampled_from(sorted(CODECS)), min_size=4, max_size=4),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    changes=st.lists(
        st.sampled_from(["nothing", "one", "some", "all", "one rank", "nudge", "forget"]), min_size=1, max_size=6
    ),
)
def test_any_mix_of_codecs_survives_any_changes(
    dtype: torch.dtype, sizes: list[int], codecs: list[str], world_size: int, seed: int, changes: list[str]
) -> None:
    num_values = sum(sizes)
    generator = torch.Generator().manual_seed(seed)
    layout = build_layout(NAMES, sizes, codecs, num_values, dtype)
    assert sum(run.num_values for run in layout.runs) == num_values
    loop = make_loop(layout, world_size)
    shards = random_bits((world_size, num_values), dtype, generator)
    gather(loop, shards)
    for change in changes:
        fresh = random_bits((world_size, num_values), dtype, generator)
        mask = torch.zeros(world_size, num_values, dtype=torch.bool)
        if change == "one" and num_values:
            mask[torch.arange(world_size), torch.randint(num_values, (world_size,), generator=generator)] = True
        elif change == "some":
            mask = torch.rand(mask.shape, generator=generator) < 0.01
        elif change == "all":
            mask[:] = True
        elif change == "one rank":
            mask[0] = True
        elif change == "nudge":  # a few units in the last place, as a training step does, across powers of two as well
            mask = torch.rand(mask.shape, generator=generator) < 0.1
            steps = torch.randint(-3, 4, shards.shape, generator=generator)
            fresh = (shards.view(FORMATS[dtype].int_dtype) + steps.to(FORMATS[dtype].int_dtype)).view(dtype)
        elif change == "forget":
            for channel in loop.channels:
                channel.forget()
        bits = FORMATS[dtype].int_dtype
        shards = torch.where(mask, fresh.view(bits), shards.view(bits)).view(dtype)
        gather(loop, shards)


@settings(max_examples=40, deadline=None)
@given(
    codecs=st.lists(st.sampled_from(["raw", "exponent_delta", "value_delta"]), min_size=4, max_size=4),
    seed=st.integers(0, 2**32),
    steps=st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.booleans()), min_size=2, max_size=5),
)
def test_decode_in_place(codecs: list[str], seed: int, steps: list[tuple[float, bool]]) -> None:
    """The output that a gather filled is the cache of the next one, which may get the same memory or another."""
    sizes, world_size = [100, 0, 333, 40], 3
    num_values = sum(sizes)
    generator = torch.Generator().manual_seed(seed)
    layout = build_layout(NAMES, sizes, codecs, num_values, torch.bfloat16)
    loop = make_loop(layout, world_size, in_place=True)
    shards = random_bits((world_size, num_values), torch.bfloat16, generator)
    outputs = [torch.zeros_like(shards) for _ in loop.channels]
    holds = "value_delta" in {run.codec for run in layout.runs}
    for share, is_elsewhere in [(1.0, False), *steps]:
        mask = torch.rand(shards.shape, generator=generator) < share
        shards = (shards.view(torch.int16) + mask.to(torch.int16)).view(torch.bfloat16)
        if is_elsewhere:
            outputs = [random_bits(tuple(shards.shape), torch.bfloat16, generator) for _ in outputs]
        loop.gather(list(shards), outputs)
        for channel, output in zip(loop.channels, outputs, strict=True):
            assert torch.equal(output.view(torch.int16), shards.view(torch.int16))
            assert (channel.held is output) == holds
            for codec in channel.codecs:
                assert getattr(codec, "_value_cache", output) is output
            others = sum(run.num_values for run in layout.runs if run.codec != "value_delta")
            assert channel.held_output_bytes == (2 * world_size * others if holds else 0)


@settings(max_examples=30, deadline=None)
@given(codec=st.sampled_from(sorted(CODECS)), seed=st.integers(0, 2**32), in_place=st.booleans())
def test_encode_twice(codec: str, seed: int, in_place: bool) -> None:
    """What is encoded and not sent changes nothing: the next payload goes on from the last gather."""
    generator = torch.Generator().manual_seed(seed)
    layout = build_layout(NAMES[:2], [300, 111], [codec, codec], 411, torch.bfloat16)
    loop = make_loop(layout, 3, in_place=in_place)
    shards = random_bits((3, 411), torch.bfloat16, generator)
    gather(loop, shards)
    for share in (0.0, 0.1, 1.0):
        for skipped in range(3):
            mask = torch.rand(shards.shape, generator=generator) < share
            shards = (shards.view(torch.int16) + mask.to(torch.int16)).view(torch.bfloat16)
            if skipped < 2:
                loop.announce(int(torch.randint(3, (), generator=generator)), shards[skipped])
        gather(loop, shards)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_a_repeat_gather_sends_sign_mantissa(dtype: torch.dtype, bits: int) -> None:
    num_values, block_size = 4096, 512
    layout = build_layout(NAMES[:1], [num_values], ["exponent_block"], num_values, dtype)
    loop = make_loop(layout, 2, block_size)
    shards = torch.randn(2, num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    gather(loop, shards)
    assert gather(loop, shards) == [num_values * bits // 8 + HEAD_BYTES + 2 * 8] * 2  # two empty sections


@pytest.mark.parametrize("dtype", FORMATS)
def test_value_delta_sends_nothing_when_nothing_changed(dtype: torch.dtype) -> None:
    layout = build_layout(NAMES[:2], [4096, 100], ["value_delta"] * 2, 4196, dtype)
    loop = make_loop(layout, 3)
    shards = torch.randn(3, 4196, generator=torch.Generator().manual_seed(0)).to(dtype)
    gather(loop, shards)
    assert gather(loop, shards) == [HEAD_BYTES] * 3
    shards[1, 7] = -shards[1, 7]
    sizes = gather(loop, shards)
    assert sizes[0] == sizes[2] == HEAD_BYTES
    assert HEAD_BYTES < sizes[1] < HEAD_BYTES + 2 * 7 * 8 + 8  # two runs of 7 sections, and a few bytes


@pytest.mark.parametrize(
    ("codec", "most_bits"), [("exponent_delta", 8.1), ("value_delta", 0.7), ("exponent_block", 11), ("entropy", 11)]
)
def test_bits_a_value_after_a_small_step(codec: str, most_bits: float) -> None:
    num_values = 200_000
    generator = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(2, num_values, generator=generator)
    loop = make_loop(build_layout(NAMES[:1], [num_values], [codec], num_values, torch.bfloat16), 2, 512)
    gather(loop, master.bfloat16())
    master += 3e-6 * torch.randn(2, num_values, generator=generator)
    assert 0.01 < 8 * gather(loop, master.bfloat16())[0] / num_values < most_bits


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_value_delta_is_taken_and_exact(dtype: torch.dtype, form: str) -> None:
    num_values = 20_000
    layout = build_layout(NAMES[:1], [num_values], ["value_delta"], num_values, dtype)
    loop = make_loop(layout, 2)
    shards = torch.randn(2, num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    gather(loop, shards)
    shards = torch.stack([changed(shard, form, seed) for seed, shard in enumerate(shards)])
    num_bytes, (boundary, small, _, where, moves, *_) = sections_of(loop, 0, shards[0])
    assert (len(boundary.data), bool(len(small.data))) == ((1, True) if "small" in form else (0, False))
    assert where.coding in FORMS[form][0]
    assert moves.coding in FORMS[form][1]
    assert len(where.data) <= num_values // 8
    sizes = gather(loop, shards)
    assert sizes[0] == num_bytes
    literals = num_values * dtype.itemsize
    assert sizes[0] < (1.01 * literals if form == "all replaced" else 0.9 * literals)
    assert gather(loop, shards) == [HEAD_BYTES] * 2


def decoded(loop: Loopback, writer: SectionWriter, message: str | None) -> torch.Tensor | None:
    """What rank 1 makes of rank 0's sections, 10 values; `None` when it refuses them with `message`, as it then must."""
    sender = loop.channels[0]
    plan = sender.payload_plan
    data = writer.written(1)
    entries = tuple(writer.entries)
    encoded = HostEncoded(data, entries, plan.sections_at + len(data), HEAD_BYTES)
    payload = loop.backend.payload(plan, encoded, encoded.num_bytes)
    settled = loop.settle_all(encoded.num_bytes)
    same = torch.zeros(1, dtype=torch.int64)
    loop.backend.stamp(payload, sender.name_of(settled[0]), same, same, encoded.payload_bytes)
    held = loop.channels[1].codecs[0]._value_cache  # type: ignore[attr-defined]
    output = torch.zeros_like(held)
    if message is None:
        loop.decode(1, payload.expand(2, -1), output)
        return output
    with pytest.raises(CieraDecodeError, match=message):
        loop.decode(1, payload.expand(2, -1), output)
    return None


@pytest.mark.parametrize(
    ("what_is_wrong", "num_literals", "moves", "message"),
    [
        ("nothing", 1, [0x21, 0x0F], None),
        ("a literal that no move asks for", 2, [0x21, 0x0F], "ask for 1 literals, and there are 2"),
        ("a move that asks for one too many", 0, [0x21, 0x0F], "ask for 1 literals, and there are 0"),
        ("half a byte behind the last move", 1, [0x21, 0x3F], "left over"),
        ("a move too few", 0, [0x21], "holds . symbols where . belong"),
        ("a move too many", 1, [0x21, 0x0F, 0x00], "holds . symbols where . belong"),
        ("more literals than values", 11, [0x21, 0x0F], "no number of literals"),
    ],
)
def test_moves_and_literals_must_fit_together(
    what_is_wrong: str, num_literals: int, moves: list[int], message: str | None
) -> None:
    loop = make_loop(build_layout(NAMES[:1], [10], ["value_delta"], 10, torch.bfloat16), 2)
    shards = torch.arange(20).view(2, 10).bfloat16()
    gather(loop, shards)
    writer = SectionWriter(np.zeros(100, np.uint8))
    for _ in range(3):
        writer.empty()
    writer.code_smallest([Form(np.array([2, 0, 3], np.uint8))])  # values 2, 3 and 7: -1 unit, +1 unit, literal
    writer.code_smallest([Form(np.array(moves, np.uint8), Coding.NIBBLES)])
    writer.code_smallest([Form(np.full(num_literals, 1, np.uint8))])
    writer.code_smallest([Form(np.full(num_literals, 127, np.uint8))])
    output = decoded(loop, writer, message)
    if output is None:
        return
    expected = shards[0].clone()
    expected.view(torch.int16)[2] -= 1
    expected.view(torch.int16)[3] += 1
    expected[7] = -1.0
    assert torch.equal(output[0], expected)


@pytest.mark.parametrize(
    ("what_is_wrong", "boundary", "small", "large", "message"),
    [
        ("nothing", [127], [0, 1], [5], None),  # values 0.5 and 0.25 are small, 1 to 8 are not
        ("no boundary", [], [0, 1], [5], "where none belong"),
        ("a boundary of no exponent", [0], [0, 1], [5], "no exponent between"),
        ("a boundary of two bytes", [127, 127], [0, 1], [5], "no exponent between"),
        ("a small value too many", [127], [0, 1, 2], [5], "holds 1 symbols where 2 belong"),
        ("a large value behind the last", [127], [0, 1], [8], "lie behind the last of 2 small"),
        ("fewer moves than small values", [127], [0], [5], "left over"),
    ],
)
def test_small_and_large_values_are_told_apart(
    what_is_wrong: str, boundary: list[int], small: list[int], large: list[int], message: str | None
) -> None:
    loop = make_loop(build_layout(NAMES[:1], [10], ["value_delta"], 10, torch.bfloat16), 2)
    shards = torch.tensor([1, 2, 0.5, 3, 4, 5, -0.25, 6, 7, 8]).bfloat16().repeat(2, 1)
    gather(loop, shards)
    writer = SectionWriter(np.zeros(150, np.uint8))
    writer.code_smallest([Form(np.array(boundary, np.uint8))])
    for positions, moves in ((small, [0x12]), (large, [0x01])):  # +1 and -1 unit; then -1
        mask = torch.zeros(max(positions) + 1, dtype=torch.uint8)
        mask[positions] = 1
        writer.code_smallest([Form(gaps_of_bits(pack_bits(mask, 1), len(mask)).numpy())])
        writer.code_smallest([Form(np.array(moves, np.uint8), Coding.NIBBLES)])
    writer.empty()
    writer.empty()
    output = decoded(loop, writer, message)
    if output is None:
        return
    moved = (output[0].view(torch.int16) - shards[0].view(torch.int16)).tolist()
    assert moved == [0, 0, 1, 0, 0, 0, 1, -1, 0, 0]  # the sixth pattern is negative: one unit down is one pattern up


@pytest.mark.parametrize("codec", ["exponent_delta", "exponent_block", "entropy", "raw"])
@pytest.mark.parametrize("form", FORMS)
def test_other_codecs_survive_the_same_changes(codec: str, form: str) -> None:
    loop = make_loop(build_layout(NAMES[:1], [20_000], [codec], 20_000, torch.float16), 2)
    shards = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0)).half()
    gather(loop, shards)
    gather(loop, torch.stack([changed(shard, form, seed) for seed, shard in enumerate(shards)]))


def test_exponent_delta_sends_all_changes_when_most_exponents_changed() -> None:
    layout = build_layout(NAMES[:1], [4000], ["exponent_delta"], 4000, torch.bfloat16)
    loop = make_loop(layout, 2)
    shards = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0)).bfloat16()
    gather(loop, shards)
    # every exponent up by one: changes have no entropy, exponents 2.5 bits
    _, (where, what) = sections_of(loop, 0, 2 * shards[0])
    assert where.coding == Coding.DENSE
    assert len(what.data) < 100
    gather(loop, 2 * shards)
    gather(loop, shards[:, torch.randperm(4000)])


@pytest.mark.rotating
@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("num_values", [CHUNK_VALUES - 1, CHUNK_VALUES + 1, 2 * CHUNK_VALUES + 300])
def test_runs_longer_than_a_chunk(codec: str, num_values: int) -> None:
    loop = make_loop(build_layout(NAMES[:1], [num_values], [codec], num_values, torch.bfloat16), 2, 512)
    shards = torch.randn(2, num_values, generator=torch.Generator().manual_seed(0)).bfloat16()
    gather(loop, shards)
    for form in FORMS:
        shards = torch.stack([changed(shard, form, seed) for seed, shard in enumerate(shards)])
        gather(loop, shards)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_strided_output_is_filled_and_nothing_else_is_touched(codec: str) -> None:
    loop = make_loop(build_layout(NAMES[:2], [700, 300], [codec, "raw"], 1000, torch.bfloat16), 3)
    shards = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(2):
        wide = [torch.full((3, 2, 1000), 7.0).bfloat16() for _ in shards]
        loop.gather(list(shards), [one[:, 1] for one in wide])
        for one in wide:
            assert torch.equal(one[:, 1], shards)
            assert bool((one[:, 0] == 7).all())
        shards = torch.stack([changed(shard, "few", seed) for seed, shard in enumerate(shards)])


@pytest.mark.parametrize("codec", sorted(name for name, codec in CODECS.items() if not codec.stateless))
@pytest.mark.parametrize("dtype", FORMATS)
def test_an_unchanged_shard_makes_empty_plain_sections(codec: str, dtype: torch.dtype) -> None:
    layout = build_layout(NAMES[:1], [3000], [codec], 3000, dtype)
    loop = make_loop(layout, 2)
    shards = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype).repeat(2, 1)
    gather(loop, shards)
    for _ in range(2):
        num_bytes, sections = sections_of(loop, 0, shards[0])
        assert [(section.coding, len(section.data)) for section in sections] == [(Coding.PLAIN, 0)] * len(sections)
        assert data_bytes(loop, num_bytes) == loop.channels[0].codecs[0].fixed_bytes
        announced = loop.channels[0].announced
        assert announced is not None and announced.encoded is not None
        assert int(announced.encoded.repeat_bytes) == num_bytes
        gather(loop, shards)


@pytest.mark.parametrize("padding", [0, 8, 64, 5000])
def test_a_payload_is_padded_with_zeros(padding: int) -> None:
    loop = make_loop(build_layout(NAMES[:1], [3000], ["entropy"], 3000, torch.bfloat16), 2)
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    num_bytes = loop.announce(0, values)
    loop.settle_all(num_bytes)
    plain = loop.take_payload(0, values)
    loop.announce(0, values)
    loop.settle_all(num_bytes + padding)
    padded = loop.take_payload(0, values)
    assert len(padded) == num_bytes + padding
    assert torch.equal(padded[:num_bytes], plain) and not padded[num_bytes:].any()


def test_every_pair_of_near_bf16_patterns_moves_exactly() -> None:
    old = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(5)
    new = old + torch.arange(-2, 3, dtype=torch.int16).repeat_interleave(1 << 16)
    loop = make_loop(build_layout(NAMES[:1], [len(old)], ["value_delta"], len(old), torch.bfloat16), 2)
    gather(loop, torch.stack([old, old]).view(torch.bfloat16))
    moved = old.clone()
    moved[::3] = new[::3]
    gather(loop, torch.stack([moved, old]).view(torch.bfloat16))
    far = moved.clone()
    far[::4] = ~far[::4]
    gather(loop, torch.stack([far, moved]).view(torch.bfloat16))


def test_one_changed_exponent_sends_one_block() -> None:
    layout = build_layout(NAMES[:1], [4096], ["exponent_block"], 4096, torch.bfloat16)
    loop = make_loop(layout, 2, 512)
    shards = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    gather(loop, shards)
    repeat = gather(loop, shards)
    shards[0, 700] *= 2
    sizes = gather(loop, shards)
    assert repeat[1] == sizes[1]
    assert 0 < sizes[0] - repeat[0] <= 512
    shards[0, 700] *= 1 + 2**-6  # only the mantissa
    assert gather(loop, shards) == repeat


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("dtype", FORMATS)
def test_cache_bytes_are_what_is_allocated(codec: str, dtype: torch.dtype) -> None:
    layout = build_layout(NAMES[:1], [5000], [codec], 5000, dtype)
    loop = make_loop(layout, 3, 512)
    channel = loop.channels[0]
    assert channel.cache_bytes == 0
    shards = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for form in ("few", "most", "all replaced"):
        gather(loop, shards)
        held = [value for value in vars(channel.codecs[0]).values() if isinstance(value, torch.Tensor | np.ndarray)]
        assert sum(one.nbytes for one in held) == channel.cache_bytes
        assert (channel.cache_bytes > 2 * 5000) == (not CODECS[codec].stateless)
        shards = torch.stack([changed(shard, form, seed) for seed, shard in enumerate(shards)])


def payload_of(loop: Loopback, values: torch.Tensor) -> torch.Tensor:
    loop.settle_all(loop.announce(0, values))
    return loop.take_payload(0, values)


def damaged_payloads() -> list[tuple[str, torch.Tensor, Loopback]]:
    layout = build_layout(NAMES[:1], [2000], ["exponent_block"], 2000, torch.float16)
    cases = []
    for name, where, value in (
        ("unknown coding", HEAD_BYTES + 15, 99),
        ("longer section than the payload", HEAD_BYTES + 9, 255),
        ("shorter section", HEAD_BYTES + 8, 1),
        ("section that ends before it begins", HEAD_BYTES + 9, 0),
        ("a changed bitmap", -1, 254),
        ("broken zstd magic", -2, 0),
        ("broken zstd size", -3, 77),
        ("cut off", 16, None),
        ("cut to nothing", 16, 0),
    ):
        loop = make_loop(layout, 2)
        good = payload_of(loop, torch.randn(2000, generator=torch.Generator().manual_seed(0)).half())
        bitmap_at = loop.channels[0].payload_plan.sections_at
        places = {-1: bitmap_at, -2: bitmap_at + 4, -3: bitmap_at + 4 + 5}
        bad = good.clone()
        if value is None:
            bad[where] -= 1
        else:
            bad[places.get(where, where)] = value
        if name == "cut to nothing":
            bad[16:24] = 0
        assert not torch.equal(bad, good), name
        cases.append((name, bad, loop))
    return cases


@pytest.mark.parametrize("index", range(9))
def test_damaged_payloads_are_refused(index: int) -> None:
    name, payload, loop = damaged_payloads()[index]
    loop.channels[1].codecs[0].prepare()
    with pytest.raises(CieraDecodeError):
        loop.decode(1, torch.stack([payload, payload]), torch.zeros(2, 2000).half())
    assert name


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.sampled_from([None, *FORMS]), st.integers(0, 2**32))
def test_random_damage_never_does_anything_but_raise_or_decode(codec: str, form: str | None, seed: int) -> None:
    layout = build_layout(NAMES[:2], [300, 300], [codec, "raw"], 600, torch.bfloat16)
    loop = make_loop(layout, 2)
    generator = torch.Generator().manual_seed(seed)
    shard = torch.randn(600, generator=generator).bfloat16()
    if form is not None:
        gather(loop, torch.stack([shard, shard]))
        shard[:300] = changed(shard[:300], form, seed)
    for its in loop.channels[1].codecs:
        its.prepare()
    payload = payload_of(loop, shard)
    plan = loop.channels[0].payload_plan
    position = int(torch.randint(len(payload), (), generator=generator))
    payload[position] ^= int(torch.randint(1, 256, (), generator=generator))
    output = torch.zeros(2, 600).bfloat16()
    try:
        loop.decode(1, torch.stack([payload, payload]), output)
    except CieraDecodeError:
        return
    is_of_values = any(at <= position < at + size for at, size in zip(plan.fixed_at, plan.fixed_bytes, strict=True))
    is_wrong = not torch.equal(output[0].view(torch.int16), shard.view(torch.int16))
    assert is_wrong or bool(loop.channels[1].damage) or not is_of_values


def test_layout_merges_neighbours_and_gives_up_on_unknown_sizes() -> None:
    layout = build_layout(NAMES, [10, 0, 5, 7], ["raw", "raw", "exponent_block", "exponent_block"], 22, torch.bfloat16)
    assert [(r.category, r.codec, r.start, r.stop) for r in layout.runs] == [
        ("attention", "raw", 0, 10), ("expert_ffn", "exponent_block", 10, 22),
    ]  # fmt: skip
    unknown = build_layout(NAMES, [10, 0, 5, 7], ["exponent_block"] * 4, 30, torch.bfloat16)
    assert [(r.category, r.codec, r.num_values) for r in unknown.runs] == [("other", "raw", 30)]

"""Codecs and wire format without a process group: one sender, several receivers, any sequence of changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ciera.codecs import CODECS
from fsdp_ciera.codecs.sections import Coding, Form, SectionWriter
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.gather.layout import Layout, build_layout
from fsdp_ciera.gather.lockstep import LockstepState
from fsdp_ciera.gather.payload import read_sections, write_table
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.reference import CHUNK_VALUES, gaps_of_bits, pack_bits

NAMES = ["self_attn.q_proj.weight", "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    raw = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def gather(states: list[LockstepState], shards: torch.Tensor, commit: bool = True) -> list[int]:
    """One gather among `states` in this process; checks every rank's output. Returns each rank's payload size."""
    encoded = [state.encode(shard) for state, shard in zip(states, shards, strict=True)]
    sizes = [one.num_bytes for one in encoded]
    payloads = torch.randint(256, (len(states), max(sizes)), dtype=torch.uint8)  # padding is not read
    for row, one in zip(payloads, encoded, strict=True):
        row[: one.num_bytes] = one.payload(one.num_bytes)
        assert sum(one.run_bytes) == one.num_bytes
    for state in states:
        output = torch.zeros_like(shards)
        output[state.rank] = shards[state.rank]
        state.prepare()
        state.decode(payloads, sizes, output)
        assert torch.equal(output.view(torch.uint8), shards.view(torch.uint8))
        state.commit(state.sequence + 1, ())
    return sizes


def make_states(layout: Layout, world_size: int, block_size: int = 64) -> list[LockstepState]:
    return [LockstepState(layout, block_size, world_size, rank) for rank in range(world_size)]


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
    states = make_states(layout, world_size)
    shards = random_bits((world_size, num_values), dtype, generator)
    gather(states, shards)
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
            for state in states:
                state.forget()
        bits = FORMATS[dtype].int_dtype
        shards = torch.where(mask, fresh.view(bits), shards.view(bits)).view(dtype)
        gather(states, shards)


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
    states = [LockstepState(layout, 64, world_size, rank, in_place=True) for rank in range(world_size)]
    shards = random_bits((world_size, num_values), torch.bfloat16, generator)
    outputs = [torch.zeros_like(shards) for _ in states]
    for share, is_elsewhere in [(1.0, False), *steps]:
        mask = torch.rand(shards.shape, generator=generator) < share
        nudged = (shards.view(torch.int16) + mask.to(torch.int16)).view(torch.bfloat16)
        shards = nudged
        encoded = [state.encode(shard) for state, shard in zip(states, shards, strict=True)]
        sizes_sent = [one.num_bytes for one in encoded]
        payloads = torch.stack([one.payload(max(sizes_sent)).clone() for one in encoded])
        for rank, state in enumerate(states):
            if is_elsewhere:
                outputs[rank] = random_bits(tuple(shards.shape), torch.bfloat16, generator)
            outputs[rank][rank] = shards[rank]
            state.prepare()
            state.decode(payloads, sizes_sent, outputs[rank])
            assert torch.equal(outputs[rank].view(torch.int16), shards.view(torch.int16))
            state.commit(state.sequence + 1, ())
            assert (state.held is outputs[rank]) == ("value_delta" in {run.codec for run in layout.runs})
            for codec in state.codecs:
                assert getattr(codec, "_value_cache", None) is None


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_a_repeat_gather_sends_sign_mantissa_and_the_bitmap(dtype: torch.dtype, bits: int) -> None:
    num_values, block_size = 4096, 512
    layout = build_layout(NAMES[:1], [num_values], ["exponent_block"], num_values, dtype)
    states = make_states(layout, 2, block_size)
    shards = torch.randn(2, num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    gather(states, shards)
    table_entry_bytes = 8
    assert gather(states, shards) == [num_values * bits // 8 + num_values // block_size // 8 + table_entry_bytes] * 2


@pytest.mark.parametrize("dtype", FORMATS)
def test_value_delta_sends_nothing_when_nothing_changed(dtype: torch.dtype) -> None:
    layout = build_layout(NAMES[:2], [4096, 100], ["value_delta"] * 2, 4196, dtype)
    states = make_states(layout, 3)
    shards = torch.randn(3, 4196, generator=torch.Generator().manual_seed(0)).to(dtype)
    gather(states, shards)
    assert gather(states, shards) == [0, 0, 0]
    shards[1, 7] = -shards[1, 7]
    sizes = gather(states, shards)
    assert sizes[0] == sizes[2] == 0 < sizes[1] < 2 * 7 * 8 + 8  # two tables of 7 sections, and a few bytes


@pytest.mark.parametrize(
    ("codec", "most_bits"), [("exponent_delta", 8.1), ("value_delta", 0.7), ("exponent_block", 11), ("entropy", 11)]
)
def test_bits_a_value_after_a_small_step(codec: str, most_bits: float) -> None:
    num_values = 200_000
    generator = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(2, num_values, generator=generator)
    states = make_states(build_layout(NAMES[:1], [num_values], [codec], num_values, torch.bfloat16), 2, 512)
    gather(states, master.bfloat16())
    master += 3e-6 * torch.randn(2, num_values, generator=generator)
    assert 0.01 < 8 * gather(states, master.bfloat16())[0] / num_values < most_bits


FORMS = {
    # name: (codings of positions, codings of moves) that value_delta takes for it, of 20,000 values
    "few": ({Coding.PLAIN, Coding.ZSTD}, {Coding.NIBBLES, Coding.NIBBLES_ZSTD}),
    "many": ({Coding.BITMAP, Coding.BITMAP_ZSTD, Coding.ZSTD}, {Coding.NIBBLES_ZSTD}),
    "clusters": ({Coding.BITMAP_ZSTD}, {Coding.NIBBLES_ZSTD}),
    "most": ({Coding.DENSE}, {Coding.NIBBLES_ZSTD}),
    "far": ({Coding.DENSE}, {Coding.ZSTD}),
    "noisy": ({Coding.DENSE}, {Coding.PLAIN}),  # moves that zstd cannot shrink, and literals
    "some replaced": ({Coding.DENSE}, {Coding.NIBBLES_ZSTD, Coding.ZSTD}),
    "mostly small ones": ({Coding.ZSTD}, {Coding.NIBBLES_ZSTD}),
    "small ones far, large ones replaced": ({Coding.ZSTD}, {Coding.PLAIN, Coding.ZSTD, Coding.NIBBLES_ZSTD}),
    "few replaced": ({Coding.PLAIN, Coding.ZSTD}, {Coding.NIBBLES, Coding.NIBBLES_ZSTD, Coding.ZSTD}),
    "all replaced": ({Coding.ALL}, {Coding.PLAIN}),
}


def changed(shard: torch.Tensor, form: str, seed: int = 0) -> torch.Tensor:
    """`shard` after changes that make value_delta take a certain form."""
    dtype, num_values = shard.dtype, len(shard)
    generator = torch.Generator().manual_seed(1000 + seed)  # not the shard's own numbers
    bits = shard.view(FORMATS[dtype].int_dtype)
    draw = torch.rand(num_values, generator=generator)
    sign = torch.where(torch.rand(num_values, generator=generator) < 0.5, -1, 1).to(bits.dtype)
    noise = random_bits((num_values,), dtype, generator).view(bits.dtype)
    often_if_small = draw < torch.where(shard.float().abs() < 0.25, 0.8, 0.02)
    far = sign * torch.randint(1, 99, (num_values,), generator=generator).to(bits.dtype)
    fresh = {
        "mostly small ones": torch.where(often_if_small, bits + sign, bits),
        "small ones far, large ones replaced": torch.where(
            often_if_small, torch.where(shard.float().abs() < 0.25, bits + far, noise), bits
        ),
        "few": torch.where(draw < 0.01, bits + sign, bits),
        "many": torch.where(draw < 0.3, bits + sign, bits),
        "clusters": torch.where(torch.arange(num_values) % 512 < 150, bits + sign, bits),
        "most": torch.where(draw < 0.9, bits + sign, bits),
        "far": bits + sign * torch.randint(40, 80, (num_values,), generator=generator).to(bits.dtype),
        "noisy": torch.where(
            draw < 0.05, noise, bits + torch.randint(-127, 128, (num_values,), generator=generator).to(bits.dtype)
        ),
        "some replaced": torch.where(draw < 0.3, noise, bits + sign),
        "few replaced": torch.where(draw < 0.01, noise, bits),
        "all replaced": noise,
    }[form]
    return fresh.to(bits.dtype).view(dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_value_delta_is_taken_and_exact(dtype: torch.dtype, form: str) -> None:
    num_values = 20_000
    layout = build_layout(NAMES[:1], [num_values], ["value_delta"], num_values, dtype)
    states = make_states(layout, 2)
    shards = torch.randn(2, num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    gather(states, shards)
    shards = torch.stack([changed(shard, form, seed) for seed, shard in enumerate(shards)])
    spare = make_states(layout, 2)[0]  # sees the same values, so that its payload can be looked into
    spare.encode(torch.randn(2, num_values, generator=torch.Generator().manual_seed(0)).to(dtype)[0])
    encoded = spare.encode(shards[0])
    boundary, small, _, where, moves, *_ = read_sections(encoded.payload(encoded.num_bytes), 0, 7)
    assert (len(boundary.data), bool(len(small.data))) == ((1, True) if "small" in form else (0, False))
    assert where.coding in FORMS[form][0]
    assert moves.coding in FORMS[form][1]
    assert len(where.data) <= num_values // 8
    sizes = gather(states, shards)
    assert sizes[0] == encoded.num_bytes
    literals = num_values * dtype.itemsize
    assert sizes[0] < (1.01 * literals if form == "all replaced" else 0.9 * literals)
    assert gather(states, shards) == [0, 0]


def decoded(
    state: LockstepState, payload: np.ndarray[Any, Any], writer: SectionWriter, message: str | None
) -> torch.Tensor | None:
    """What rank 1 makes of rank 0's `payload`, 10 values; `None` when it refuses it with `message`, as it then must."""
    num_bytes = write_table(payload, 0, writer.entries)
    payloads, output = torch.from_numpy(payload[:num_bytes]).expand(2, -1), torch.zeros(2, 10).bfloat16()
    if message is None:
        state.decode(payloads, [num_bytes] * 2, output)
        return output
    with pytest.raises(CieraDecodeError, match=message):
        state.decode(payloads, [num_bytes] * 2, output)
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
    states = make_states(build_layout(NAMES[:1], [10], ["value_delta"], 10, torch.bfloat16), 2)
    shards = torch.arange(20).view(2, 10).bfloat16()
    gather(states, shards)
    payload = np.zeros(100, np.uint8)
    writer = SectionWriter(payload[56:])
    for _ in range(3):
        writer.empty()
    writer.code_smallest([Form(np.array([2, 0, 3], np.uint8))])  # values 2, 3 and 7: -1 unit, +1 unit, literal
    writer.code_smallest([Form(np.array(moves, np.uint8), Coding.NIBBLES)])
    writer.code_smallest([Form(np.full(num_literals, 1, np.uint8))])
    writer.code_smallest([Form(np.full(num_literals, 127, np.uint8))])
    output = decoded(states[1], payload, writer, message)
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
    states = make_states(build_layout(NAMES[:1], [10], ["value_delta"], 10, torch.bfloat16), 2)
    shards = torch.tensor([1, 2, 0.5, 3, 4, 5, -0.25, 6, 7, 8]).bfloat16().repeat(2, 1)
    gather(states, shards)
    payload = np.zeros(150, np.uint8)
    writer = SectionWriter(payload[56:])
    writer.code_smallest([Form(np.array(boundary, np.uint8))])
    for positions, moves in ((small, [0x12]), (large, [0x01])):  # +1 and -1 unit; then -1
        mask = torch.zeros(max(positions) + 1, dtype=torch.uint8)
        mask[positions] = 1
        writer.code_smallest([Form(gaps_of_bits(pack_bits(mask, 1), len(mask)).numpy())])
        writer.code_smallest([Form(np.array(moves, np.uint8), Coding.NIBBLES)])
    writer.empty()
    writer.empty()
    output = decoded(states[1], payload, writer, message)
    if output is None:
        return
    moved = (output[0].view(torch.int16) - shards[0].view(torch.int16)).tolist()
    assert moved == [0, 0, 1, 0, 0, 0, 1, -1, 0, 0]  # the sixth pattern is negative: one unit down is one pattern up


@pytest.mark.parametrize("codec", ["exponent_delta", "exponent_block", "entropy", "raw"])
@pytest.mark.parametrize("form", FORMS)
def test_other_codecs_survive_the_same_changes(codec: str, form: str) -> None:
    states = make_states(build_layout(NAMES[:1], [20_000], [codec], 20_000, torch.float16), 2)
    shards = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0)).half()
    gather(states, shards)
    gather(states, torch.stack([changed(shard, form, seed) for seed, shard in enumerate(shards)]))


def test_exponent_delta_sends_all_changes_when_most_exponents_changed() -> None:
    layout = build_layout(NAMES[:1], [4000], ["exponent_delta"], 4000, torch.bfloat16)
    states, spare = make_states(layout, 2), make_states(layout, 2)[0]
    shards = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0)).bfloat16()
    gather(states, shards)
    spare.encode(shards[0])
    encoded = spare.encode(2 * shards[0])  # every exponent up by one: changes have no entropy, exponents 2.5 bits
    where, what = read_sections(encoded.payload(encoded.num_bytes), 4000, 2)
    assert where.coding == Coding.DENSE
    assert len(what.data) < 100
    gather(states, 2 * shards)
    gather(states, shards[:, torch.randperm(4000)])


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("num_values", [CHUNK_VALUES - 1, CHUNK_VALUES + 1, 2 * CHUNK_VALUES + 300])
def test_runs_longer_than_a_chunk(codec: str, num_values: int) -> None:
    states = make_states(build_layout(NAMES[:1], [num_values], [codec], num_values, torch.bfloat16), 2, 512)
    shards = torch.randn(2, num_values, generator=torch.Generator().manual_seed(0)).bfloat16()
    gather(states, shards)
    for form in FORMS:
        shards = torch.stack([changed(shard, form, seed) for seed, shard in enumerate(shards)])
        gather(states, shards)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_strided_output_is_filled_and_nothing_else_is_touched(codec: str) -> None:
    states = make_states(build_layout(NAMES[:2], [700, 300], [codec, "raw"], 1000, torch.bfloat16), 3)
    shards = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(2):
        encoded = [state.encode(shard) for state, shard in zip(states, shards, strict=True)]
        sizes = [one.num_bytes for one in encoded]
        payloads = torch.stack([one.payload(max(sizes)) for one in encoded])
        wide = torch.full((3, 2, 1000), 7.0).bfloat16()
        states[1].prepare()
        states[1].decode(payloads, sizes, wide[:, 1])
        assert torch.equal(wide[::2, 1], shards[::2])
        assert bool((wide[:, 0] == 7).all()) and bool((wide[1] == 7).all())
        shards = torch.stack([changed(shard, "few", seed) for seed, shard in enumerate(shards)])


@pytest.mark.parametrize("codec", sorted(name for name, codec in CODECS.items() if not codec.stateless))
@pytest.mark.parametrize("dtype", FORMATS)
def test_an_unchanged_shard_makes_empty_plain_sections(codec: str, dtype: torch.dtype) -> None:
    layout = build_layout(NAMES[:1], [3000], [codec], 3000, dtype)
    state = make_states(layout, 2)[0]
    shard = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    state.encode(shard)
    for _ in range(2):
        encoded = state.encode(shard)
        fixed_bytes, num_sections = state.codecs[0].fixed_bytes, state.codecs[0].num_sections
        sections = read_sections(encoded.payload(encoded.num_bytes), fixed_bytes, num_sections)
        assert [(section.coding, len(section.data)) for section in sections] == [(Coding.PLAIN, 0)] * num_sections
        assert encoded.num_bytes == (0 if codec == "value_delta" else fixed_bytes + 8 * num_sections)


@pytest.mark.parametrize("padding", [0, 8, 64, 5000])
def test_a_payload_is_padded_with_zeros(padding: int) -> None:
    state = make_states(build_layout(NAMES[:1], [3000], ["entropy"], 3000, torch.bfloat16), 2)[0]
    encoded = state.encode(torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16())
    plain = encoded.payload(encoded.num_bytes).clone()
    marked = encoded.payload(encoded.num_bytes + padding)
    marked[encoded.num_bytes :] = 9  # what the exchange does with the room behind
    padded = encoded.payload(encoded.num_bytes + padding)
    assert len(padded) == encoded.num_bytes + padding
    assert torch.equal(padded[: encoded.num_bytes], plain) and not padded[encoded.num_bytes :].any()


def test_every_pair_of_near_bf16_patterns_moves_exactly() -> None:
    old = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(5)
    new = old + torch.arange(-2, 3, dtype=torch.int16).repeat_interleave(1 << 16)
    states = make_states(build_layout(NAMES[:1], [len(old)], ["value_delta"], len(old), torch.bfloat16), 2)
    gather(states, torch.stack([old, old]).view(torch.bfloat16))
    moved = old.clone()
    moved[::3] = new[::3]
    gather(states, torch.stack([moved, old]).view(torch.bfloat16))
    far = moved.clone()
    far[::4] = ~far[::4]
    gather(states, torch.stack([far, moved]).view(torch.bfloat16))


def test_one_changed_exponent_sends_one_block() -> None:
    layout = build_layout(NAMES[:1], [4096], ["exponent_block"], 4096, torch.bfloat16)
    states = make_states(layout, 2, 512)
    shards = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    gather(states, shards)
    repeat = gather(states, shards)
    shards[0, 700] *= 2
    sizes = gather(states, shards)
    assert repeat[1] == sizes[1]
    assert 0 < sizes[0] - repeat[0] <= 512
    shards[0, 700] *= 1 + 2**-6  # only the mantissa
    assert gather(states, shards) == repeat


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("dtype", FORMATS)
def test_cache_bytes_are_what_is_allocated(codec: str, dtype: torch.dtype) -> None:
    layout = build_layout(NAMES[:1], [5000], [codec], 5000, dtype)
    states = make_states(layout, 3, 512)
    assert states[0].cache_bytes == 0
    shards = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for form in ("few", "most", "all replaced"):
        gather(states, shards)
        held = [value for value in vars(states[0].codecs[0]).values() if isinstance(value, torch.Tensor | np.ndarray)]
        assert sum(one.nbytes for one in held) == states[0].cache_bytes
        assert (states[0].cache_bytes > 2 * 5000) == (not CODECS[codec].stateless)
        shards = torch.stack([changed(shard, form, seed) for seed, shard in enumerate(shards)])


def damaged_payloads() -> list[tuple[str, torch.Tensor, int, LockstepState]]:
    layout = build_layout(NAMES[:1], [2000], ["exponent_block"], 2000, torch.float16)
    sender, receiver = make_states(layout, 2)
    encoded = sender.encode(torch.randn(2000, generator=torch.Generator().manual_seed(0)).half())
    good = encoded.payload(encoded.num_bytes)
    table = sender.codecs[0].fixed_bytes
    cases = []
    for name, position, value in (
        ("unknown coding", table + 7, 9),
        ("longer section than the payload", table + 1, 255),
        ("shorter section", table, 1),
        ("a changed bitmap", 0, 254),
        ("broken zstd magic", table + 8, 0),
        ("broken zstd size", table + 8 + 5, 77),
    ):
        bad = good.clone()
        bad[position] = value
        assert not torch.equal(bad, good), name
        cases.append((name, bad, len(bad), receiver))
    cases.append(("cut off", good, len(good) - 1, receiver))
    cases.append(("cut to nothing", good, 0, receiver))
    return cases


@pytest.mark.parametrize("index", range(8))
def test_damaged_payloads_are_refused(index: int) -> None:
    name, payload, num_bytes, receiver = damaged_payloads()[index]
    receiver.prepare()
    output = torch.zeros(2, 2000).half()
    payloads = torch.stack([payload, payload])
    with pytest.raises(CieraDecodeError, match="payloads of ranks 0 to 0"):
        receiver.decode(payloads, [num_bytes, num_bytes], output)
    assert name


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.sampled_from([None, *FORMS]), st.integers(0, 2**32))
def test_random_damage_never_does_anything_but_raise_or_decode(codec: str, form: str | None, seed: int) -> None:
    layout = build_layout(NAMES[:2], [300, 300], [codec, "raw"], 600, torch.bfloat16)
    sender, receiver = states = make_states(layout, 2)
    generator = torch.Generator().manual_seed(seed)
    shard = torch.randn(600, generator=generator).bfloat16()
    if form is not None:
        gather(states, torch.stack([shard, shard]))
        shard[:300] = changed(shard[:300], form, seed)
    encoded = sender.encode(shard)
    payload = encoded.payload(encoded.num_bytes)
    fixed_bytes = sum(codec.fixed_bytes for codec in sender.codecs)
    position = int(torch.randint(len(payload), (), generator=generator))
    payload[position] ^= int(torch.randint(1, 256, (), generator=generator))
    output = torch.zeros(2, 600).bfloat16()
    receiver.prepare()
    try:
        receiver.decode(torch.stack([payload, payload]), [len(payload)] * 2, output)
    except CieraDecodeError:
        return
    assert not torch.equal(output[0].view(torch.int16), shard.view(torch.int16)) or position >= fixed_bytes


def test_layout_merges_neighbours_and_gives_up_on_unknown_sizes() -> None:
    layout = build_layout(NAMES, [10, 0, 5, 7], ["raw", "raw", "exponent_block", "exponent_block"], 22, torch.bfloat16)
    assert [(r.category, r.codec, r.start, r.stop) for r in layout.runs] == [
        ("attention", "raw", 0, 10), ("expert_ffn", "exponent_block", 10, 22),
    ]  # fmt: skip
    unknown = build_layout(NAMES, [10, 0, 5, 7], ["exponent_block"] * 4, 30, torch.bfloat16)
    assert [(r.category, r.codec, r.num_values) for r in unknown.runs] == [("other", "raw", 30)]

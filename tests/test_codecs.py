"""Codecs and wire format without a process group: one sender, several receivers, any sequence of changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ciera.codecs import CODECS, StoredSection
from fsdp_ciera.entropy import Coding, code_section, decode_section
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.layout import Layout, build_layout
from fsdp_ciera.lockstep import LockstepState
from fsdp_ciera.positions import code_positions, decode_positions
from fsdp_ciera.wire import payload_bytes, read_sections, write_payload

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
        write_payload(row, one.fixed, one.sections)
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
    assert sizes[0] == sizes[2] == 0 < sizes[1] < 100


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


def test_positions_worked_example() -> None:
    section = code_positions(torch.tensor([2, 3, 300]))
    assert isinstance(section.data, torch.Tensor)
    assert section.data.tolist() == [2, 0, 255, 41]
    assert decode_positions(StoredSection(section.coding, section.data.numpy()), 400).tolist() == [2, 3, 300]
    with pytest.raises(CieraDecodeError, match="ends at 300 of 300 values"):
        decode_positions(StoredSection(section.coding, section.data.numpy()), 300)


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


def test_cache_bytes_are_what_is_allocated() -> None:
    layout = build_layout(NAMES[:1], [5000], ["exponent_block"], 5000, torch.bfloat16)
    states = make_states(layout, 3, 512)
    assert states[0].cache_bytes == 0
    gather(states, torch.randn(3, 5000).bfloat16())
    codec = states[0].codecs[0]
    held = [value for value in vars(codec).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() * tensor.element_size() for tensor in held) == states[0].cache_bytes > 2 * 5000


@pytest.mark.parametrize(
    ("symbols", "width_bits", "coding"),
    [
        (torch.full((1000,), 7, dtype=torch.uint8), 8, Coding.ZSTD),
        (torch.arange(32, dtype=torch.uint8), 8, Coding.PLAIN),
        (torch.randint(256, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)), 8, Coding.PLAIN),
        (torch.randint(32, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)), 5, Coding.PACKED),
        (torch.empty(0, dtype=torch.uint8), 8, Coding.PLAIN),
    ],
)
def test_a_section_takes_its_smallest_form(symbols: torch.Tensor, width_bits: int, coding: Coding) -> None:
    section = code_section(symbols, width_bits)
    assert section.coding == coding
    assert section.num_bytes <= -(-len(symbols) * width_bits // 8)
    data = (
        section.data
        if isinstance(section.data, torch.Tensor)
        else torch.frombuffer(bytearray(section.data), dtype=torch.uint8)
    )
    assert torch.equal(decode_section(coding, data.numpy(), len(symbols), width_bits), symbols)


def damaged_payloads() -> list[tuple[str, torch.Tensor, int, LockstepState]]:
    layout = build_layout(NAMES[:1], [2000], ["exponent_block"], 2000, torch.float16)
    sender, receiver = make_states(layout, 2)
    encoded = sender.encode(torch.randn(2000, generator=torch.Generator().manual_seed(0)).half())
    good = torch.zeros(encoded.num_bytes, dtype=torch.uint8)
    write_payload(good, encoded.fixed, encoded.sections)
    table = encoded.fixed.numel()
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
@given(st.sampled_from(sorted(CODECS)), st.booleans(), st.integers(0, 2**32))
def test_random_damage_never_does_anything_but_raise_or_decode(codec: str, cold: bool, seed: int) -> None:
    layout = build_layout(NAMES[:2], [300, 300], [codec, "raw"], 600, torch.bfloat16)
    sender, receiver = states = make_states(layout, 2)
    generator = torch.Generator().manual_seed(seed)
    shard = torch.randn(600, generator=generator).bfloat16()
    if not cold:
        gather(states, torch.stack([shard, shard]))
        shard = (shard.view(torch.int16) + torch.randint(-1, 2, shard.shape, generator=generator).short()).view(
            torch.bfloat16
        )
    encoded = sender.encode(shard)
    payload = torch.zeros(encoded.num_bytes, dtype=torch.uint8)
    write_payload(payload, encoded.fixed, encoded.sections)
    position = int(torch.randint(len(payload), (), generator=generator))
    payload[position] ^= int(torch.randint(1, 256, (), generator=generator))
    output = torch.zeros(2, 600).bfloat16()
    receiver.prepare()
    try:
        receiver.decode(torch.stack([payload, payload]), [len(payload)] * 2, output)
    except CieraDecodeError:
        return
    assert not torch.equal(output[0].view(torch.int16), shard.view(torch.int16)) or position >= encoded.fixed.numel()


def test_table_and_sections_round_trip() -> None:
    sections = [code_section(torch.arange(10, dtype=torch.uint8)), code_section(torch.zeros(400, dtype=torch.uint8))]
    fixed = torch.arange(5, dtype=torch.uint8)
    payload = torch.zeros(payload_bytes(fixed, sections), dtype=torch.uint8)
    write_payload(payload, fixed, sections)
    stored = read_sections(payload, 5, 2)
    assert [section.coding for section in stored] == [Coding.PLAIN, Coding.ZSTD]
    assert [len(section.data) for section in stored] == [section.num_bytes for section in sections]


def test_layout_merges_neighbours_and_gives_up_on_unknown_sizes() -> None:
    layout = build_layout(NAMES, [10, 0, 5, 7], ["raw", "raw", "exponent_block", "exponent_block"], 22, torch.bfloat16)
    assert [(r.category, r.codec, r.start, r.stop) for r in layout.runs] == [
        ("attention", "raw", 0, 10), ("expert_ffn", "exponent_block", 10, 22),
    ]  # fmt: skip
    unknown = build_layout(NAMES, [10, 0, 5, 7], ["exponent_block"] * 4, 30, torch.bfloat16)
    assert [(r.category, r.codec, r.num_values) for r in unknown.runs] == [("other", "raw", 30)]

"""`Profiler` and what it counts, against plain references, hand-made changes of weights, and the live codecs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_ciera import CieraMismatchError, CieraPolicy, CieraPolicyError, Profile, Profiler, fully_shard, stats
from fsdp_ciera.backends.host_coder import NUM_SECTIONS
from fsdp_ciera.errors import CieraFileError
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat
from fsdp_ciera.kernels.heads import TABLE_ENTRY_BYTES
from fsdp_ciera.kernels.reference import CHUNK_VALUES, split_planes
from fsdp_ciera.policies.rates import BLOCK_SIZES, Rates
from fsdp_ciera.profiling.counts import SHARD_CUTS, CountLayout, ShardCounter
from fsdp_ciera.profiling.profile import ALL, merge_tables
from fsdp_ciera.profiling.trials import TRIED_CODECS, CodecTrials, TriedShard
from fsdp_ciera.testing import run_ranks

LAYOUT = CountLayout((*BLOCK_SIZES, 100), TRIED_CODECS)


# --- counting, against readable references


def distinct(flags: torch.Tensor, size: int) -> tuple[int, int]:
    """Stretches of `size` values that hold a flag, and all stretches."""
    stretches = [flags[start : start + size] for start in range(0, len(flags), size)]
    return sum(bool(one.any()) for one in stretches), len(stretches)


def zigzag_moves(before: torch.Tensor, after: torch.Tensor, fmt: FloatFormat) -> list[int]:
    """Moves in Python's integers."""
    width = 8 * fmt.item_bytes

    def order(bits: int) -> int:
        return -(bits & ((1 << (width - 1)) - 1)) - 1 if bits >> (width - 1) else bits

    def bits_of(values: torch.Tensor) -> list[int]:
        return [number & ((1 << width) - 1) for number in values.view(fmt.int_dtype).tolist()]

    moves = []
    for old, new in zip(bits_of(before), bits_of(after), strict=True):
        distance = (order(new) - order(old) + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
        moves.append(2 * distance if distance >= 0 else -2 * distance - 1)
    return moves


def exponents_of(values: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    exponents = torch.empty(len(values), dtype=torch.uint8)
    split_planes(values, fmt, exponents)
    return exponents


def expected_row(before: torch.Tensor, after: torch.Tensor, fmt: FloatFormat) -> np.ndarray[Any, Any]:
    row = np.zeros(LAYOUT.num_columns)
    exponents = [exponents_of(values, fmt) for values in (before, after)]
    crossed = exponents[0] != exponents[1]
    changed = before.view(fmt.int_dtype) != after.view(fmt.int_dtype)
    row[LAYOUT.values], row[LAYOUT.exponent_changes] = len(before), int(crossed.sum())
    row[LAYOUT.value_changes] = int(changed.sum())
    for index, size in enumerate(LAYOUT.block_sizes):
        found, total = distinct(crossed, size)
        row[LAYOUT.block_changes.start + index], row[LAYOUT.blocks.start + index] = found, total
    for index, cut in enumerate(SHARD_CUTS):
        found, total = distinct(crossed, -(-len(before) // cut))
        row[LAYOUT.shard_changes.start + index], row[LAYOUT.shards.start + index] = found, total
    row[LAYOUT.exponents] = np.bincount(exponents[1].numpy(), minlength=256)
    moves = np.minimum(zigzag_moves(before, after, fmt), 255)
    row[LAYOUT.moves] = np.bincount(moves, minlength=256)
    row[LAYOUT.escape_bits] = np.count_nonzero(moves == 255) * 8 * fmt.item_bytes
    return row


def random_words(fmt: FloatFormat, count: int, generator: torch.Generator) -> torch.Tensor:
    """Any bit pattern: NaNs, infinities, zeros and denormals among them."""
    width = 8 * fmt.item_bytes
    bits = torch.randint(-(1 << (width - 1)), 1 << (width - 1), (count,), generator=generator)
    return bits.to(fmt.int_dtype).view(fmt.dtype)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: str(fmt.dtype))
@pytest.mark.parametrize("share", [0.0, 0.003, 0.2, 1.0])
@pytest.mark.parametrize("count", [1, 7, 64, 513, 2048, 5003])
def test_counts_are_exact(fmt: FloatFormat, share: float, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    before = random_words(fmt, count, generator)
    after = before.clone()
    near = torch.rand(count, generator=generator) < share
    after.view(fmt.int_dtype)[near] += torch.randint(-130, 130, (int(near.sum()),), generator=generator).to(
        fmt.int_dtype
    )
    far = torch.rand(count, generator=generator) < share / 4
    after[far] = random_words(fmt, int(far.sum()), generator)
    counter, row = ShardCounter(fmt, LAYOUT, kept_block_size=512), np.zeros(LAYOUT.num_columns)
    kept = fmt.words(before.clone())
    found = counter.count(after, kept, row, turn=0)
    expected = expected_row(before, after, fmt)
    np.testing.assert_array_equal(row, expected)
    assert found.num_values == expected[LAYOUT.value_changes].item()
    assert found.blocks == distinct(exponents_of(before, fmt) != exponents_of(after, fmt), 512)
    np.testing.assert_array_equal(kept, fmt.words(after))
    counter.count(after, kept, row, turn=1)
    assert row[LAYOUT.value_changes].item() == found.num_values  # the new bits were kept


@pytest.mark.parametrize("share", [0.001, 0.5])
def test_counts_across_chunks(share: float) -> None:
    fmt, count = FORMATS[torch.bfloat16], 2 * CHUNK_VALUES + 77
    generator = torch.Generator().manual_seed(3)
    before = torch.randn(count, generator=generator) * 0.02
    after = torch.where(torch.rand(count, generator=generator) < share, before * 1.02, before)
    counter, row = ShardCounter(fmt, LAYOUT, kept_block_size=512), np.zeros(LAYOUT.num_columns)
    kept = fmt.words(torch.zeros(count, dtype=torch.bfloat16))
    counter.keep(before, kept)
    np.testing.assert_array_equal(kept, fmt.words(before.to(torch.bfloat16)))
    counter.count(after, kept, row, turn=5)
    expected = expected_row(before.bfloat16(), after.bfloat16(), fmt)
    is_sampled = np.zeros(LAYOUT.num_columns, bool)
    is_sampled[LAYOUT.exponents] = True
    np.testing.assert_array_equal(row[~is_sampled], expected[~is_sampled])
    sampled, exact = row[LAYOUT.exponents], expected[LAYOUT.exponents]
    assert sampled.sum() == pytest.approx(count)
    assert LAYOUT.rates(row).exponent_entropy_bits == pytest.approx(
        LAYOUT.rates(expected).exponent_entropy_bits, abs=0.02
    )
    assert np.abs(sampled - exact).max() < 0.02 * count


def test_nothing_is_counted_of_an_empty_shard() -> None:
    fmt, row = FORMATS[torch.bfloat16], np.zeros(LAYOUT.num_columns)
    counter = ShardCounter(fmt, LAYOUT, 512)
    found = counter.count(torch.empty(0), fmt.words(torch.empty(0, dtype=torch.bfloat16)), row, 0)
    assert found.blocks == (0, 0) and not row.any()
    assert LAYOUT.rates(row) == Rates()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [13, CHUNK_VALUES, CHUNK_VALUES + 5])
def test_cast_is_what_fsdp_gathers(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values = random_words(FORMATS[torch.float32], count, generator)
    values[:9] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, float("inf"), -float("inf"), 65504.0, 65520.0, 1 + 2**-8])
    values[values.isnan()] = 1.0  # NaN becomes NaN, but not always of the same payload
    fmt = FORMATS[dtype]
    kept = fmt.words(torch.zeros(count, dtype=dtype))
    ShardCounter(fmt, LAYOUT, 512).keep(values, kept)
    np.testing.assert_array_equal(kept, fmt.words(values.to(dtype)))


def test_entropies_by_hand() -> None:
    row = np.zeros(LAYOUT.num_columns)
    row[LAYOUT.values] = 16
    row[LAYOUT.exponents.start + 3] = row[LAYOUT.exponents.start + 7] = 8
    row[LAYOUT.moves.start] = row[LAYOUT.moves.start + 2] = 4
    row[LAYOUT.moves.start + 1] = row[LAYOUT.moves.start + 255] = 4
    row[LAYOUT.escape_bits] = 4 * 16
    rates = LAYOUT.rates(row)
    assert rates.exponent_entropy_bits == 1.0
    assert rates.value_change_entropy_bits == 2.0 + 4.0


# --- a plain model


class Small(nn.Module):
    """Two matrices, a norm, a tied head, and parameters that cannot be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 16)
        self.mlp = nn.Linear(16, 128, bias=False)
        self.norm = nn.LayerNorm(16, bias=False)
        self.lm_head = nn.Linear(16, 8, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.precise = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        for parameter in (self.embed_tokens.weight, self.mlp.weight, self.norm.weight):
            parameter.data.fill_(1.5)


def double(parameter: torch.Tensor, *positions: int) -> None:
    """The exponents of these values change."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.detach().reshape(-1)[list(positions)] *= 2


def test_plain_model_by_hand() -> None:
    model = Small()
    model.norm.requires_grad_(False)
    profiler = Profiler(model, warmup_steps=0, dtype=torch.bfloat16)
    assert profiler.result().series == () and profiler.result().steps is None
    profiler.step()
    double(model.mlp.weight, 0, 65, 66, 1024)
    model.mlp.weight.data.view(-1)[2047] += 1e-2  # one step of bf16: a new value, the old exponent
    model.mlp.weight.data.view(-1)[5] += 1e-6  # lost in the cast
    double(model.lm_head.weight, 127)
    profiler.step()
    profiler.step()
    profile = profiler.result()
    assert profile.num_values == {"expert_ffn": 2048, "layer_norm": 16, "embedding": 128, "other": 3}
    assert profile.notes == ("steps is gathered in torch.int64 and was skipped",)
    assert (profile.world_size, profile.dtype, profile.steps, profile.num_steps) == (1, "bfloat16", (2, 3), 3)
    first, second = (look.rates for look in profile.series)
    assert first["expert_ffn"].exponent_change == 4 / 2048
    assert first["expert_ffn"].value_change == 5 / 2048
    assert dict(first["expert_ffn"].block_change) == {64: 3 / 32, 128: 2 / 16, 256: 2 / 8, 512: 2 / 4, 1024: 2 / 2}
    assert first["embedding"].value_change == 1 / 128
    assert first["layer_norm"].value_change == 0 and first["layer_norm"].rank_spread is None
    assert first[ALL].value_change == 6 / (2048 + 16 + 128 + 3)
    assert second[ALL].value_change == second[ALL].value_change_entropy_bits == 0
    assert profile.rates["expert_ffn"].exponent_change == 2 / 2048
    assert profile.shard_change["expert_ffn"] == {1: 1 / 2, 2: 2 / 4, 4: 2 / 8, 8: 2 / 16}
    assert profile.shard_change[ALL][1] == 2 / 8
    assert profile.distribution == {
        "expert_ffn": (2 / 8,),
        "layer_norm": (0.0,),
        "embedding": (1 / 2,),
        "other": (0.0,),
    }
    assert profile.check_seconds and profile.step_seconds and 0 < (profile.check_share or 0) < 1


def test_interval_and_warm_up() -> None:
    model = nn.ModuleDict({"mlp": nn.Linear(16, 16, bias=False)})
    weight = model["mlp"].weight
    weight.data.fill_(1.5)
    profiler = Profiler(model, interval=2, warmup_steps=3)
    for step in range(1, 10):
        double(weight, *range(step))
        profiler.step()
    profile = profiler.result()
    # Looks at 2, 4, 6, 8; the change between 2 and 4 has a step of the warm-up in it.
    assert [look.step for look in profile.series] == [4, 6, 8]
    assert [look.rates["expert_ffn"].value_change for look in profile.series] == [4 / 256, 6 / 256, 8 / 256]
    assert profile.steps == (5, 8) and profile.num_steps == 9
    assert profile.rates["expert_ffn"].value_change == 7 / 256
    assert profile.dtype == "float32" and profile.interval == 2
    half = profile.derived_check_share(4)
    assert half is not None and profile.check_share is not None and half < profile.check_share


def test_profile_survives_json() -> None:
    model = Small()
    profiler = Profiler(model, warmup_steps=1, dtype=torch.float16)
    for step in range(4):
        double(model.mlp.weight, step)
        profiler.step()
    profile = profiler.result()
    text = json.dumps(profile.to_json())
    assert Profile.from_json(json.loads(text)) == profile
    assert json.loads(text)["check_share"]["measured"] == profile.check_share
    assert Profiler(model).result().notes == ()
    unsupported = Profiler(model, interval=2)
    unsupported.step()
    unsupported.step()
    assert unsupported.result().notes[1] == "precise is gathered in torch.float64 and was skipped"
    empty = Profiler(model).result()
    assert Profile.from_json(json.loads(json.dumps(empty.to_json()))) == empty
    with pytest.raises(CieraFileError, match="this is no profile"):
        Profile.from_json({"model": "x"})


def test_wrong_arguments() -> None:
    model = Small()
    for arguments, message in (
        ({"interval": 0}, "interval=0 must be an int of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be an int of at least 0"),
        ({"block_sizes": ()}, "must hold at least one size"),
        ({"block_sizes": (64, True)}, "block_sizes=True must be an int"),
        ({"dtype": torch.int8}, r"dtype=torch.int8 is no dtype whose changes can be counted"),
    ):
        with pytest.raises(CieraPolicyError, match=message):
            Profiler(model, **arguments)  # type: ignore[arg-type]
    profiler = Profiler(model)
    profiler.step()
    model.mlp = nn.Linear(16, 4, bias=False)
    with pytest.raises(CieraPolicyError, match="make a new Profiler"):
        profiler.step()


def test_trials_go_round_all_values_of_each_category() -> None:
    trials, million = CodecTrials(), 1 << 20
    shards = [
        TriedShard("expert_ffn", 0, torch.bfloat16, 3 * million),
        TriedShard("expert_ffn", 0, torch.bfloat16, million + 5),  # a run with the one before
        TriedShard("attention", 0, torch.bfloat16, 100),
        TriedShard("expert_ffn", 1, torch.bfloat16, 17 * million),  # too long: three parts
        TriedShard("attention", 1, torch.bfloat16, 0),
        TriedShard("attention", 1, torch.float16, 50),
    ]
    trials.plan(shards)
    seen = [np.zeros(shard.num_values, int) for shard in shards]
    for look in range(16):
        parts = trials.next_parts()
        assert len(parts) == (2 if look % 4 == 0 else 0)
        for part in parts:
            assert part.num_values <= 8 * million
            assert {shards[index].category for index, _ in part.pieces} == {part.category}
            assert len({shards[index][1:3] for index, _ in part.pieces}) == 1
            for index, piece in part.pieces:
                assert piece.start % 1024 == 0
                seen[index][piece] += 1
    assert all((seen[index] == 1).all() for index in (0, 1, 3))
    assert (seen[2] == 2).all() and (seen[5] == 2).all()


# --- tables


def profile_with_rates() -> Profile:
    model = Small()
    profiler = Profiler(model, warmup_steps=0)
    for step in range(3):
        double(model.mlp.weight, step)
        profiler.step()
    return replace(profiler.result(), date="2026-01-02", notes=("a note",))


def test_tables_hold_what_policies_load() -> None:
    profile = profile_with_rates()
    table = profile.to_table("tiny", lr=1e-4, data="text", optimizer="AdamW", notes="short")
    assert json.loads(json.dumps(table)) == table
    entry = table.pop("entries")[0]
    assert table == {
        "format": 1,
        "name": "tiny",
        "model": "Small",
        "provenance": {
            "source": "measured by ciera profile",
            "data": "text",
            "date": "2026-01-02",
            "dtype": "float32",
            "world_size": 1,
            "optimizer": "AdamW",
            "notes": "short; a note",
        },
    }
    assert (entry["lr"], entry["steps"], entry["interval"]) == (1e-4, [2, 3], 1)
    assert list(entry["categories"]) == ["expert_ffn", "layer_norm", "embedding", ALL]
    assert Rates.from_json(entry["categories"]["expert_ffn"]) == profile.rates["expert_ffn"]
    with pytest.raises(CieraPolicyError, match="have no two looks after the warm-up"):
        replace(profile, steps=None).to_table("tiny", lr=1e-4)
    with pytest.raises(CieraPolicyError, match="lr=0 must be a positive number"):
        profile.to_table("tiny", lr=0)


def test_tables_merge_by_learning_rate() -> None:
    profile = profile_with_rates()
    low, high = (profile.to_table("tiny", lr=lr, data="text") for lr in (1e-5, 1e-4))
    merged = merge_tables(high, low)
    assert [entry["lr"] for entry in merged["entries"]] == [1e-5, 1e-4]
    assert merged["provenance"] == low["provenance"]
    later = replace(profile, steps=(2, 99), date="2026-02-03").to_table("new name", lr=1e-4, data="other text")
    merged = merge_tables(merged, later)
    assert merged["name"] == "new name" and [entry["steps"] for entry in merged["entries"]] == [[2, 3], [2, 99]]
    assert merged["provenance"]["notes"] == "a note; LR 1e-05: data text, date 2026-01-02"
    with pytest.raises(CieraFileError, match="cannot be merged"):
        merge_tables(low, {**low, "model": "another"})
    with pytest.raises(CieraFileError, match="format=2 is no table"):
        merge_tables(low, {**low, "format": 2})


# --- under FSDP2


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(16, 129, bias=False)  # 65 and 64 rows
        self.self_attn = nn.Linear(64, 32, bias=False)  # Shard(1): columns
        self.norm = nn.LayerNorm(1, bias=False)  # nothing on rank 1
        for parameter in self.parameters():
            parameter.data.fill_(1.5)


def shard(model: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> nn.Module:
    torch_fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
        shard_placement_fn=lambda p: Shard(1) if p.shape[0] == 32 else Shard(0),
    )
    return model


def profile_by_hand(rank: int, world_size: int, dtype: torch.dtype | None) -> Profile:
    model = shard(Sharded(), dtype)
    profiler = Profiler(model, warmup_steps=2)
    profiler.step()
    double(model.mlp.weight, *range(10))  # in the series only
    profiler.step()
    double(model.mlp.weight, 0, 1, 513)
    if rank == 0:
        double(model.mlp.weight, 2, 1039)
        double(model.norm.weight, 0)
    double(model.self_attn.weight, 100 * rank)
    profiler.step()
    with torch.no_grad():
        model.mlp.weight.to_local().view(-1)[7] += 1e-6
    profiler.step()
    return profiler.result()


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
def test_two_ranks_by_hand(dtype: torch.dtype | None) -> None:
    profile, other = run_ranks(profile_by_hand, 2, dtype)
    assert profile == other
    assert profile.dtype == ("bfloat16" if dtype else "float32") and profile.model == "Sharded"
    assert profile.world_size == 2 and profile.steps == (3, 4)
    assert profile.num_values == {"expert_ffn": 2064, "attention": 2048, "layer_norm": 1}
    warm, look, last = (one.rates for one in profile.series)
    assert warm["expert_ffn"].value_change == 20 / 2064
    assert look["expert_ffn"].exponent_change == look["expert_ffn"].value_change == 8 / 2064
    assert look["attention"].value_change == 2 / 2048
    assert look["layer_norm"].value_change == 1.0
    # blocks of 512 of 1040 and 1024 values: (0, 1, 2) of three, (0, 1) of two
    assert look["expert_ffn"].block_change[512] == 5 / 5
    assert look["expert_ffn"].block_change[64] == 5 / (17 + 16)
    assert look["expert_ffn"].rank_spread == 7 / 5.5  # of all that is gathered together: 7 and 4 changed values
    assert look["layer_norm"].rank_spread == look["expert_ffn"].rank_spread
    assert look[ALL].rank_spread == pytest.approx(look["expert_ffn"].rank_spread)
    # the last change is below a unit of bf16, and some units of fp32
    assert last[ALL].value_change == (0 if dtype else 2 / 4113)
    assert profile.rates["expert_ffn"].exponent_change == 4 / 2064
    assert profile.shard_change["expert_ffn"] == {2: 2 / 4, 4: 4 / 8, 8: 5 / 16, 16: 5 / 32}
    assert profile.shard_change["layer_norm"] == {2: 1 / 2, 4: 1 / 2, 8: 1 / 2, 16: 1 / 2}  # rank 1 has no shard
    assert profile.distribution == {"expert_ffn": (1 / 2, 1 / 2), "attention": (1 / 4, 1 / 4), "layer_norm": (1 / 2,)}


class One(nn.Module):
    def __init__(self, name: str = "mlp") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({name: nn.Linear(128, 512, bias=False)})
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[self.name](x)


def measured_and_sent(rank: int, world_size: int, codec: str) -> tuple[Profile, int]:
    """A profile, and the bytes that this rank sent of its shard in the gather after a change."""
    model = One()
    policy = CieraPolicy(codecs=(codec,), block_size=512)
    fully_shard(model, ciera_policy=policy, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    profiler = Profiler(model, warmup_steps=0)
    generator = torch.Generator().manual_seed(rank)
    sent = 0
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 128))
            model.reshard()
            before, sent = sent, stats(model).by_codec[codec].wire_bytes
            profiler.step()
            local = model.inner["mlp"].weight.to_local()
            local += 1e-4 * torch.randn(local.shape, generator=generator)
    return profiler.result(), sent - before


def measured_and_sent_by_all(rank: int, world_size: int) -> dict[str, tuple[Profile, int]]:
    return {codec: measured_and_sent(rank, world_size, codec) for codec in TRIED_CODECS}


def test_codecs_send_what_the_profile_says() -> None:
    first, second = run_ranks(measured_and_sent_by_all, 2)
    for codec in TRIED_CODECS:
        profile, sent = first[codec]
        bits = profile.series[-1].rates["expert_ffn"].codec_bits
        assert list(bits) == sorted(TRIED_CODECS)
        # section tables count with the groups that they belong to
        table_bytes = 2 * NUM_SECTIONS[codec] * TABLE_ENTRY_BYTES
        assert bits[codec] == 8 * (sent + second[codec][1] - table_bytes) / (128 * 512), codec


def different_names(rank: int, world_size: int) -> str:
    model = shard(One(f"mlp_{rank}"))
    with pytest.raises(CieraMismatchError, match="ranks 0 and 1 hold different parameters") as caught:
        Profiler(model).step()
    return str(caught.value)


def not_sharded(rank: int, world_size: int) -> None:
    model = shard(One())
    profiler = Profiler(model)
    model(torch.ones(1, 128))  # the root keeps its parameters until the backward pass
    with pytest.raises(CieraPolicyError, match=r"call Profiler.step\(\) right after optimizer.step\(\)"):
        profiler.step()
    model.reshard()
    profiler.step()


def plain_beside_a_process_group(rank: int, world_size: int) -> float | None:
    """Every rank may profile a model of its own, since nothing is communicated."""
    if rank:
        dist.barrier()
        return None
    model = Small()
    profiler = Profiler(model, warmup_steps=0)
    profiler.step()
    double(model.mlp.weight, 0)
    profiler.step()
    dist.barrier()
    return profiler.result().rates["expert_ffn"].value_change


def all_failures(rank: int, world_size: int) -> tuple[str, float | None]:
    text = different_names(rank, world_size)
    not_sharded(rank, world_size)
    return text, plain_beside_a_process_group(rank, world_size)


def test_what_ranks_can_get_wrong() -> None:
    (text, rate), (other_text, _) = run_ranks(all_failures, 2)
    assert text == other_text
    assert rate == 1 / 2048


def test_tried_parts_that_change_more_than_the_rest() -> None:
    """A tenth of the values was tried, and half of their changes happened there: bits a change, times all changes."""
    layout = CountLayout((512,), ("exponent_delta", "value_delta"))
    row = np.zeros(layout.num_columns)
    row[layout.values], row[layout.value_changes] = 1000, 40
    row[layout.codec_values], row[layout.codec_changes] = 100, 20
    row[layout.codec_bits] = (805, 100)
    assert layout.rates(row).codec_bits == {"exponent_delta": 8.05, "value_delta": pytest.approx(5 * 40 / 1000)}
    row[layout.codec_changes] = row[layout.codec_bits.start + 1] = 0
    assert layout.rates(row).codec_bits["value_delta"] == 0

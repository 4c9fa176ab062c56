"""The gain: links, codec costs, and the paper's formula on cases computed by hand."""

from __future__ import annotations

import json

import pytest
import torch

from fsdp_ciera.policies.costs import CodecCost, StageCost, change_of
from fsdp_ciera.policies.gain import ShardBytes, StepTraffic, paper_gain, paper_memory
from fsdp_ciera.policies.links import Link, fit_link, parse_link, slowest
from fsdp_ciera.policies.machines import MACHINES
from fsdp_ciera.policies.payloads import expected_payload
from fsdp_ciera.policies.rates import Rates


def test_the_papers_formula_by_hand() -> None:
    """1,000,000 bf16 values in blocks of 512: S = 2,000,000, S_e = S_sm = 1,000,000, 1954 blocks, a bitmap of 245 bytes."""
    shard = ShardBytes(N=1_000_000, b=16, b_e=8, B=512)
    assert (shard.S, shard.S_e, shard.S_sm, shard.S_b, shard.S_bm) == (2e6, 1e6, 1e6, 1954, 245)
    assert shard.payload(0.25) == 1e6 + 245 + 0.25e6
    link = Link(50e-6, 8e9)  # W = 4: Comm(n) = 50 us + 3 n / 8 GB/s
    assert link.seconds(2e6, 4) == pytest.approx(50e-6 + 750e-6)
    gain = paper_gain(lambda n: link.seconds(n, 4), shard, 0.25, T_hash=10e-6, T_cmp=20e-6, T_decmp=30e-6)
    # 800 us - (50 us + 3 x 1,250,245 / 8e9 s + 60 us)
    assert gain == pytest.approx(800e-6 - (50e-6 + 468.841875e-6 + 60e-6))
    overlapped = paper_gain(lambda n: link.seconds(n, 4), shard, 0.25, T_decmp=30e-6)
    assert overlapped - gain == pytest.approx(30e-6)
    assert paper_memory(shard, 4) == 3e6
    fast = Link(10e-6, 450e9)
    assert paper_gain(lambda n: fast.seconds(n, 4), shard, 0.8, T_decmp=30e-6) < 0


def test_fp16_and_fp32_have_the_exponents_that_they_have() -> None:
    assert ShardBytes(N=1000, b=16, b_e=5, B=512).S_e == 625
    assert ShardBytes(N=1000, b=16, b_e=5, B=512).S_sm == 1375
    assert ShardBytes(N=1000, b=32, b_e=8, B=512).S_sm == 3000


def test_the_gain_of_a_step_adds_the_first_gather_and_the_repeats() -> None:
    cost = CodecCost(
        hash=StageCost(per_value=1e-9),
        cmp=StageCost(fixed=1e-5, per_changed=1e-8),
        decmp=StageCost(fixed=2e-5, per_value=2e-9),
    )
    traffic = StepTraffic(
        num_values=100_000, raw_bytes=200_000, world_size=3, num_gathers=4, link=Link(1e-3, 1e8), overlap=False
    )
    # first: 2 x (200,000 - 20,000) / 1e8 s saved; repeats: 2 x 200,000 / 1e8 s, three times
    saved = 3.6e-3 + 3 * 4e-3
    encode = 100_000 * 1e-9 + 1e-5
    decode = 2 * 2e-5 + 200_000 * 2e-9
    spent = 4 * (encode + decode) + 100_000 * 0.1 * 1e-8
    assert traffic.gain(cost, 20_000, 0, 0.1) == pytest.approx(saved - spent)
    hidden = StepTraffic(**{**vars(traffic), "overlap": True})
    assert hidden.gain(cost, 20_000, 0, 0.1) == pytest.approx(saved - 4 * decode)
    alone = StepTraffic(**{**vars(traffic), "world_size": 1})
    assert alone.gain(cost, 20_000, 0, 0.1) == 0


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("8GB/s", Link(0, 8e9)),
        ("200Mbit/s", Link(0, 25e6)),
        ("200mbit", Link(0, 25e6)),
        ("1.5 GiB/s".replace(" ", ""), Link(0, 1.5 * 2**30)),
        ("25MB/s 2ms", Link(2e-3, 25e6)),
        ("100 Gbps".replace(" ", ""), Link(0, 12.5e9)),
    ],
)
def test_links_in_words(text: str, link: Link) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "fast", "8", "0GB/s", "8GB/s 2", "8GB/s -2ms", "8GB/s 2ms 3ms", "8parsec/s"])
def test_what_is_no_link_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="write a speed such as"):
        parse_link(text)


def test_a_fit_finds_latency_and_speed() -> None:
    link = Link(300e-6, 25e6)
    samples = [(size, link.seconds(size, 4)) for size in (256, 1 << 14, 1 << 17, 1 << 20)]
    found = fit_link(samples, 4)
    assert found.latency_seconds == pytest.approx(300e-6, rel=1e-6)
    assert found.bytes_per_second == pytest.approx(25e6, rel=1e-6)
    assert fit_link([(256, 1e-3), (512, 1e-3)], 2).latency_seconds >= 0  # nothing but latency
    assert fit_link([(1000, 1e-6), (2000, 3e-6)], 2).latency_seconds == 0  # never negative
    assert slowest([Link(1, 5), Link(2, 9)]) == Link(2, 5)
    assert link.seconds(0, 4) == link.seconds(100, 1) == 0


def test_costs_depend_on_what_their_codec_looks_at() -> None:
    rates = Rates(value_change=0.1, exponent_change=0.01, block_change={512: 0.4})
    assert [change_of(codec, rates, 512) for codec in ("value_delta", "exponent_delta", "exponent_block", "entropy")] == [
        0.1, 0.01, 0.4, 0.0,
    ]  # fmt: skip
    assert change_of("value_delta", Rates(), 512) == 1.0  # not known: everything
    cost = MACHINES["a100"]["value_delta"]
    assert CodecCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost
    with pytest.raises(ValueError, match="per_value=-1 must be a number of seconds"):
        StageCost(per_value=-1)


def test_payloads_by_hand() -> None:
    bf16 = torch.bfloat16
    rates = Rates(
        value_change=0.1, exponent_change=0.001, block_change={512: 0.25}, exponent_entropy_bits=2.6, rank_spread=1.5,
        value_change_entropy_bits=0.6,
    )  # fmt: skip
    assert expected_payload("raw", bf16, rates, 512) == (16, 16)
    assert expected_payload("entropy", bf16, rates, 512) == pytest.approx((10.6, 10.6))
    assert expected_payload("exponent_block", bf16, rates, 512) == pytest.approx(
        (8 + 1 / 512 + 0.25 * 2.6, 8 + 1 / 512)
    )
    assert expected_payload("value_delta", bf16, rates, 512) == pytest.approx((0.6 * 1.5, 0))
    first, repeat = expected_payload("exponent_delta", bf16, rates, 512)
    assert repeat == 8 and 8 < first < 8.03
    measured = Rates(codec_bits={"value_delta": 0.5, "exponent_delta": 8.02})
    assert expected_payload("value_delta", bf16, measured, 512) == (0.5, 0)
    assert expected_payload("exponent_delta", bf16, measured, 512) == (8.02, 8)
    assert expected_payload("value_delta", torch.float32, measured, 512) == (32, 0)  # nearly every fp32 value changes
    assert expected_payload("exponent_delta", torch.float16, Rates(), 512)[1] == 11
    assert expected_payload("value_delta", bf16, Rates(), 512) == (16, 0)  # not known counts as changed
    assert expected_payload("exponent_delta", torch.uint8, Rates(), 512) == (8, 8)


def test_block_sizes_between_and_beyond_those_that_were_measured() -> None:
    rates = Rates(block_change={128: 0.1, 512: 0.3})
    assert rates.block_change_at(512) == (0.3, False)
    between, stretched = rates.block_change_at(256)
    assert not stretched and 1 - between == pytest.approx((0.9 * 0.7) ** 0.5)
    beyond, stretched = rates.block_change_at(1024)
    assert stretched and beyond == pytest.approx(1 - 0.7**2)
    below, stretched = rates.block_change_at(64)
    assert stretched and below == pytest.approx(1 - 0.9**0.5)
    assert Rates().block_change_at(512) == (None, False)
    assert Rates(block_change={512: 1.0}).block_change_at(1024)[0] == pytest.approx(1.0)

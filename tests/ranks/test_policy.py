"""`CieraPolicy`, `fully_shard`, `attach` and `detach`: what they accept and what they say to the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ciera import (
    CieraConflictError,
    CieraPolicy,
    CieraPolicyError,
    attach,
    detach,
    fully_shard,
    stats,
)
from fsdp_ciera._compat import AllGather, check_torch_version, get_comm, is_default_comm, param_groups, set_comm
from fsdp_ciera.errors import UnsupportedTorchError
from fsdp_ciera.planning import CodecCost
from fsdp_ciera.testing import run_ranks
from fsdp_ciera.units import parse_bytes
from tiny_moe import PAPERS_CODEC, Case, build


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"codecs": ("zip",)}, "codecs has 'zip', which is not one of 'raw', 'entropy', 'exponent_block'"),
        ({"codecs": "raw"}, "codecs='raw' must be a tuple"),
        ({"codecs": ()}, "must be a tuple of names"),
        ({"codecs": ("raw", "entropy", "raw")}, "has 'raw' more than once"),
        ({"codecs": 5}, "codecs=5 must be a tuple of names"),
        ({"categories": 5}, "categories=5 must be a tuple of names"),
        ({"categories": ("experts",)}, "categories has 'experts', which is not one of 'expert_ffn'"),
        ({"categories": "expert_ffn"}, "must be a tuple of names"),
        ({"block_size": 100}, "block_size=100 must be a multiple of 8 from 64 to 4096"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": "512"}, "block_size='512'"),
        ({"block_size": True}, "block_size=True"),
        ({"cache_budget": "8 gigs"}, "cache_budget='8 gigs' is not a byte size: write a number and one of B, KB"),
        ({"cache_budget": -1}, "must not be negative"),
        ({"cache_budget": 1.5}, "cache_budget=1.5"),
        ({"verify": 0}, 'verify=0 must be None, "every" or an int of at least 1'),
        ({"verify": "always"}, "verify='always'"),
        ({"topology": "ring"}, "topology has 'ring', which is not one of 'flat'"),
        ({"cache_budget": 0.0}, "cache_budget=0.0 as a float is a share of free memory"),
        ({"cache_budget": True}, "cache_budget=True must be None"),
        ({"adapt_every": 0}, "adapt_every=0 must be an int of at least 1"),
        ({"adapt_every": 5, "codecs": ("raw",)}, "leaves nothing to choose: name several codecs"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be an int of at least 0"),
        ({"micro_batches": 0}, "micro_batches=0 must be an int of at least 1"),
        ({"learning_rate": 0}, "learning_rate=0 must be None or a number above 0"),
        ({"selection": "best"}, "selection has 'best', which is not one of 'knapsack', 'greedy'"),
        ({"tables": "olmoe"}, "tables='olmoe' must be one of olmoe-1b-7b, deepseek-moe-16b"),
        ({"tables": 5}, "tables=5 must be one of"),
        ({"link": "fast"}, "link='fast' is no link: write a speed such as"),
        ({"link": 8e9}, "link=8000000000.0 must be a Link"),
        ({"codec_costs": {"value_delta": CodecCost()}}, "codec_costs says nothing of 'exponent_delta'"),
        ({"codec_costs": 5}, "codec_costs=5 must map names of codecs to CodecCost"),
        ({"ranks_per_node": 8}, 'ranks_per_node=8 means nothing to a flat gather: add topology="hierarchical"'),
        ({"ranks_per_node": 0, "topology": "auto"}, "ranks_per_node=0 must be None or an int of at least 1"),
    ],
)
def test_a_field_that_is_not_allowed_says_what_is(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(CieraPolicyError) as caught:
        CieraPolicy(**fields)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_policy_is_frozen_keyword_only_and_comparable() -> None:
    assert CieraPolicy.paper() == CieraPolicy(codecs=("exponent_block", "raw"), block_size=512, selection="greedy")
    assert CieraPolicy.paper(block_size=64).block_size == 64
    assert CieraPolicy(codecs=["raw"]).codecs == ("raw",)  # type: ignore[arg-type]
    costs = {name: CodecCost() for name in CieraPolicy().codecs}
    assert len({CieraPolicy(codec_costs=costs), CieraPolicy(codec_costs=costs)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        CieraPolicy().block_size = 64  # type: ignore[misc]
    with pytest.raises(TypeError):
        CieraPolicy(("raw",))  # type: ignore[misc]


def test_byte_sizes() -> None:
    assert parse_bytes("8GiB") == 8 << 30
    assert parse_bytes("1.5 MB") == 1_500_000
    assert parse_bytes("100B") == 100
    assert CieraPolicy(cache_budget="9" * 400 + "GiB").cache_budget_bytes(0) == int("9" * 400) << 30


def test_codecs_are_offered_to_the_categories_that_are_opted_in() -> None:
    policy = CieraPolicy(codecs=("value_delta", "entropy"), categories=("expert_ffn",))
    assert policy.codecs_for("expert_ffn") == ("value_delta", "entropy")
    assert policy.codecs_for("attention") == ()
    assert CieraPolicy().codecs_for("other") == ("value_delta", "exponent_delta", "exponent_block", "entropy")


def test_unsupported_torch_is_one_clear_error() -> None:
    for supported in ("2.9.0", "2.13.0+cpu", "2.14.1", "2.15.0a0+git12"):
        check_torch_version(supported)
    with pytest.raises(
        UnsupportedTorchError, match=r"needs torch 2\.9 or newer .* but torch 2\.8\.0\+cu128 is installed"
    ):
        check_torch_version("2.8.0+cu128")


def surface(rank: int, world_size: int) -> None:
    policy = PAPERS_CODEC
    plain = nn.Linear(8, 8)
    assert fully_shard(plain) is plain
    assert isinstance(plain, FSDPModule)
    assert is_default_comm(get_comm(param_groups(plain)[0]))
    with pytest.raises(CieraConflictError, match="no module of FSDPLinear gathers through fsdp_ciera"):
        stats(plain)
    with pytest.raises(CieraPolicyError, match=r"already under FSDP2.*call fsdp_ciera.attach\(model, policy\)"):
        fully_shard(plain, ciera_policy=policy)
    with pytest.raises(CieraPolicyError, match=r"must be a fsdp_ciera\.CieraPolicy"):
        fully_shard(nn.Linear(8, 8), ciera_policy="paper")  # type: ignore[arg-type]
    with pytest.raises(CieraPolicyError, match="Linear holds no FSDP2 module: call fully_shard on it first"):
        attach(nn.Linear(8, 8), policy)

    with pytest.raises(CieraPolicyError, match="model=None must be the torch module"):
        attach(None, policy)  # type: ignore[arg-type]

    report = attach(plain, policy)
    assert (report.num_groups, report.world_size, report.modules) == (1, 2, ("FSDPLinear",))
    with pytest.raises(CieraConflictError, match=r"already has a CieraPolicy: call fsdp_ciera.detach\(model\) first"):
        attach(plain, policy)
    plain(torch.randn(2, 8))
    assert stats(plain).num_gathers == 1
    detach(plain)
    assert is_default_comm(get_comm(param_groups(plain)[0]))

    class Other(AllGather):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, *arguments: Any, **keywords: Any) -> None:
            return None

    foreign = torch_fully_shard(nn.Linear(8, 8))
    set_comm(param_groups(foreign)[0], Other())
    with pytest.raises(CieraConflictError, match="already has a custom all-gather, Other"):
        attach(foreign, policy)
    detach(foreign)
    assert isinstance(get_comm(param_groups(foreign)[0]), Other)

    pair = [nn.Linear(8, 8), nn.Linear(8, 8)]
    assert fully_shard(pair, ciera_policy=policy) is pair  # type: ignore[type-var]
    assert fully_shard.state(pair[0]) is torch_fully_shard.state(pair[0])
    model = nn.Sequential(*pair)
    fully_shard(model, ciera_policy=policy)
    model(torch.randn(2, 8))
    assert stats(model).num_gathers == 1  # one group for both, and none for the root


def test_public_surface() -> None:
    assert run_ranks(surface, 2) == [None, None]


def alone(rank: int, world_size: int) -> tuple[int, int, str]:
    model = build(Case(), PAPERS_CODEC)
    model(torch.arange(29)).backward()
    report = stats(model)
    return report.num_gathers, report.wire_bytes, str(report)


def test_one_rank_works_and_says_that_nothing_was_gathered() -> None:
    assert run_ranks(alone, 1) == [(0, 0, "fsdp_ciera: nothing was gathered (world_size is 1)")]


def state_dicts(rank: int, world_size: int) -> bool:
    with_ciera, without = build(Case(), PAPERS_CODEC), build(Case(), None)
    with_ciera(torch.arange(29)).backward()
    a, b = with_ciera.state_dict(), without.state_dict()
    return list(a) == list(b) and all(torch.equal(a[k].to_local(), b[k].to_local()) for k in a)


def test_state_dicts_do_not_know_about_us() -> None:
    assert run_ranks(state_dicts, 2) == [True, True]


class ToFloat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def unshard_first(rank: int, world_size: int) -> tuple[int, dict[str, int], int]:
    policy = CieraPolicy(codecs=("exponent_block",), categories=("attention",), cache_budget=6000)
    model = build(Case(), None)
    attach(model, policy)
    for layer in model.model.layers:
        layer.unshard()
        layer.reshard()
    num_plain = sum(stats(model).gathers_by_phase.values())
    model(torch.arange(29)).backward()
    report = stats(model)
    return num_plain, {key: value.raw_bytes for key, value in report.by_category.items()}, report.cache_bytes


def test_unshard_before_the_first_forward_decides_nothing() -> None:
    [(num_plain, by_category, cache_bytes), _] = run_ranks(unshard_first, 2)
    assert num_plain == 2
    assert by_category["attention"] > 0
    assert 0 < cache_bytes <= 6000


def mixed_dtypes(rank: int, world_size: int) -> tuple[list[str], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), ToFloat(), nn.Linear(8, 8))
    model[2].requires_grad_(False)
    fully_shard(model, ciera_policy=CieraPolicy(codecs=("exponent_block",), verify="every"))
    model(torch.randn(2, 8).bfloat16())
    model.unshard()
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(8, 8).bfloat16(), ToFloat(), nn.Linear(8, 8))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    report = stats(model)
    return report.notes, report.by_codec


def test_mixed_dtypes_go_raw_and_say_so() -> None:
    [(notes, by_codec), _] = run_ranks(mixed_dtypes, 2)
    assert ["mixed dtypes" in note for note in notes] == [True]
    assert by_codec["raw"].raw_bytes == by_codec["raw"].wire_bytes > 0

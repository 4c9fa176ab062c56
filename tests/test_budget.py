"""Which codec each shard gets: the choice within a budget, and the plans that ranks make with it."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdp_ciera import CieraPolicy, CieraStats, attach, stats
from fsdp_ciera._compat import get_comm, param_groups
from fsdp_ciera.collective import CieraAllGather
from fsdp_ciera.plan import GroupShape, choose_codecs, cost_bytes, spans_of
from fsdp_ciera.policies.budget import choose_within_budget
from fsdp_ciera.topology import Cut
from ranks import run_ranks
from tiny_moe import Case, build, compare_with_stock


def test_one_option_goes_to_the_largest_that_fit() -> None:
    costs = [[5], [9], [1], [4]]
    assert choose_within_budget(costs, None) == [0, 0, 0, 0]
    assert choose_within_budget(costs, 13) == [None, 0, None, 0]
    assert choose_within_budget(costs, 0) == [None] * 4
    assert choose_within_budget([[0], [9]], 0) == [0, None]
    assert choose_within_budget([], 5) == []


def test_later_options_go_to_those_left_over_with_what_is_left() -> None:
    # 9 + 4 of 14 are spent on the first option; 1 is left for the second, which one of the two others can have.
    assert choose_within_budget([[8, 1], [9, 1], [7, 1], [4, 1]], 14) == [1, 0, None, 0]
    assert choose_within_budget([[8, 2], [9, 1], [7, 1], [4, 1]], 14) == [None, 0, 1, 0]
    assert choose_within_budget([[8, 2, 0], [9, 1, 0], [7, 1, 0]], 10) == [2, 0, 1]
    assert choose_within_budget([[8, 1]], None) == [0]


def test_an_option_that_a_shard_cannot_take_is_skipped() -> None:
    assert choose_within_budget([[None, 3], [5, 3]], None) == [1, 0]
    assert choose_within_budget([[None, 3], [5, 3]], 5) == [None, 0]
    assert choose_within_budget([[None, None]], None) == [None]


@given(
    rows=st.lists(st.tuples(*[st.none() | st.integers(0, 50)] * 3), max_size=12),
    budget=st.none() | st.integers(0, 300),
)
def test_a_choice_is_allowed_fits_and_cannot_be_bettered_by_one_step(rows: list[Any], budget: int | None) -> None:
    choices = choose_within_budget(rows, budget)
    spent = sum(row[choice] for row, choice in zip(rows, choices, strict=True) if choice is not None)
    assert budget is None or spent <= budget
    for row, choice in zip(rows, choices, strict=True):
        assert choice is None or row[choice] is not None
        if choice is None:  # then nothing that it can take fits into what is left
            assert all(cost is None or (budget is not None and cost > budget - spent) for cost in row)
        elif budget is None:
            assert all(cost is None for cost in row[:choice])


def shape(dtype: torch.dtype, *sizes: int, policy: CieraPolicy) -> GroupShape:
    names = tuple(f"layers.{i}.mlp.experts.down_proj" for i in range(len(sizes)))
    return GroupShape(names, sizes, dtype, 2, spans_of([[0, 1]], policy))


def test_a_codec_that_does_not_know_the_dtype_is_skipped() -> None:
    policy = CieraPolicy(codecs=("value_delta", "raw"))
    plans = choose_codecs(
        [shape(torch.bfloat16, 10, policy=policy), shape(torch.uint8, 10, policy=policy)], policy, None
    )
    assert plans == [("value_delta",), ("raw",)]


def test_parts_that_nodes_cut_differently_cost_all_ranks_the_same() -> None:
    """12 ranks, 6 on a node, gathered in fours in backward: ranks 0 to 3 are in one node, 4 to 7 on two."""
    policy = CieraPolicy(codecs=("value_delta",), topology="hierarchical", ranks_per_node=6)
    whole = list(range(12))
    spans = {first: spans_of([whole, whole[first : first + 4]], policy) for first in (0, 4, 8)}
    assert [spans[first][1].cut for first in (0, 4, 8)] == [Cut(4), Cut(2, 2), Cut(4)]
    costs = {
        cost_bytes(GroupShape(("w",), (100,), torch.bfloat16, 12, its_spans), "value_delta", 100, policy)
        for its_spans in spans.values()
    }
    assert costs == {2 * 100 * 2 + 4 * 300 * 2}  # two nodes, and four ranks with three times as much


def planned_codecs(layer: nn.Module) -> tuple[str, ...] | None:
    comm = get_comm(param_groups(layer)[0])
    assert isinstance(comm, CieraAllGather)
    return comm.planned_codecs


def sibling_comes_late(rank: int, world_size: int) -> tuple[int, int, list[Any]]:
    """One layer has a policy and is gathered; then its sibling gets an equal one, with what is left of the budget."""
    policy = CieraPolicy(codecs=("value_delta", "exponent_block"), cache_budget=20_000, block_size=64)
    model = build(Case(), None)
    layers = list(model.model.layers)
    attach(layers[0], policy)
    model(torch.arange(29)).backward()
    planned, before = planned_codecs(layers[0]), stats(model).cache_bytes
    attach(layers[1], policy)
    model(torch.arange(29)).backward()
    assert planned_codecs(layers[0]) == planned
    return before, stats(model).cache_bytes, [planned_codecs(layer) for layer in layers]


def test_siblings_that_are_planned_keep_their_share() -> None:
    results = run_ranks(sibling_comes_late, 2)
    assert all(result == results[0] for result in results)  # the same plan on every rank
    before, after, (first, second) = results[0]
    assert set(first) == {"value_delta"}
    assert "raw" in second and "value_delta" in second
    assert 0 < before < after <= 20_000


def run_mixed(rank: int, world_size: int, case: Case, policy: CieraPolicy) -> tuple[CieraStats, set[str]]:
    report = compare_with_stock(rank, world_size, case, policy)
    model = build(case, policy)
    model(torch.arange(29)).backward()
    return report, set(planned_codecs(model.model.layers[1]) or ())


def test_one_gather_takes_several_codecs_within_the_budget() -> None:
    """The first layer's largest matrix takes most of the budget; the second layer has to make do with what is left."""
    policy = CieraPolicy(
        codecs=("value_delta", "exponent_block", "entropy"),
        cache_budget=10_500,
        block_size=64,
        categories=("expert_ffn", "layer_norm"),
    )
    for report, planned in run_ranks(run_mixed, 2, Case(operations=("train",) * 3), policy):
        assert planned == {"value_delta", "exponent_block", "entropy", "raw"}
        assert {codec for codec, amount in report.by_codec.items() if amount.raw_bytes} == planned
        assert 9_500 < report.cache_bytes <= 10_500

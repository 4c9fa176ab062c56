"""Cuts into nodes, and what the hierarchical gather says when nodes are not what they should be."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_ciera import CieraPolicy, stats
from fsdp_ciera.errors import CieraPeerError, CieraPolicyError
from fsdp_ciera.gather.channel import Channel
from fsdp_ciera.gather.topology import NODE_GROUPS, Cut, cut_of
from fsdp_ciera.testing import run_ranks
from tiny_moe import Case, build, compare_with_stock

PAIRS = CieraPolicy(codecs=("value_delta",), topology="hierarchical", ranks_per_node=2)


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "num_nodes", "in_node"),
    [
        (range(4), 2, 2, 2),
        (range(8), 4, 2, 4),
        (range(8), 2, 4, 2),
        (range(8), 3, 8, 1),  # uneven: 3, 3 and 2
        (range(3), 2, 3, 1),
        (range(4), 4, 4, 1),  # one node: nothing lies between nodes
        (range(4), 1, 4, 1),
        ([0, 2, 4, 6], 4, 2, 2),  # every second rank, as an HSDP mesh across nodes gives
        ([0, 4], 4, 2, 1),
        ([4, 5], 4, 2, 1),
        ([0, 1, 4, 5, 6, 7], 4, 6, 1),  # 2 ranks of one node, 4 of the other
    ],
)
def test_cuts(ranks: Any, ranks_per_node: int, num_nodes: int, in_node: int) -> None:
    for topology in ("hierarchical", "auto"):
        policy = CieraPolicy(topology=topology, ranks_per_node=ranks_per_node)
        assert cut_of(list(ranks), policy) == Cut(num_nodes, in_node)
    assert cut_of(list(ranks), CieraPolicy()) == Cut(len(ranks))


def test_the_node_size_comes_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cut_of(range(8), CieraPolicy(topology="auto")) == Cut(2, 4)
    assert cut_of(range(8), CieraPolicy(topology="auto", ranks_per_node=2)) == Cut(4, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    assert cut_of(range(8), CieraPolicy(topology="auto")) == Cut(8)


def bytes_and_caches(rank: int, world_size: int, policies: dict[str, CieraPolicy]) -> dict[str, Any]:
    case = Case(operations=("train", "train", "accumulate"))
    return {name: compare_with_stock(rank, world_size, case, policy) for name, policy in policies.items()}


def test_caches_shrink_and_repeat_gathers_stay_inside_the_node() -> None:
    flat = CieraPolicy(codecs=("value_delta",))
    reports = run_ranks(bytes_and_caches, 4, {"flat": flat, "pairs": PAIRS})[0]
    flat_stats, pairs = reports["flat"], reports["pairs"]
    assert set(flat_stats.by_link) == {"flat"}
    assert set(pairs.by_link) == {"between_nodes", "in_node"}
    assert pairs.cache_bytes * 2 == flat_stats.cache_bytes > 0
    for report in (flat_stats, pairs):
        assert sum(link.raw_bytes for link in report.by_link.values()) == report.raw_bytes == flat_stats.raw_bytes
        assert sum(link.wire_bytes for link in report.by_link.values()) == report.wire_bytes
    head_bytes = 32
    num_repeats = sum(n for phase, n in pairs.gathers_by_phase.items() if phase.startswith("repeat/"))
    repeats = sum(b.wire_bytes for phase, b in pairs.by_phase.items() if phase.startswith("repeat/"))
    raw = sum(b.raw_bytes for phase, b in pairs.by_phase.items() if phase.startswith("repeat/"))
    tail_bytes = 8 + 2 * 8  # how a rank fared, and two checksums, beside its column
    assert num_repeats == 2 + 2 + 7
    assert repeats == num_repeats * (head_bytes + tail_bytes) + raw * 2 // 3  # 2 of 3 peers' shards: in the node


def with_node_sizes(rank: int, world_size: int, sizes: list[str], policy: CieraPolicy) -> tuple[str, str]:
    os.environ["LOCAL_WORLD_SIZE"] = sizes[rank]
    try:
        build(Case(), policy)(torch.arange(29))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_ranks_that_disagree_about_nodes_all_hear_of_it() -> None:
    policy = CieraPolicy(topology="hierarchical")
    for name, text in run_ranks(with_node_sizes, 4, ["2", "2", "2", "1"], policy):
        assert name == CieraPolicyError.__name__
        assert "LOCAL_WORLD_SIZE is 1 to 2 (0: not set) on the ranks: give CieraPolicy(ranks_per_node=...)" in text


def test_nobody_knows_the_node_size() -> None:
    for name, text in run_ranks(with_node_sizes, 2, ["", ""], CieraPolicy(topology="hierarchical")):
        assert name == CieraPolicyError.__name__
        assert "LOCAL_WORLD_SIZE is not set: give CieraPolicy(ranks_per_node=...)" in text
    assert run_ranks(with_node_sizes, 2, ["", ""], CieraPolicy(topology="auto")) == [("", "")] * 2


def notes(rank: int, world_size: int) -> list[str]:
    model = build(Case(), PAIRS)
    model(torch.arange(29))
    return stats(model).notes


def test_a_group_that_is_not_cut_says_so() -> None:
    assert ["nodes of 2 ranks do not cut a group of 3 ranks" in note for note in run_ranks(notes, 3)[0]] == [True]


def failing_decode(rank: int, world_size: int) -> None:
    model = build(Case(), PAIRS)
    model(torch.arange(29)).backward()
    if rank == 3:

        def fail(*arguments: Any) -> None:
            raise MemoryError("no memory for the payload")

        Channel.decode = fail  # type: ignore[method-assign]
    model(torch.arange(29)).backward()


def test_a_rank_that_cannot_decode_tells_its_node() -> None:
    outcomes = run_ranks(failing_decode, 4, timeout_s=30, expect_failure=True)
    assert repr(outcomes[3]) == "MemoryError('no memory for the payload')"
    assert isinstance(outcomes[2], CieraPeerError)
    assert "ranks [3] of the group could not decode" in str(outcomes[2])


def remade(rank: int, world_size: int) -> int:
    compare_with_stock(rank, world_size, Case(operations=("train",)), PAIRS)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo")
    compare_with_stock(rank, world_size, Case(operations=("train", "train")), PAIRS)
    return len(NODE_GROUPS)


def test_process_groups_that_were_made_again_get_new_node_groups() -> None:
    assert run_ranks(remade, 4) == [1] * 4

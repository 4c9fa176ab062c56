"""Random sequences of what users do with a model: the bits of stock FSDP2 after each, in every codec and topology, on both
backends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cover import cover_of, on_all_backends
from fsdp_ciera import CieraPolicy
from fsdp_ciera.testing import RankFailure, run_ranks
from tiny_moe import BY_BYTES, Case, compare_setups

WORLD_SIZE, RANKS_PER_NODE, NUM_OPERATIONS = 4, 2, 14
CODECS = ("raw", "entropy", "exponent_block", "exponent_delta", "value_delta")

WEIGHTS = {
    "train": 5, "settle": 5, "eval": 2, "inference": 2, "accumulate": 2, "no_sync": 1, "skip": 2, "forward_only": 1,
    "load": 1, "mutate": 1, "mutate_rank_0": 3, "freeze": 1, "unfreeze": 1, "invalidate": 1, "invalidate_rank_0": 2,
    "detach_attach": 1, "unshard": 1, "unshard_async": 1,
}  # fmt: skip
"""How often each operation is drawn; those that one rank does alone, and what follows them, are the likeliest to go wrong."""

CASES = {
    39: Case(),
    48: Case(num_experts=5, hidden=22),
    3: Case(reshard_after_forward=2),
    21: Case(reshard_after_forward=False, checkpointing=True, use_attach=True),
}
"""By seed. Together these seeds draw every operation, and most of them right after a "settle"."""


def policies() -> dict[str, CieraPolicy]:
    """Every codec in both topologies, and several under a tight budget, planned once and anew."""
    made = {}
    for where in ("flat", "hierarchical"):
        topology = {} if where == "flat" else {"topology": where, "ranks_per_node": RANKS_PER_NODE}
        for codec in CODECS:
            made[f"{codec}, {where}"] = CieraPolicy(codecs=(codec,), **topology)
        several = ("value_delta", "exponent_block", "entropy")
        made[f"several, {where}"] = CieraPolicy(codecs=several, cache_budget=20_000, **BY_BYTES, **topology)
        made[f"adaptive, {where}"] = CieraPolicy(
            codecs=several, cache_budget=20_000, adapt_every=2, warmup_steps=0, **BY_BYTES, **topology
        )
    return made


def operations(seed: int) -> tuple[str, ...]:
    """The first and the last are steps, so that there is something to go wrong and something to show it."""
    drawn = random.Random(seed).choices(list(WEIGHTS), list(WEIGHTS.values()), k=NUM_OPERATIONS - 2)
    return ("train", *drawn, "train")


def test_the_seeds_draw_every_operation() -> None:
    assert {operation for seed in CASES for operation in operations(seed)} == set(WEIGHTS)


@pytest.mark.parametrize("seed", CASES)
def test_random_operations(seed: int, cover_seed: int | None) -> None:
    case = replace(CASES[seed], operations=operations(seed))
    setups = cover_of(on_all_backends(policies()), list(CASES).index(seed), cover_seed)
    try:
        reports = run_ranks(compare_setups, WORLD_SIZE, case, setups, timeout_s=500)
    except RankFailure as failure:
        raise AssertionError(f"seed {seed}, {case}, {list(setups)}") from failure
    for report_by_setup in reports:
        for name, (_, policy) in setups.items():
            report = report_by_setup[name]
            assert report.num_gathers > 0
            assert report.by_codec[policy.codecs[0]].raw_bytes > 0, f"seed {seed}, {name}: {report.by_codec}"
            links = {link for link, amount in report.by_link.items() if amount.raw_bytes}
            # With reshard_after_forward=2 backward gathers inside a node, and so flat; plain gathers are flat, too.
            at_least = {"flat"} if policy.topology == "flat" else {"between_nodes", "in_node"}
            may_be_flat = case.reshard_after_forward == 2 or policy.may_go_plain
            assert at_least <= links <= at_least | ({"flat"} if may_be_flat else set()), f"seed {seed}, {name}: {links}"

"""Every loss and every parameter has the bits that stock FSDP2 gives: every codec, flat and hierarchical, on the backend of
CPUs and on that of CUDA (its kernels through the shim), in every way to shard and train.

`make test-all` runs every group with every policy on both backends. `make test` gives each codec of a group one topology and
one backend, drawn by the seed that pytest prints, so that over the groups every codec meets both on both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from backends_under_test import BACKENDS
from cover import Setups, cover_of, on_all_backends
from fsdp_ciera import CieraPolicy, CieraStats
from fsdp_ciera.testing import run_ranks
from tiny_moe import BY_BYTES, Case, compare_setups

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
CODECS = ("raw", "entropy", "exponent_block", "exponent_delta", "value_delta")
SEVERAL = ("value_delta", "exponent_block", "entropy")
BUDGET_BYTES = 20_000

EVERYTHING = ("train", "eval", "inference", "accumulate", "settle", "no_sync", "load", "train", "mutate", "eval", "freeze",
              "train", "unfreeze", "forward_only", "train", "settle", "unshard", "unshard_async", "mutate_rank_0", "skip",
              "train")  # fmt: skip
SHORT = ("train", "inference", "settle", "accumulate", "load", "eval", "mutate_rank_0", "train")
SPECIALS = ("specials", "unshard", "train", "unshard", "eval")
UNEVEN_ON_4: dict[str, Any] = {"num_experts": 5, "hidden": 22}
"""Four ranks divide neither the experts nor the width: FSDP2 pads, and the last rank has no expert."""


def policies(
    ranks_per_node: int | None = None, codecs: Sequence[str] = CODECS, **changes: Any
) -> dict[str, CieraPolicy]:
    """Each codec alone, and with all of them several, in a plan within a small budget that is renewed at every step."""
    where = "flat"
    if ranks_per_node is not None:
        where = f"nodes of {ranks_per_node}"
        changes |= {"topology": "hierarchical", "ranks_per_node": ranks_per_node}
    made = {f"{codec}, {where}": CieraPolicy(codecs=(codec,), **changes) for codec in codecs}
    if codecs == CODECS:
        # at first a plan of several codecs within the budget, then other ones
        several = {"codecs": SEVERAL, "cache_budget": BUDGET_BYTES, "adapt_every": 1, "warmup_steps": 0}
        made[f"adaptive, {where}"] = CieraPolicy(**several, **BY_BYTES, **changes)
    return made


def in_both(codecs: Sequence[str], **changes: Any) -> dict[str, CieraPolicy]:
    """`policies`, flat and in nodes of two ranks."""
    return policies(None, codecs, **changes) | policies(2, codecs, **changes)


FLAT = policies()
IN_PAIRS = in_both(CODECS)


@dataclass(frozen=True)
class Group:
    """One launch of processes: a case under stock FSDP2 and under several policies."""

    world_size: int
    case: Case
    policies: Mapping[str, CieraPolicy] = field(default_factory=lambda: IN_PAIRS)
    is_cut: bool = True
    """Whether a hierarchical policy finds groups that span nodes."""


GROUPS = {
    "2 ranks, untied": Group(2, Case(tied=False), FLAT),
    "3 ranks": Group(3, Case(operations=EVERYTHING), FLAT),
    "4 ranks": Group(4, Case(operations=EVERYTHING, **UNEVEN_ON_4)),
    "8 ranks, 4 experts: empty shards": Group(8, Case(operations=("train", "eval", "settle", "train", "train"))),
    "8 ranks, 4 experts: empty shards, two nodes": Group(
        8, Case(operations=("train", "settle", "train", "mutate_rank_0", "train")), policies(4)
    ),
    "caches made in inference mode": Group(
        4, Case(operations=("train", "invalidate", "inference", "train", "inference", "train"))
    ),
    "invalidate, on all ranks and on one": Group(
        4,
        Case(operations=("train", "invalidate", "train", "invalidate_rank_0", "train", "settle", "invalidate_rank_0",
                         "train", "detach_attach", "train")),
    ),
    "Shard(1)": Group(4, Case(shard_dim_1=True, intermediate=24, operations=SHORT)),
    "HSDP 2x2, a shard group in one node": Group(
        4, Case(mesh_shape=(2, 2), operations=SHORT), FLAT | policies(2, ("exponent_block", "value_delta")), is_cut=False
    ),
    "HSDP 2x4, a shard group on two nodes": Group(8, Case(mesh_shape=(2, 4), operations=SHORT, **UNEVEN_ON_4)),
    "HSDP 2x4, a shard group in one node": Group(
        8, Case(mesh_shape=(2, 4)), policies(4, ("value_delta",)), is_cut=False
    ),
    "keep after forward": Group(4, Case(reshard_after_forward=False, operations=SHORT)),
    "reshard to 2": Group(4, Case(reshard_after_forward=2, operations=EVERYTHING)),
    "activation checkpointing": Group(4, Case(checkpointing=True, operations=SHORT)),
    "experts on their own mesh": Group(4, Case(experts_mesh=True, operations=SHORT)),
    "attach": Group(4, Case(use_attach=True, operations=SHORT, **UNEVEN_ON_4)),
    "attach, experts on their own mesh": Group(4, Case(experts_mesh=True, use_attach=True)),
    "bf16 weights": Group(4, Case(param_dtype=None, model_dtype=torch.bfloat16, operations=SHORT)),
    "fp16": Group(4, Case(param_dtype=torch.float16, operations=SHORT)),
    "fp32": Group(4, Case(param_dtype=None, operations=SHORT)),
    "fp64 goes raw": Group(4, Case(param_dtype=None, model_dtype=torch.float64)),
    "special values": Group(4, Case(lr=0.0, operations=SPECIALS)),
    "special values in fp16": Group(4, Case(param_dtype=torch.float16, lr=0.0, operations=SPECIALS)),
    "special values in fp32": Group(4, Case(param_dtype=None, lr=0.0, operations=SPECIALS)),
    "verification": Group(4, Case(operations=SHORT), in_both(CODECS, verify="every")),
    "verification against raw gathers": Group(3, Case(operations=SHORT), policies(verify=2)),
    "verification against raw gathers, in pairs": Group(
        4, Case(operations=SHORT), policies(2, ("exponent_block", "value_delta"), verify=1)
    ),
    "some categories": Group(
        4, Case(operations=SHORT), in_both(("exponent_block", "value_delta"), categories=("expert_ffn", "layer_norm"))
    ),
    "small blocks": Group(4, Case(operations=SHORT), in_both(("exponent_block",), block_size=64)),
    "the paper's policy, the default, and a tight budget": Group(
        3, Case(operations=EVERYTHING),
        {
            "paper": CieraPolicy.paper(**BY_BYTES),
            "paper, measured": CieraPolicy.paper(),
            "default": CieraPolicy(),
            "default, a slow link": CieraPolicy(**BY_BYTES),
            "tight": CieraPolicy(codecs=("exponent_block",), cache_budget=BUDGET_BYTES),
        },
    ),
}  # fmt: skip


def setups_of(name: str, seed: int | None) -> Setups:
    """The policies of a group, each with the name of its backend: all of them on both, or a cover that a seed draws."""
    return cover_of(on_all_backends(GROUPS[name].policies), list(GROUPS).index(name), seed)


def test_a_cover_meets_every_pair() -> None:
    """Codec, topology and backend, also in the third of the groups that `make test` runs."""
    codecs = {*CODECS, "adaptive"}
    every = {(codec, where, backend) for codec in codecs for where in ("flat", "nodes") for backend in BACKENDS}
    for seed, third in itertools.product(range(12), range(3)):
        names = list(GROUPS)[third::3]
        setups = [setup.split(", ") for name in names for setup in setups_of(name, seed)]
        triples = {
            (codec, where.partition(" ")[0], setup[-1]) for codec, where, *setup in setups if codec in codecs and setup
        }
        assert triples == every, (seed, third, every - triples)
        for name in names:
            setups_of_group = setups_of(name, seed)
            assert len(setups_of_group) == 1 or {backend for backend, _ in setups_of_group.values()} == set(BACKENDS)
    assert {setup for seed in range(4) for setup in setups_of("3 ranks", seed)} == set(setups_of("3 ranks", None))


@pytest.mark.rotating
@pytest.mark.parametrize("name", GROUPS)
def test_same_bits_as_stock_fsdp2(name: str, cover_seed: int | None) -> None:
    group = GROUPS[name]
    if group.case.experts_mesh and TORCH_VERSION < (2, 12):
        pytest.skip("parameters on meshes of their own came with torch 2.12")
    setups = setups_of(name, cover_seed)
    reports = run_ranks(compare_setups, group.world_size, group.case, setups, timeout_s=600)
    for report_by_setup in reports:
        for setup, (_, policy) in setups.items():
            check_counts(report_by_setup[setup], policy, group)
        check_caches_shrink(report_by_setup, group)


def check_counts(report: CieraStats, policy: CieraPolicy, group: Group) -> None:
    """What was sent adds up, and it was the policy's codec and topology that sent it."""
    assert report.num_gathers > 0
    assert report.raw_bytes > 0
    for breakdown in (report.by_category, report.by_codec, report.by_phase, report.by_link):
        assert sum(amount.wire_bytes for amount in breakdown.values()) == report.wire_bytes
        assert sum(amount.raw_bytes for amount in breakdown.values()) == report.raw_bytes
    is_raw = group.case.model_dtype == torch.float64
    used = {codec for codec, amount in report.by_codec.items() if amount.raw_bytes}
    assert used <= {"raw", *policy.codecs}
    assert is_raw or policy.measures or used & set(policy.codecs)
    links = {link for link, amount in report.by_link.items() if amount.raw_bytes}
    if policy.topology == "flat" or not group.is_cut:
        assert links == {"flat"}
    else:
        assert {"between_nodes", "in_node"} <= links
    for plan in report.plans:
        assert plan.budget_bytes is None or plan.cache_bytes <= plan.budget_bytes
    assert report.cache_bytes <= sum(plan.cache_bytes for plan in report.plans)
    if policy.cache_budget == BUDGET_BYTES:
        assert report.cache_bytes <= BUDGET_BYTES
        # a plan that was renewed may have codecs without caches only
        may_be_none = any(plan.step and not plan.cache_bytes for plan in report.plans)
        assert is_raw or may_be_none or report.cache_bytes > 0


def check_caches_shrink(reports: Mapping[str, CieraStats], group: Group) -> None:
    """A hierarchical gather caches its share of the model; groups that lie in one node, and so stay flat, all of it."""
    all_are_cut = group.is_cut and not group.case.experts_mesh and isinstance(group.case.reshard_after_forward, bool)
    for codec in ("exponent_block", "exponent_delta", "value_delta"):
        for size, backend in itertools.product((2, 4), BACKENDS):
            flat = reports.get(f"{codec}, flat, {backend}")
            hierarchical = reports.get(f"{codec}, nodes of {size}, {backend}")
            if flat is not None and hierarchical is not None and flat.cache_bytes and all_are_cut:
                assert hierarchical.cache_bytes <= 0.6 * flat.cache_bytes

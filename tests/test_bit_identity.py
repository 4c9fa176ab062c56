"""Every loss and every parameter has the bits that stock FSDP2 gives, in every way to shard and train."""

from __future__ import annotations

import pytest
import torch

from fsdp_ciera import CieraPolicy
from ranks import run_ranks
from tiny_moe import Case, compare_with_stock

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
PAPER = CieraPolicy.paper(verify="every")
EVERYTHING = ("train", "eval", "inference", "accumulate", "no_sync", "load", "train", "mutate", "eval", "freeze", "train",
              "unfreeze", "forward_only", "train", "unshard", "unshard_async", "train")  # fmt: skip

CASES = {
    "3 ranks": (3, Case(operations=EVERYTHING), PAPER),
    "8 ranks, 4 experts: empty shards": (8, Case(operations=("train", "eval", "train", "train")), PAPER),
    "caches made in inference mode": (
        2, Case(operations=("train", "invalidate", "inference", "train", "inference", "train")), PAPER
    ),
    "invalidate, on all ranks and on one": (
        3, Case(operations=("train", "invalidate", "train", "invalidate_rank_0", "train", "detach_attach", "train")), PAPER
    ),
    "untied": (2, Case(tied=False), PAPER),
    "Shard(1)": (2, Case(shard_dim_1=True, operations=EVERYTHING), PAPER),
    "HSDP 2x2": (4, Case(mesh_shape=(2, 2), operations=EVERYTHING), PAPER),
    "keep after forward": (3, Case(reshard_after_forward=False, operations=EVERYTHING), PAPER),
    "reshard to 2": (4, Case(reshard_after_forward=2, operations=EVERYTHING), PAPER),
    "activation checkpointing": (3, Case(checkpointing=True, operations=EVERYTHING), PAPER),
    "experts on their own mesh": (4, Case(experts_mesh=True, operations=EVERYTHING), PAPER),
    "attach": (3, Case(use_attach=True, operations=EVERYTHING), PAPER),
    "attach, experts on their own mesh": (4, Case(experts_mesh=True, use_attach=True), PAPER),
    "bf16 weights": (3, Case(param_dtype=None, model_dtype=torch.bfloat16, operations=EVERYTHING), PAPER),
    "fp16": (3, Case(param_dtype=torch.float16, operations=EVERYTHING), PAPER),
    "fp32": (3, Case(param_dtype=None, operations=EVERYTHING), PAPER),
    "fp64 goes raw": (2, Case(param_dtype=None, model_dtype=torch.float64), PAPER),
    "special values": (3, Case(lr=0.0, operations=("specials", "unshard", "train", "unshard", "eval")), PAPER),
    "special values in fp16": (
        3, Case(param_dtype=torch.float16, lr=0.0, operations=("specials", "unshard", "eval", "unshard")), PAPER
    ),
    "special values in fp32": (3, Case(param_dtype=None, lr=0.0, operations=("specials", "unshard", "unshard")), PAPER),
    "raw": (3, Case(operations=EVERYTHING), CieraPolicy(codecs=("raw",), verify="every")),
    "some categories": (
        3, Case(operations=EVERYTHING), CieraPolicy(categories=("expert_ffn", "layer_norm"), verify="every")
    ),
    "small blocks": (3, Case(operations=EVERYTHING), CieraPolicy(block_size=64, verify=3)),
    "value_delta": (3, Case(operations=EVERYTHING), CieraPolicy(codecs=("value_delta",), verify="every")),
    "value_delta, no verification": (3, Case(operations=EVERYTHING), CieraPolicy(codecs=("value_delta",))),
    "value_delta, reshard to 2": (
        4, Case(reshard_after_forward=2, operations=EVERYTHING), CieraPolicy(codecs=("value_delta",), verify=1)
    ),
    "value_delta, special values": (
        3, Case(lr=0.0, operations=("specials", "unshard", "train", "unshard")), CieraPolicy(codecs=("value_delta",))
    ),
    "exponent_delta": (3, Case(operations=EVERYTHING), CieraPolicy(codecs=("exponent_delta",), verify="every")),
    "exponent_delta, fp16": (
        3, Case(param_dtype=torch.float16, operations=EVERYTHING), CieraPolicy(codecs=("exponent_delta",), verify="every")
    ),
    "entropy": (3, Case(operations=EVERYTHING), CieraPolicy(codecs=("entropy",), verify="every")),
    "no verification": (3, Case(operations=EVERYTHING), CieraPolicy()),
    "a tight budget": (3, Case(operations=EVERYTHING), CieraPolicy(cache_budget=20_000)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_stock_fsdp2(name: str) -> None:
    world_size, case, policy = CASES[name]
    if case.experts_mesh and TORCH_VERSION < (2, 12):
        pytest.skip("parameters on meshes of their own came with torch 2.12")
    reports = run_ranks(compare_with_stock, world_size, case, policy)
    for report in reports:
        assert report.num_gathers > 0
        assert report.raw_bytes > 0
        for breakdown in (report.by_category, report.by_codec, report.by_phase):
            assert sum(amount.wire_bytes for amount in breakdown.values()) == report.wire_bytes
            assert sum(amount.raw_bytes for amount in breakdown.values()) == report.raw_bytes
    budget = policy.cache_budget_bytes
    if budget is not None:
        assert 0 < max(report.cache_bytes for report in reports) <= budget

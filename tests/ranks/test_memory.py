"""`estimate_memory`: what it says beforehand, what live models then hold, and what processes really take."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ciera import (
    CieraPolicy,
    CieraPolicyError,
    MemoryEstimate,
    attach,
    detach,
    estimate_memory,
    fully_shard,
    stats,
)
from fsdp_ciera.cli.tables.library import memory_table
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.gather.collective import CieraAllGather
from fsdp_ciera.testing import run_ranks
from places import python_path
from tiny_moe import BY_BYTES, PAPERS_CODEC, Case, TinyMoe, build

MIX = ("value_delta", "exponent_block", "entropy")

POLICIES = [CieraPolicy(codecs=(name,)) for name in CODECS] + [
    CieraPolicy(codecs=("exponent_block",), block_size=64),
    CieraPolicy(codecs=MIX, cache_budget=30_000, **BY_BYTES),
    CieraPolicy(
        codecs=("exponent_delta", "exponent_block"),
        cache_budget=9_000,
        categories=("expert_ffn", "attention"),
        **BY_BYTES,
    ),
    CieraPolicy(codecs=("value_delta",), cache_budget=0),
]
FEW = [CieraPolicy(codecs=("exponent_block",)), CieraPolicy(codecs=MIX, cache_budget=30_000, **BY_BYTES)]

HIERARCHICAL: dict[str, Any] = {"topology": "hierarchical", "ranks_per_node": 2}

CASES: dict[str, tuple[int, Case, list[CieraPolicy]]] = {
    "2 ranks": (2, Case(), POLICIES),
    "3 ranks, untied": (3, Case(tied=False), FEW),
    "4 ranks": (4, Case(), POLICIES),
    "fp16": (2, Case(param_dtype=torch.float16), FEW),
    "fp32": (2, Case(param_dtype=None), FEW),
    "bf16 weights": (2, Case(model_dtype=torch.bfloat16, param_dtype=None), FEW),
    "resharded to pairs": (4, Case(reshard_after_forward=2), FEW),
    "HSDP": (4, Case(mesh_shape=(2, 2)), FEW),
    "hierarchical": (4, Case(), [dataclasses.replace(policy, **HIERARCHICAL) for policy in POLICIES]),
    "hierarchical, resharded to nodes": (
        4, Case(reshard_after_forward=2), [dataclasses.replace(policy, **HIERARCHICAL) for policy in FEW]
    ),
}  # fmt: skip


def estimates_and_live(
    rank: int, world_size: int, case: Case, policies: list[CieraPolicy]
) -> list[tuple[list[MemoryEstimate], int, list[str]]]:
    """Per policy: estimates of the model on meta, under FSDP2 before the first step, and after it; the live caches, and
    the codecs that gathers have used."""
    found = []
    num_shards = case.mesh_shape[1] if case.mesh_shape else world_size
    for policy in policies:
        with torch.device("meta"):
            meta = TinyMoe(case).to(case.model_dtype)
        estimates = [
            estimate_memory(
                meta,
                policy,
                num_shards,
                mp_policy=MixedPrecisionPolicy(param_dtype=case.param_dtype),
                reshard_after_forward=case.reshard_after_forward,
            )
        ]
        model = build(case, policy)
        estimates.append(estimate_memory(model, policy, num_shards))
        model(torch.arange(29)).backward()
        estimates.append(estimate_memory(model, policy, num_shards))
        report = stats(model)
        assert estimates[0].held_output_bytes == report.held_output_bytes, policy
        found.append((estimates, report.cache_bytes, sorted(set(report.by_codec) - {"overhead"})))
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_estimates_are_what_live_models_hold(name: str) -> None:
    world_size, case, policies = CASES[name]
    for found in run_ranks(estimates_and_live, world_size, case, policies):
        for (estimates, cache_bytes, codecs), policy in zip(found, policies, strict=True):
            for estimate in estimates:
                assert estimate == estimates[0], policy
                assert estimate.cache_bytes == cache_bytes, policy
                assert sum(estimate.by_category.values()) == sum(estimate.by_codec.values()) == cache_bytes
                assert sorted(estimate.by_codec) == sorted(estimate.shard_bytes_by_codec) == codecs, policy
            assert not isinstance(policy.cache_budget, int) or cache_bytes <= policy.cache_budget
            assert cache_bytes > 0 or policy.codecs[0] in ("raw", "entropy") or policy.cache_budget == 0


def unusual_groups(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Live models that no argument of `estimate_memory` describes: it reads the groups themselves."""
    found = []
    for case in (
        Case(shard_dim_1=True, num_experts=3, hidden=24, intermediate=24),
        Case(experts_mesh=True),
        Case(checkpointing=True, use_attach=True),
        Case(operations=("freeze",)),
    ):
        policy = CieraPolicy(codecs=("exponent_block", "value_delta"), cache_budget=30_000, block_size=64, **BY_BYTES)
        model = build(case, policy)
        if "freeze" in case.operations:
            model.model.layers.requires_grad_(False)
        before = estimate_memory(model, policy, world_size)
        model(torch.arange(29)).backward()
        assert before == estimate_memory(model, policy, world_size)
        found.append((before.cache_bytes, stats(model).cache_bytes))
    return found


def test_estimates_of_live_models_read_their_groups() -> None:
    for found in run_ranks(unusual_groups, 4):
        assert len(found) == 4 and all(expected == got > 0 for expected, got in found), found


def pairs_and_meta(rank: int, world_size: int) -> None:
    """A list of modules in one group has the names of all of them; on meta FSDP2 allocates nothing, and nor do we."""
    policy = CieraPolicy(codecs=("value_delta",), categories=("embedding",))
    sizes = set()
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = TinyMoe(Case(tied=False))
        arguments: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        units: list[Any] = [*model.model.layers, [model.model.norm, model.lm_head]]
        sizes.add(str(estimate_memory(model, policy, world_size, units=units, **arguments)))
        for unit in units:
            torch_fully_shard(unit, **arguments)
        torch_fully_shard(model, **arguments)
        estimate = estimate_memory(model, policy, world_size)
        sizes.add(str(estimate))
        assert set(estimate.by_category) == {"embedding", "attention", "layer_norm", "routing_gate", "expert_ffn"}
        assert estimate.cache_bytes == estimate.by_category["embedding"] == 2 * (2 * 20 * 19 * 2)  # 37 rows on 2 ranks
        if device == "cpu":
            attach(model, policy)
            model(torch.arange(29)).backward()
            assert stats(model).cache_bytes == estimate.cache_bytes
    assert len(sizes) == 1
    with pytest.raises(CieraPolicyError, match=r"world_size=8, but .* sharded over 2 ranks .*estimate_memory\(model"):
        estimate_memory(model, policy, 8)


def test_lists_of_modules_and_meta_models_under_fsdp2() -> None:
    run_ranks(pairs_and_meta, 2)


def test_what_an_estimate_says() -> None:
    with torch.device("meta"):
        model = TinyMoe(Case(hidden=256, intermediate=512))
    policy = CieraPolicy(codecs=MIX, cache_budget="8MB")
    estimate = estimate_memory(model, policy, 4)
    assert {"value_delta", "exponent_block", "entropy"} == set(estimate.by_codec)
    assert str(estimate) == (
        f"fsdp_ciera: {estimate.cache_bytes / 2**20:.1f} MiB of caches on each of 4 ranks ("
        + ", ".join(f"{codec} {num_bytes / 2**20:.1f}" for codec, num_bytes in estimate.by_codec.items())
        + f"), and at most {estimate.buffer_bytes / 2**20:.1f} MiB while a group is gathered"
    )
    out = io.StringIO()
    Console(file=out, width=100).print(memory_table(estimate))
    for text in (
        "category: expert_ffn",
        "codec: exponent_block",
        f"{estimate.cache_bytes / 2**20:.1f}",
        "buffers while",
    ):
        assert text in out.getvalue()
    json.dumps(estimate.to_dict())
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate.cache_bytes = 0  # type: ignore[misc]

    # The largest group is a layer, fp32 here: 4 ranks' payloads, and the own one.
    layer_bytes = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    assert estimate.gathered_bytes == layer_bytes
    assert layer_bytes * 5 / 4 < estimate.buffer_bytes < layer_bytes * 5 / 4 * 1.001
    assert estimate_memory(model, CieraPolicy(codecs=("raw",)), 4).buffer_bytes == 0
    nodes = estimate_memory(model, CieraPolicy(codecs=("value_delta",), **HIERARCHICAL), 4)
    assert nodes.cache_bytes == estimate_memory(model, CieraPolicy(codecs=("value_delta",)), 4).cache_bytes // 2
    # A column of two shards, the two columns of the node, and the own payload.
    assert nodes.buffer_bytes == pytest.approx(layer_bytes * (2 + 4 + 1) / 4, rel=1e-3)


def test_one_rank_costs_nothing() -> None:
    estimate = estimate_memory(TinyMoe(Case()), CieraPolicy(codecs=MIX), 1)
    assert estimate == MemoryEstimate(world_size=1)
    assert str(estimate) == "fsdp_ciera: no memory, since nothing is gathered (world_size is 1)"


def test_groups_of_mixed_dtypes_go_raw() -> None:
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.ReLU(), nn.Linear(8, 8))
    estimate = estimate_memory(model, PAPERS_CODEC, 2)
    assert estimate.by_codec == {"raw": 0}
    assert estimate.shard_bytes_by_codec == {"raw": (64 + 8) // 2 * (2 + 4)}
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert estimate_memory(model, PAPERS_CODEC, 2, mp_policy=cast).shard_bytes_by_codec == {"exponent_block": 144}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"policy": "paper"}, r"policy='paper' must be a fsdp_ciera\.CieraPolicy"),
        ({"world_size": 0}, "world_size=0 must be an int of at least 1"),
        ({"world_size": True}, "world_size=True must be an int"),
        (
            {"reshard_after_forward": 3},
            "reshard_after_forward=3 must be a bool, None or a divisor of the world_size, .* 4",
        ),
        ({"units": [nn.Linear(2, 2)]}, "units=.* must be modules of the model"),
        ({"policy": CieraPolicy(topology="hierarchical")}, r"LOCAL_WORLD_SIZE is not set: give CieraPolicy\(ranks_per"),
    ],
)
def test_arguments_that_are_not_allowed(arguments: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(CieraPolicyError, match=text):
        estimate_memory(TinyMoe(Case()), **{"policy": CieraPolicy(), "world_size": 4, **arguments})


# Models of transformers


def olmoe(scale: int) -> nn.Module:
    from fsdp_ciera.recipes.models import MODELS

    spec = MODELS["olmoe-1b-7b"]
    config = spec.tiny_config()
    config.hidden_size, config.num_hidden_layers, config.vocab_size = 64 * scale, 3, 500
    return spec.model_class()(config)


def live_olmoe(rank: int, world_size: int, policies: list[CieraPolicy]) -> list[int]:
    held = []
    for policy in policies:
        torch.manual_seed(0)
        model = olmoe(2)
        mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, ciera_policy=policy, mp_policy=mp_policy)
        fully_shard(model, ciera_policy=policy, mp_policy=mp_policy)
        tokens = torch.arange(32).view(1, -1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        held.append(stats(model).cache_bytes)
    return held


def test_a_meta_olmoe_is_estimated_as_it_will_be() -> None:
    pytest.importorskip("transformers")
    policies = [CieraPolicy(codecs=(codec,)) for codec in ("exponent_block", "value_delta")]
    policies.append(CieraPolicy(codecs=MIX, cache_budget=300_000, **BY_BYTES))
    with torch.device("meta"):
        model = olmoe(2)
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    expected = [estimate_memory(model, policy, 2, mp_policy=cast).cache_bytes for policy in policies]
    assert 0 < expected[2] <= 300_000 < expected[0] < expected[1]
    assert run_ranks(live_olmoe, 2, policies) == [expected, expected]


def estimate_mixtral() -> None:
    """Run in a process of its own: prints the estimate of a full-size Mixtral, the seconds, and the growth in memory."""
    from fsdp_ciera.recipes.models import MODELS

    spec = MODELS["mixtral-8x7b"]
    model_class, config = spec.model_class(), spec.config()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with torch.device("meta"):
        model = model_class(config)
    built = time.perf_counter()
    policy = CieraPolicy(codecs=MIX, cache_budget="60GB")
    estimate = estimate_memory(model, policy, 8, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seconds = time.perf_counter() - built
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    num_values = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps([num_values, estimate.to_dict(), seconds, built - start, growth, dist.is_initialized()]))


@pytest.mark.rotating
def test_a_full_size_mixtral_is_estimated_without_its_memory() -> None:
    pytest.importorskip("transformers")
    num_values, estimate, seconds, _, growth_bytes, has_group = json.loads(run_here("estimate_mixtral"))
    assert num_values > 46e9 and not has_group
    assert seconds < 5 and growth_bytes < 200e6
    # 93 GB would hold all values: the budget is used up, and what it leaves has the codec that needs no cache.
    assert 59.9e9 < estimate["cache_bytes"] <= 60e9
    assert {"value_delta", "entropy"} <= set(estimate["by_codec"]) <= set(MIX)
    assert estimate["by_codec"]["value_delta"] > 50e9
    assert estimate["shard_bytes_by_codec"]["entropy"] > num_values * 2 / 8 / 3
    assert sum(estimate["shard_bytes_by_codec"].values()) == pytest.approx(num_values * 2 / 8, rel=1e-3)


def run_here(function: str, **environment: str) -> str:
    return start_here(function, **environment).communicate(timeout=240)[0]


def start_here(function: str, **environment: str) -> subprocess.Popen[str]:
    """A fresh process that calls a function of this file; what it prints is its result."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import test_memory; test_memory.{function}()"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path(), **environment},
    )  # fmt: skip


# What processes take

HIDDEN, WIDE = 1024, 6144  # 25 MB of bf16 in a group
RETURNING = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Makes glibc give freed memory back at once, so that what a process takes is what it holds."""


needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")


class Block(nn.Module):
    """A feed-forward layer with random weights, which no codec can make much smaller while caches are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down_proj = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(self.up_proj(x).relu())


def build_blocks(num_blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_blocks)])


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def status_bytes(field: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS, or its highest value so far, VmHWM."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def start_rank(num_blocks: int) -> nn.Module:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build_blocks(num_blocks)
    for block in model:
        torch_fully_shard(block, mp_policy=BF16)
    return torch_fully_shard(model, mp_policy=BF16)  # type: ignore[return-value]


def train_blocks(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(1, HIDDEN)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def measure_training() -> None:
    """A rank in a process of its own: two steps, stock or under a policy, and prints the peak of all of it."""
    model = start_rank(4)
    if os.environ["CODEC"]:
        attach(model, CieraPolicy(codecs=(os.environ["CODEC"],)))
    train_blocks(model)
    print(json.dumps(status_bytes("VmHWM")))
    dist.barrier()


def measure_gathers() -> None:
    """A rank in a process of its own: steps under each codec; prints what they left behind, and the most that a gather took in
    passing."""
    model = start_rank(2)
    original = CieraAllGather.__call__
    passing: list[int] = []

    def measured(self: CieraAllGather, *arguments: Any, **keywords: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # starts VmHWM anew
        result = original(self, *arguments, **keywords)
        passing.append(status_bytes("VmHWM") - status_bytes("VmRSS"))
        return result

    CieraAllGather.__call__ = measured  # type: ignore[method-assign]
    found = {}
    for is_first in (True, False):  # the first time there is code to load, too
        for codec in CODECS:
            before = status_bytes("VmRSS")
            attach(model, CieraPolicy(codecs=(codec,)))
            train_blocks(model)
            found[codec] = status_bytes("VmRSS") - before, max(passing)
            passing.clear()
            detach(model)
        assert is_first or len(found) == len(CODECS)
    print(json.dumps(found))
    dist.barrier()


def run_pair(function: str, **environment: str) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    ranks = [start_here(function, RANK=str(rank), **rendezvous, **RETURNING, **environment) for rank in range(2)]
    return [json.loads(rank.communicate(timeout=240)[0]) for rank in ranks]


def estimate_blocks(num_blocks: int, codec: str) -> MemoryEstimate:
    with torch.device("meta"):
        return estimate_memory(build_blocks(num_blocks), CieraPolicy(codecs=(codec,)), 2, mp_policy=BF16)


@pytest.mark.rotating
@needs_linux
def test_a_run_takes_its_caches_and_no_more_than_one_group_besides() -> None:
    """Stock FSDP2 peaks where gradients are complete. Caches come on top of that and must show, else nothing is measured;
    buffers count only where they exceed what else is held at their moment."""
    estimate = estimate_blocks(4, "value_delta")
    assert estimate.gathered_bytes == 2 * HIDDEN * WIDE * 2 > 20e6
    stock, ours = run_pair("measure_training", CODEC=""), run_pair("measure_training", CODEC="value_delta")
    for ours_bytes, stock_bytes in zip(ours, stock, strict=True):
        more_bytes = ours_bytes - stock_bytes
        kept_bytes = estimate.cache_bytes + estimate.held_output_bytes
        assert 0.8 * kept_bytes < more_bytes <= kept_bytes + estimate.gathered_bytes


@pytest.mark.rotating
@needs_linux
def test_a_gather_keeps_its_caches_and_takes_no_more_in_passing_than_was_estimated() -> None:
    """Between steps nothing is held but caches and outputs. A full gather of random bf16 weights has payloads of two
    thirds of what the estimate allows for, and is decoded in chunks: a plane or a copy of a shard more (at least 6 MB
    here) would show."""
    for found in run_pair("measure_gathers"):
        for codec in CODECS:
            kept_bytes, passing_bytes = found[codec]
            estimate = estimate_blocks(2, codec)
            assert abs(kept_bytes - estimate.cache_bytes - estimate.held_output_bytes) < 2e6, (codec, kept_bytes)
            if codec != "raw":
                assert passing_bytes < 0.8 * estimate_blocks(1, codec).buffer_bytes, (codec, passing_bytes)

"""Steps of models that nobody ran: bytes as in `ciera plan`, compute by hand, and every world size."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ciera import CieraPolicy
from fsdp_ciera.cli.main import main
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.planning import CodecCost
from fsdp_ciera.planning.forecast import Cluster as PlannedCluster
from fsdp_ciera.planning.forecast import forecast
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policies.tables import shipped_tables
from fsdp_ciera.simulator.modelled import ComputeCosts, ModelParameters, stock_step
from fsdp_ciera.simulator.network import Network, Place
from fsdp_ciera.simulator.project import ModelJob, Point, SimulatedCluster, project
from fsdp_ciera.simulator.schemes import SCHEMES, Assumptions

BETWEEN, INSIDE = Link(0.0, 1e9), Link(0.0, 1e11)
FREE = {name: CodecCost() for name in CODECS}
KEYS = [scheme.key for scheme in SCHEMES]


class Block(nn.Module):
    """A router, a dense projection and fused experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 16, bias=False)
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(64, 64, bias=False)})
        self.mlp = nn.ModuleDict({"experts": nn.ParameterDict({"down_proj": nn.Parameter(torch.empty(16, 64, 128))})})


class Tiny(nn.Module):
    """Two blocks, an embedding and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.embed_tokens = nn.Embedding(256, 64)
        self.lm_head = nn.Linear(64, 256, bias=False)
        self.config = SimpleNamespace(num_experts=16, num_experts_per_tok=4)


def tiny() -> Any:
    with torch.device("meta"):
        return Tiny()


DENSE, EXPERTS = 64 * 16 + 64 * 64, 16 * 64 * 128
HEAD = 256 * 64


def points(
    is_hierarchical: bool = False, costs: Any = FREE, sizes: tuple[int, ...] = (16,)
) -> dict[tuple[str, int], Point]:
    job = ModelJob("tiny", ModelParameters.of(tiny()), ComputeCosts(layer_seconds=0.001), 4)
    network = Network.of_links(BETWEEN, INSIDE, 0.0, 0.0)
    cluster = SimulatedCluster(ranks_per_host=8, network=lambda _: network, is_serial=False)
    given = Assumptions(
        table=shipped_tables()["smollm2-moe"], learning_rate=1e-5, costs=costs, between=BETWEEN, inside=INSIDE, overlap=True,
        is_hierarchical=is_hierarchical,
    )  # fmt: skip
    return {(point.contender, point.world_size): point for point in project(job, cluster, sizes, KEYS, given)}


def test_bytes_are_those_of_the_plan() -> None:
    planned = PlannedCluster(world_size=16, ranks_per_node=8, between_nodes=BETWEEN, in_node=INSIDE)
    policy = CieraPolicy(cache_budget=None, learning_rate=1e-5)
    found = {one.name: one for one in forecast(tiny(), policy, planned, costs=FREE).contenders}
    made = points()
    norm = 4 * 2 * 15 / 16  # the norm of gradients
    for key, name in (("fsdp2", "FSDP2"), ("fsdp2-keep", "FSDP2, no reshard"), ("zero3", "ZeRO-3")):
        wanted = found[name].gather_bytes + found[name].reduce_bytes
        assert made[key, 16].host_bytes == pytest.approx(wanted + norm)


def test_hierarchical_gathers_of_ours_send_less_out_of_a_host() -> None:
    flat, nodes = points()["exponent_block", 16], points(is_hierarchical=True)["exponent_block", 16]
    reduced = points()["fsdp2", 16].host_bytes / 2
    gathered = 2 * (DENSE + EXPERTS) + 2 * HEAD
    # 15 payloads of a rank in one ring, or 1 payload in each of 8
    assert flat.host_bytes - nodes.host_bytes == pytest.approx(2 * gathered / 16 * (15 - 8), rel=0.15)
    assert nodes.host_bytes > reduced


def test_seconds_of_compute_by_hand() -> None:
    model = ModelParameters.of(tiny())
    assert model.active_values == (HEAD, DENSE + EXPERTS / 4, DENSE + EXPERTS / 4)
    costs = ComputeCosts(flops_per_second=1e9, tokens=100)
    trace = stock_step(model, Place(world_size=4), costs, 4)
    computes = [(event.phase, event.group, event.seconds) for event in trace.events if event.node == "Compute"]
    layer, head = 200 * (DENSE + EXPERTS / 4) / 1e9, 200 * HEAD / 1e9
    expected = [("forward", 1, layer), ("forward", 2, layer), ("forward", 0, head)]
    expected += [("backward", 0, 2 * head), ("backward", 2, 2 * layer), ("backward", 1, 2 * layer)]
    assert computes[:-1] == [(phase, group, pytest.approx(seconds)) for phase, group, seconds in expected]
    assert "ESTIMATE" in costs.describe() and "as told" in ComputeCosts(layer_seconds=1.0).describe()


def test_all_contenders_from_1_to_16384_ranks() -> None:
    sizes = tuple(2**power for power in range(15))
    made = points(sizes=sizes)
    assert len(made) == len(KEYS) * 15
    for key in KEYS:
        assert made[key, 1].seconds == made["fsdp2", 1].seconds and made[key, 1].host_bytes == 0
    for size in sizes[1:]:
        stock = made["fsdp2", size]
        assert made["fsdp2-keep", size].host_bytes < stock.host_bytes
        assert made["default", size].seconds <= stock.seconds * 1.02
        assert made["value_delta", size].gather_seconds < made["exponent_block", size].gather_seconds


def test_the_command_on_a_model_of_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["simulate", "--model", "olmoe-1b-7b", "--gpus", "1", "64", "16384"]
    assert main(arguments) == 3
    assert main([*arguments, "--unvalidated", "--contenders", "default", "paper", "--json", str(out)]) == 0
    assert "UNVALIDATED" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert [point["world_size"] for point in content["projection"]] == [1] * 3 + [64] * 3 + [16384] * 3
    speedups = {(point["contender"], point["world_size"]): point["speedup"] for point in content["projection"]}
    assert speedups["default", 64] > speedups["paper", 64] > 1.1
    assert any("ESTIMATE" in note for note in content["assumptions"])

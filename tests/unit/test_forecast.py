"""`ciera plan` and what is behind it: bytes of all schemes by hand, fast and slow links, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ciera import CieraPolicy, CieraPolicyError
from fsdp_ciera.cli.main import main
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.planning import CodecCost, Link
from fsdp_ciera.planning.forecast import Cluster, forecast
from fsdp_ciera.policies.machines import MACHINES
from fsdp_ciera.policies.tables import shipped_tables
from places import python_path

FREE = {name: CodecCost() for name in CODECS}
NO_BUDGET: dict[str, Any] = {"cache_budget": None, "learning_rate": 1e-5}
PAIRS = Cluster(world_size=4, ranks_per_node=2, between_nodes=Link(0.0, 1e9), in_node=Link(0.0, 1e11))


def model() -> nn.Module:
    """Two layers of 1,024 x 1,024 values, and a root of 1,024."""
    with torch.device("meta"):
        layers = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(2)])
        return nn.ModuleDict({"layers": layers, "norm": nn.RMSNorm(1024)})


VALUES = 2 * 1024 * 1024 + 1024  # gathered from 4 ranks, a quarter each


def test_bytes_of_the_other_schemes_by_hand() -> None:
    found = forecast(model(), CieraPolicy(micro_batches=3, **NO_BUDGET), PAIRS, costs=FREE)
    fsdp, kept, zero3, zeropp, ours = found.contenders
    shard = VALUES // 4
    assert found.num_parameters == VALUES
    assert fsdp.gather_bytes == 3 * 2 * 3 * shard * 2  # 3 micro-batches, forward and backward, 3 peers, 2 bytes
    assert fsdp.slow_bytes == fsdp.gather_bytes / 2  # in a ring over pairs every other rank sends across
    assert fsdp.reduce_bytes == 3 * shard * 4
    assert kept.gather_bytes == fsdp.gather_bytes / 2 and kept.extra_memory_bytes == VALUES * 2
    assert zero3.gather_bytes == fsdp.gather_bytes and zero3.reduce_bytes == 3 * 3 * shard * 2
    # forward: 1 byte a value to 3 peers; backward: half the model in 2 bytes to the neighbour; 4-bit gradients
    assert zeropp.gather_bytes == 3 * (3 * shard + VALUES // 2 * 2)
    assert zeropp.slow_bytes == 3 * 3 * shard / 2
    assert zeropp.reduce_bytes == 3 * 3 * shard / 2
    assert zeropp.extra_memory_bytes == VALUES // 2 * 2
    assert [one.name for one in found.contenders if not one.is_lossless] == ["ZeRO++ (lossy)"]
    assert fsdp.gather_seconds == pytest.approx(fsdp.gather_bytes / 1e9)
    assert ours.extra_memory_bytes == found.plan.cache_bytes == 4 * shard * 2  # all ranks' last values


def test_hierarchical_gathers_cross_nodes_once_and_share_the_link() -> None:
    policy = CieraPolicy(codecs=("value_delta",), topology="hierarchical", ranks_per_node=2, **NO_BUDGET)
    found = forecast(model(), policy, PAIRS, costs=FREE)
    assert found.topology == "hierarchical"
    flat = forecast(model(), CieraPolicy(codecs=("value_delta",), **NO_BUDGET), PAIRS, costs=FREE)
    assert found.plan.cache_bytes * 2 == pytest.approx(
        flat.plan.cache_bytes, rel=0.01
    )  # one peer and the own shard, not 3
    # plain inside the node: the shards of both nodes to one neighbour, twice a step
    assert found.plan.in_node_bytes == 2 * 2 * VALUES // 4 * 2
    assert found.contenders[-1].slow_bytes < flat.contenders[-1].slow_bytes * 2 / 3 * 1.1  # headers go to all
    raw = forecast(model(), replace(policy, codecs=("raw",)), PAIRS, costs=FREE)
    assert raw.contenders[-1].gather_seconds == pytest.approx(
        2 * (VALUES // 4 * 2 / 0.5e9 + 2 * VALUES // 4 * 2 / 1e11)  # two ranks of a node share 1 GB/s
    )
    chosen = forecast(model(), CieraPolicy(topology="auto", **NO_BUDGET), PAIRS, costs=FREE)
    assert chosen.topology in ("flat", "hierarchical")
    assert chosen.contenders[-1].gather_seconds <= min(
        found.contenders[-1].gather_seconds, flat.contenders[-1].gather_seconds
    )


def test_groups_without_a_codec_are_gathered_as_in_stock_fsdp2() -> None:
    """So a plan that chose nothing is no faster than FSDP2, whatever the topology might have brought."""
    policy = CieraPolicy(topology="auto", cache_budget=0, codecs=("value_delta", "raw"), learning_rate=1e-5)
    found = forecast(model(), policy, PAIRS, costs=FREE)
    stock, ours = found.contenders[0], found.contenders[-1]
    assert (ours.gather_bytes, ours.slow_bytes) == (stock.gather_bytes, stock.slow_bytes)
    assert ours.gather_seconds == pytest.approx(stock.gather_seconds)
    forced = forecast(model(), replace(policy, topology="hierarchical"), PAIRS, costs=FREE)
    assert forced.contenders[-1].slow_bytes == stock.slow_bytes


def test_what_cannot_be_planned_is_an_error() -> None:
    with pytest.raises(CieraPolicyError, match="cache_budget='auto' is a share of a GPU that is not there: give bytes"):
        forecast(model(), CieraPolicy(), PAIRS, costs=FREE)
    with pytest.raises(CieraPolicyError, match="world_size=10 in nodes of 4 is not allowed"):
        replace(PAIRS, world_size=10, ranks_per_node=4)


def scout(path: Path, between: str, *arguments: str) -> dict[str, Any]:
    links = ("--in-node", between, "--between-nodes", between)
    assert main(["plan", "llama-4-scout", "--json", str(path), *links, *arguments]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def codecs_in(found: dict[str, Any]) -> set[str]:
    return {row["codec"] for row in found["plan"]["rows"]}


def test_scout_on_a_fast_link_selects_nothing_and_on_a_slow_one_it_does(tmp_path: Path) -> None:
    """The paper: nothing on the NVLink of 4 GPUs; profitable where links between nodes dominate."""
    pytest.importorskip("transformers")
    one_node = ("--world-size", "4", "--ranks-per-node", "4")
    for arguments in ((), ("--paper",), ("--budget", "none", "--lr", "1e-4")):
        assert codecs_in(scout(tmp_path / "plan.json", "450GB/s", *one_node, *arguments)) == {"raw"}
    slow = scout(tmp_path / "plan.json", "8GB/s", *one_node, "--paper")
    assert "exponent_block" in codecs_in(slow)
    assert slow["plan"]["cache_bytes"] <= 8 << 30
    assert any("no table for llama-4-scout: that of deepseek-moe-16b stands in" in note for note in slow["notes"])


def plan_scout_in_this_process() -> None:
    """Run in a process of its own: prints exit code, seconds and the most memory."""
    import time

    start = time.process_time()
    code = main(["plan", "llama-4-scout", "--world-size", "128"])
    seconds = time.process_time() - start
    # ru_maxrss would be that of the process that started this one, if that was larger
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else ["VmHWM: 0 kB"]
    most_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    print(json.dumps([code, seconds, 1024 * most_kib]))


def test_scout_on_128_ranks_is_planned_in_seconds_without_its_weights() -> None:
    pytest.importorskip("transformers")
    code = "import test_forecast; test_forecast.plan_scout_in_this_process()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    exit_code, _, most_bytes = json.loads(done.stdout.splitlines()[-1])
    assert exit_code == 0 and most_bytes < 2e9
    for text in ("llama-4-scout, 107.77 B parameters, on 128 ranks", "ZeRO++ (lossy)", "expert_ffn", "a projection",
                 "96 parameters of experts are cut along dimension 1"):  # fmt: skip
        assert text in done.stdout, done.stdout


def test_all_models_are_planned_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from fsdp_ciera.recipes.models import MODELS

    for name in MODELS:
        path = tmp_path / f"{name}.json"
        assert main(["plan", name, "--json", str(path), "--lr", "1e-4"]) == 0
        found = json.loads(path.read_text())
        assert found["num_parameters"] > 5e9 and found["plan"]["gain_seconds"] > 0
        assert {row["category"] for row in found["plan"]["rows"]} >= {"expert_ffn", "attention", "layer_norm"}
        assert found["plan"]["cache_bytes"] <= 8 << 30
        shipped = name in shipped_tables()
        assert shipped == (f"no table for {name}" not in capsys.readouterr().out)
    pytest.importorskip("matplotlib")
    assert main(["plan", "olmoe-1b-7b", "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_with_a_config_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from fsdp_ciera.recipes.models import MODELS

    MODELS["olmoe-1b-7b"].tiny_config().save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--table", "olmoe-1b-7b", "--between-nodes", "1MB/s"]) == 0
    assert "value_delta" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gpt-5"], "model 'gpt-5' is neither a folder with a config.json nor one of deepseek-moe-16b"),
        (["olmoe-1b-7b", "--in-node", "fast"], "--in-node: 'fast' is no link"),
        (["olmoe-1b-7b", "--budget", "much"], "cache_budget='much' is not a byte size"),
        (["olmoe-1b-7b", "--budget", "auto"], "is a share of a GPU that is not there"),
        (["olmoe-1b-7b", "--costs", "b200"], "--costs: got 'b200', allowed: a100, this-machine, or the path"),
        (["olmoe-1b-7b", "--table", "mine"], "tables='mine' is not a shipped table"),
        (["olmoe-1b-7b", "--codecs", "zip"], "codecs has 'zip'"),
        (["olmoe-1b-7b", "--world-size", "12"], "world_size=12 in nodes of 8 is not allowed"),
        (["olmoe-1b-7b", "--json", "/no/such/folder/x.json"], "cannot be written: No such file or directory"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ciera: ") and text in captured.err and captured.err.count("\n") == 1


def test_costs_may_be_given_or_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({codec: cost.to_json() for codec, cost in MACHINES["a100"].items()}))
    assert main(["plan", "olmoe-1b-7b", "--costs", str(path)]) == 0
    assert f"codec costs: {path}" in " ".join(capsys.readouterr().out.split())
    path.write_text("[]")
    assert main(["plan", "olmoe-1b-7b", "--costs", str(path)]) == 2
    assert "does not hold codec costs" in capsys.readouterr().err
    assert main(["plan", "olmoe-1b-7b", "--costs", "this-machine", "--codecs", "entropy", "raw"]) == 0
    assert "measured on this machine's CPU just now" in capsys.readouterr().out

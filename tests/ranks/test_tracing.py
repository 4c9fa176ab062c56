"""Recorded steps as traces: nothing of a step is lost, and the trainer writes one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.profiling.instruments import Instruments, Recorded
from fsdp_ciera.profiling.trace import Trace
from fsdp_ciera.profiling.tracing import RecordedStep, build_trace
from fsdp_ciera.recipes.config import recipe_from_tables
from fsdp_ciera.recipes.train import train
from fsdp_ciera.testing import run_ranks
from tiny_models import save_tiny_model, write_text

FACTS = {
    "contender": "fsdp2", "world_size": 2, "ranks_per_host": 1, "num_cores": 2, "rate_bits_per_second": None,
    "is_serial": True, "item_bytes": 2, "reduce_item_bytes": 2, "num_parameters": 0,
}  # fmt: skip


def step_of(gather_seconds: float, *, with_backward: bool = True) -> RecordedStep:
    """Forward from 10, backward from 12, a gather at 11 and, if wanted, one at 13."""
    recorded = [Recorded("AllGather", "forward", None, 11.0, 11.0 + gather_seconds, 100, 100, 1)]
    if with_backward:
        recorded.append(Recorded("AllGather", "backward", None, 13.0, 13.5, 100, 100, 1))
    return RecordedStep(10.0, 15.0, recorded, (("forward", 10.0), ("backward", 12.0), ("optimizer", 14.0)))


def test_what_lies_between_is_compute_of_its_phase() -> None:
    trace = build_trace([step_of(0.5)], [], **FACTS)
    assert [(event.node, event.phase, event.seconds) for event in trace.events] == [
        ("Compute", "forward", 1.0),
        ("AllGather", "forward", 0.5),
        ("Compute", "forward", 0.5),
        ("Compute", "backward", 1.0),
        ("AllGather", "backward", 0.5),
        ("Compute", "backward", 0.5),
        ("Compute", "optimizer", 1.0),
    ]
    assert trace.iteration_seconds == (5.0,)
    assert sum(event.seconds for event in trace.events) == 5.0
    assert Trace.from_json(trace.to_json()) == trace


def test_the_median_step_counts() -> None:
    trace = build_trace([step_of(seconds) for seconds in (0.1, 0.25, 0.9)], [], **FACTS)
    assert [event.seconds for event in trace.events if event.node == "AllGather"] == pytest.approx([0.25, 0.5])
    assert len(trace.iteration_seconds) == 3


def test_steps_that_differ_make_no_trace() -> None:
    with pytest.raises(ValueError, match="the recorded steps differ in what they gathered"):
        build_trace([step_of(0.5), step_of(0.5, with_backward=False)], [], **FACTS)


def test_a_file_that_is_no_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="not a trace of format 1"):
        Trace.from_json("{}")
    text = build_trace([step_of(0.5)], [], **FACTS).to_json()
    with pytest.raises(ValueError, match="'Gather' in 'forward' is none of"):
        Trace.from_json(text.replace('"AllGather"', '"Gather"'))


def collectives_come_back(rank: int, world_size: int) -> None:
    before = dist.all_reduce
    with Instruments():
        assert dist.all_reduce is not before
    assert dist.all_reduce is before


def test_collectives_are_torchs_own_again_afterwards() -> None:
    run_ranks(collectives_come_back, 1)


def train_traced(rank: int, world_size: int, folder: Path, policy: str, trace_steps: int) -> tuple[list[float], str]:
    tables = {
        "model": {"folder": str(folder / "model")},
        "data": {"files": [str(folder / "t.txt")], "seq_len": 32},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 5, "output": str(folder / f"{policy}-{trace_steps}"), "gradient_accumulation": 2},
        "ciera": {"policy": "none"} if policy == "none" else {"policy": "default", "codecs": [policy]},
        "metrics": {"trace_steps": trace_steps},
    }
    result = train(recipe_from_tables(tables))
    return result.losses, result.final_parameters_digest


def test_the_trainer_records_a_trace_and_changes_nothing(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    write_text(tmp_path / "t.txt")
    traces = {}
    for policy in ("none", "value_delta"):
        plain = run_ranks(train_traced, 2, tmp_path, policy, 0)
        assert not (tmp_path / f"{policy}-0" / "trace.json").exists()
        assert run_ranks(train_traced, 2, tmp_path, policy, 2) == plain
        traces[policy] = Trace.load(tmp_path / f"{policy}-2" / "trace.json")
    stock, ours = traces["none"], traces["value_delta"]
    assert len(stock.iteration_seconds) == 2 and stock.world_size == 2 and len(stock.groups) == 3
    assert all(group.values_per_rank > 0 and group.name for group in stock.groups)
    gathers = [event for event in stock.events if event.node == "AllGather"]
    # two micro-batches; the root keeps its parameters from forward to backward, the two layers do not
    assert len(gathers) == 2 * (3 + 2)
    for event in gathers:
        assert event.group is not None and event.payload_bytes == 2 * stock.groups[event.group].values_per_rank
    assert [event.node for event in stock.events].count("ReduceScatter") == 3
    assert {"Hash", "Cmp", "Decmp"} <= {event.node for event in ours.events}
    assert not {"Hash", "Cmp", "Decmp"} & {event.node for event in stock.events}


def test_a_trace_on_cuda_is_refused() -> None:
    import torch

    from fsdp_ciera.recipes.tracer import Tracer

    tables = {"model": {"folder": "m"}, "data": {"files": ["t"]}, "metrics": {"trace_steps": 1}}
    with pytest.raises(RecipeError, match=r"metrics\.trace_steps: got 1, allowed: 0, unless"):
        Tracer(torch.nn.Linear(1, 1), recipe_from_tables(tables), torch.device("cuda"), 0)

"""fsdp_ciera/bench/zero3.py: DeepSpeed ZeRO-3 trains the stand's job, with FSDP2's numbers as far as it can.

Both start from the same fp32 weights and compute in bf16, so the first forward multiplies the same numbers: its loss has the
same bits wherever this was run. The tolerance of 1e-5 leaves room for kernels that go by the alignment of what was gathered.
Later losses differ by the order of additions in the gradients.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ciera.bench.job import TrainingJob
from fsdp_ciera.bench.options import JobOptions
from fsdp_ciera.bench.zero3 import Zero3Job, build_engine
from fsdp_ciera.errors import MissingPeerError, PeerError
from fsdp_ciera.testing import run_ranks

WORLD_SIZE, NUM_LAYERS, NUM_STEPS, TOKENS_PER_RANK, VOCAB = 2, 2, 4, 16, 67
OPTIONS = JobOptions(learning_rate=1e-2, tokens_per_rank=TOKENS_PER_RANK)

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install deepspeed==0.19.8"
)


class NoWatch:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def enter(self, phase: str) -> None:
        self.phases.append(phase)


@dataclass
class Seen:
    """What one rank saw."""

    fsdp2_losses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    collectives: list[tuple[str, torch.dtype, int]] = field(default_factory=list)
    """Of the last step: name, dtype, values of the smaller tensor."""
    stretches: list[int] = field(default_factory=list)
    """Of each parameter: the values that a rank keeps."""
    masters_are_exact: bool = False
    processes_run: list[str] = field(default_factory=list)


def _model() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=35, intermediate_size=33, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=18, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the default one wants even dimensions, and these divide by nothing
    model: nn.Module = MixtralForCausalLM(config)
    return model.train()


def _train(rank: int, world_size: int) -> Seen:
    seen = Seen()
    # Every rank's tokens are the same in every step, so that the loss must fall.
    tokens = torch.randint(VOCAB, (world_size * TOKENS_PER_RANK,), generator=torch.Generator().manual_seed(1))
    stock: Any = _model()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*stock.model.layers, stock):
        torch_fully_shard(module, mp_policy=mixed)
    fsdp2_job = TrainingJob(stock, tokens, OPTIONS, NoWatch(), settle=False)
    seen.fsdp2_losses = [fsdp2_job.step(step) for step in range(NUM_STEPS)]

    _watch_collectives(seen)
    _watch_processes(seen)
    model = _model()
    exact = [parameter.detach().clone().view(-1) for parameter in model.parameters()]
    watch = NoWatch()
    job = Zero3Job(model, tokens, OPTIONS, watch)
    seen.masters_are_exact = True
    from deepspeed.utils import safe_get_local_fp32_param

    for parameter, values in zip(model.parameters(), exact, strict=True):
        master = safe_get_local_fp32_param(parameter)
        length = -(-len(values) // world_size)
        own = values[rank * length : (rank + 1) * length]
        seen.stretches.append(length)
        seen.masters_are_exact &= len(master) == length and torch.equal(master[: len(own)], own)
    for step in range(NUM_STEPS):
        seen.collectives.clear()
        watch.phases.clear()
        seen.losses.append(job.step(step))
    seen.phases = watch.phases
    return seen


def _watch_collectives(seen: Seen) -> None:
    """Before DeepSpeed is imported, as it keeps references. One call is seen once: under its outermost name."""
    is_inside = False

    def counted(name: str, original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return original(*args, **kwargs)
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if tensors:
                smallest = min(tensors, key=torch.Tensor.numel)
                seen.collectives.append((name, smallest.dtype, smallest.numel()))
            is_inside = True
            try:
                return original(*args, **kwargs)
            finally:
                is_inside = False

        return collective

    words = ("gather", "reduce", "scatter", "broadcast", "all_to_all", "send", "recv")
    for name in dir(dist):
        original = getattr(dist, name)
        if callable(original) and not isinstance(original, type) and any(word in name for word in words):
            replacement = counted(name, original)
            for module in (dist, dist.distributed_c10d):
                if hasattr(module, name):
                    setattr(module, name, replacement)


def _watch_processes(seen: Seen) -> None:
    def popen(self: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
        seen.processes_run.append(str(arguments))
        raise FileNotFoundError("no process is started in this test")

    mock.patch.object(subprocess.Popen, "__init__", popen).start()  # this process is the test's own, and ends with it


@pytest.fixture(scope="module")
def both_ranks() -> list[Seen]:
    return run_ranks(_train, WORLD_SIZE)


@needs_deepspeed
def test_it_trains_as_fsdp2_does(both_ranks: list[Seen]) -> None:
    for seen in both_ranks:
        assert seen.losses[0] == pytest.approx(seen.fsdp2_losses[0], rel=1e-5)
        assert seen.losses == pytest.approx(seen.fsdp2_losses, rel=5e-3)
        assert seen.losses[-1] < seen.losses[0] - 0.1
        assert seen.losses == both_ranks[0].losses
        assert seen.phases == ["forward", "backward", "optimizer"]


@needs_deepspeed
def test_masters_are_the_fp32_weights_and_not_those_rounded_to_bf16(both_ranks: list[Seen]) -> None:
    assert all(seen.masters_are_exact for seen in both_ranks)


@needs_deepspeed
def test_parameters_are_gathered_in_bf16_twice_a_step_and_gradients_reduced_once(both_ranks: list[Seen]) -> None:
    for seen in both_ranks:
        names = {name for name, _, _ in seen.collectives}
        assert names == {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"}, "instruments know no others"
        gathers = [(dtype, length) for name, dtype, length in seen.collectives if "gather" in name]
        reductions = [(dtype, length) for name, dtype, length in seen.collectives if "scatter" in name]
        assert {dtype for dtype, _ in gathers + reductions} == {torch.bfloat16}
        assert len(gathers) == 2 * (NUM_LAYERS + 3)  # whole layers; embedding, norm and LM head
        assert sum(length for _, length in gathers) == 2 * sum(seen.stretches)
        assert sum(length for _, length in reductions) == sum(seen.stretches)
        assert len(reductions) <= NUM_LAYERS + 2


@needs_deepspeed
def test_no_compiler_or_other_process_runs(both_ranks: list[Seen]) -> None:
    assert [seen.processes_run for seen in both_ranks] == [[], []]


def test_errors_say_what_is_wrong_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="reduce_dtype='float16' is not allowed with ZeRO-3: one of bfloat16, float32"):
        build_engine(nn.Linear(2, 2), learning_rate=1e-3, reduce_dtype="float16")
    with pytest.raises(PeerError, match=r"starts from fp32 parameters, but the model has \['torch.bfloat16'\]"):
        build_engine(nn.Linear(2, 2).bfloat16(), learning_rate=1e-3)
    with pytest.raises(PeerError, match="needs a process group"):
        build_engine(nn.Linear(2, 2), learning_rate=1e-3)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name in ("DS_ACCELERATOR", "LOCAL_SIZE"):  # they are back as they were after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingPeerError, match=r"pip install deepspeed==0\.19\.8"):
        build_engine(nn.Linear(2, 2), learning_rate=1e-3)

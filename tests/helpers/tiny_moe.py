"""A small MoE in plain torch whose dimensions divide by nothing, and a training loop with everything that users do in it.

`compare_all_with_stock` runs the same operations several times in one process group, under stock FSDP2 and then under each
of several policies, and demands equal bits of every loss and every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from backends_under_test import use_backend
from fsdp_ciera import (
    CieraPolicy,
    CieraStats,
    attach,
    detach,
    fully_shard,
    invalidate,
    settle_sizes,
    stats,
)
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.planning import CodecCost, Link
from fsdp_ciera.testing import check_equal

VOCAB, HIDDEN, INTERMEDIATE, NUM_LAYERS = 37, 20, 23, 2

PAPERS_CODEC = CieraPolicy(codecs=("exponent_block",))
BY_BYTES: dict[str, Any] = {"link": Link(0.0, 1e3), "codec_costs": {name: CodecCost() for name in CODECS}}
"""Figures for a policy of several codecs, so that it measures nothing and bytes are all that counts."""


class Experts(nn.Module):
    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * intermediate, hidden) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(num_experts, hidden, intermediate) * 0.1)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("th,eih->eti", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("eti,ehi,te->th", F.silu(gate) * up, self.down_proj, weights)


class Moe(nn.Module):
    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden, intermediate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x).softmax(-1))


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden)
        self.v_proj = nn.Linear(hidden, hidden)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q_proj(x) @ self.k_proj(x).T
        return self.o_proj(scores.softmax(-1) @ self.v_proj(x))


class Layer(nn.Module):
    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.self_attn = Attention(hidden)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.mlp = Moe(num_experts, hidden, intermediate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, case.hidden)
        self.layers = nn.ModuleList(Layer(case.num_experts, case.hidden, case.intermediate) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(case.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class TinyMoe(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = Trunk(case)
        self.lm_head = nn.Linear(case.hidden, VOCAB, bias=False)
        if case.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm_head(self.model(tokens)), tokens.roll(-1))


@dataclass(frozen=True)
class Case:
    """One way to shard and train."""

    num_experts: int = 4
    hidden: int = HIDDEN
    intermediate: int = INTERMEDIATE
    tied: bool = True
    param_dtype: torch.dtype | None = torch.bfloat16
    model_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool | int = True
    mesh_shape: tuple[int, ...] | None = None
    shard_dim_1: bool = False
    experts_mesh: bool = False
    checkpointing: bool = False
    use_attach: bool = False
    lr: float = 1e-3
    operations: tuple[str, ...] = ("train",) * 5


def recover(model: nn.Module) -> None:
    """What users do after an exception in a pass."""
    if hasattr(model, "reset_iter_state"):  # torch 2.12 on
        model.reset_iter_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def build(case: Case, policy: CieraPolicy | None) -> nn.Module:
    torch.manual_seed(1)
    model = TinyMoe(case).to(case.model_dtype)
    arguments: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=case.param_dtype, reduce_dtype=torch.float32)
    }
    if case.mesh_shape is not None:
        arguments["mesh"] = init_device_mesh("cpu", case.mesh_shape, mesh_dim_names=("replicate", "shard"))
    if case.shard_dim_1:
        arguments["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 3 else Shard(0)
    if case.checkpointing:
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer)
    shard: Callable[..., Any] = torch_fully_shard
    if policy is not None and not case.use_attach:
        arguments["ciera_policy"] = policy
        shard = fully_shard
    for layer in model.model.layers:
        layer_arguments = dict(arguments)
        if case.experts_mesh:
            layer_arguments["shard_placement_fn"] = experts_on_pairs()
        shard(layer, reshard_after_forward=case.reshard_after_forward, **layer_arguments)
    shard(model, **arguments)
    if policy is not None and case.use_attach:
        attach(model, policy)
    return model


def experts_on_pairs() -> Callable[[nn.Parameter], Any]:
    """Experts (3-D) sharded over pairs of ranks, the rest over all: two parameter groups in one FSDP module."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    pairs = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("outer", "inner"))
    experts_info = FSDPMeshInfo(mesh=pairs["inner"], shard_mesh_dim=0)
    all_info = FSDPMeshInfo(mesh=init_device_mesh("cpu", (dist.get_world_size(),)), shard_mesh_dim=0)
    return lambda p: ShardPlacementResult(Shard(0), experts_info if p.ndim == 3 else all_info)


class Training:
    """A model with its optimizer, and every operation of a `Case` as a method that returns what it computed."""

    def __init__(self, case: Case, policy: CieraPolicy | None) -> None:
        self.policy = policy
        self.model = build(case, policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=case.lr, foreach=True)
        self._generator = torch.Generator().manual_seed(100 + dist.get_rank())
        self._snapshot = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._num_mutations = 0

    def train(self) -> list[torch.Tensor]:
        seen = [self._forward_backward()]
        self._step()
        return seen

    def accumulate(self) -> list[torch.Tensor]:
        seen = [self._forward_backward(), self._forward_backward()]
        self._step()
        return seen

    def no_sync(self) -> list[torch.Tensor]:
        """Accumulation without reduce-scatter."""
        seen = []
        for last in (False, True):
            self.model.set_requires_gradient_sync(last)
            seen.append(self._forward_backward())
        self._step()
        return seen

    def skip(self) -> list[torch.Tensor]:
        """A step that is not taken, as after an overflow."""
        seen = [self._forward_backward()]
        self.optimizer.zero_grad()
        return seen

    def eval(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self._loss()]

    def inference(self) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [self._loss().clone()]

    def forward_only(self) -> list[torch.Tensor]:
        self._loss()
        reshard(self.model)
        return []

    def load(self) -> list[torch.Tensor]:
        reshard(self.model)
        self.model.load_state_dict(self._snapshot)
        return []

    def mutate(self) -> list[torch.Tensor]:
        reshard(self.model)
        self._num_mutations += 1
        for index, parameter in enumerate(self.model.parameters()):
            noise = torch.Generator().manual_seed(index + 7 * dist.get_rank() + 100 * self._num_mutations)
            local = parameter.data.to_local()
            local.copy_(local + 0.5 * torch.randn(local.shape, generator=noise))
        return []

    def mutate_rank_0(self) -> list[torch.Tensor]:
        """Behind the back of the other ranks, and of only a few values."""
        reshard(self.model)
        if dist.get_rank() == 0:
            for parameter in self.model.parameters():
                parameter.data.to_local().view(-1)[::7] *= 1.25
        return []

    def invalidate(self) -> list[torch.Tensor]:
        if self.policy is not None:
            invalidate(self.model)
        return []

    def invalidate_rank_0(self) -> list[torch.Tensor]:
        if self.policy is not None and dist.get_rank() == 0:
            invalidate(self.model)
        return []

    def settle(self) -> list[torch.Tensor]:
        if self.policy is not None:
            settle_sizes(self.model)
        return []

    def detach_attach(self) -> list[torch.Tensor]:
        if self.policy is not None:
            detach(self.model)
            attach(self.model, self.policy)
        return []

    def freeze(self) -> list[torch.Tensor]:
        for name, parameter in self.model.named_parameters():
            if "experts" in name:
                parameter.requires_grad_(False)
        return []

    def unfreeze(self) -> list[torch.Tensor]:
        self.model.requires_grad_(True)
        return []

    def specials(self) -> list[torch.Tensor]:
        reshard(self.model)
        plant_special_values(self.model)
        return []

    def unshard(self) -> list[torch.Tensor]:
        seen = []
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                seen += [p.detach().clone() for p in module.parameters() if not isinstance(p, DTensor)]
                module.reshard()
        return seen

    def unshard_async(self) -> list[torch.Tensor]:
        handle = self.model.unshard(async_op=True)
        handle.wait()
        seen = [p.detach().clone() for p in self.model.parameters() if not isinstance(p, DTensor)]
        self.model.reshard()
        return seen

    def _loss(self) -> torch.Tensor:
        return self.model(torch.randint(VOCAB, (29,), generator=self._generator))

    def _forward_backward(self) -> torch.Tensor:
        loss = self._loss()
        loss.backward()
        return loss.detach().clone()

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(case: Case, policy: CieraPolicy | None) -> tuple[list[torch.Tensor], CieraStats | None]:
    """After each operation what it computed, then all parameters' local shards."""
    seen, report = run_named(case, policy)
    return [value for _, value in seen], report


def run_named(case: Case, policy: CieraPolicy | None) -> tuple[list[tuple[str, torch.Tensor]], CieraStats | None]:
    """`run`, with a name for each tensor that says which operation made it."""
    training = Training(case, policy)
    seen: list[tuple[str, torch.Tensor]] = []
    for index, operation in enumerate(case.operations):
        label = f"operation {index}, {operation}"
        seen += [(f"{label}: result {i}", value) for i, value in enumerate(getattr(training, operation)())]
        for name, parameter in training.model.named_parameters():
            seen.append((f"{label}: {name}", local_part(parameter).clone()))
    return seen, stats(training.model) if policy is not None else None


def reshard(model: nn.Module) -> None:
    """The root keeps its parameters after a forward without backward; weights are written to shards only."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def plant_special_values(model: nn.Module) -> None:
    """NaNs with payloads, infinities, signed zeros and denormals at the start of every local shard."""
    patterns = torch.tensor([0x7FC1, 0xFFA3, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x807F], dtype=torch.int32)
    values = patterns.to(torch.int16).view(torch.bfloat16)
    for parameter in model.parameters():
        local = parameter.data.to_local().view(-1)
        local[: len(values)] = values[: local.numel()].to(local.dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def compare_with_stock(rank: int, world_size: int, case: Case, policy: CieraPolicy) -> CieraStats:
    """Runs `case` under stock FSDP2 and under `policy`; every loss and parameter must have equal bits."""
    return compare_all_with_stock(rank, world_size, case, {"": policy})[""]


def compare_all_with_stock(
    rank: int, world_size: int, case: Case, policies: Mapping[str, CieraPolicy]
) -> dict[str, CieraStats]:
    """`compare_with_stock` for each of `policies` by name; stock FSDP2 runs once. The counts of each."""
    return compare_setups(rank, world_size, case, {name: ("cpu", policy) for name, policy in policies.items()})


def compare_setups(
    rank: int, world_size: int, case: Case, setups: Mapping[str, tuple[str, CieraPolicy]]
) -> dict[str, CieraStats]:
    """The same for policies with the name of the backend to run on (backends_under_test.py)."""
    expected, _ = run_named(case, None)
    assert expected
    reports = {}
    for name, (backend, policy) in setups.items():
        use_backend(backend)
        got, report = run_named(case, policy)
        check_equal(expected, got, f"rank {rank}, {name}, {case}, {policy}")
        assert report is not None
        reports[name] = report
    return reports

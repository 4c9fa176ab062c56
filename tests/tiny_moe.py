"""A small MoE in plain torch whose dimensions divide by nothing, and a training loop with everything that users do in it.

`compare_with_stock` runs the same operations twice in one process group, under stock FSDP2 and under fsdp_ciera, and
demands equal bits of every loss and every parameter.
"""

from __future__ import annotations

from collections.abc import Callable
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

from fsdp_ciera import CieraPolicy, CieraStats, attach, detach, fully_shard, invalidate, stats

VOCAB, HIDDEN, INTERMEDIATE, NUM_LAYERS = 37, 20, 23, 2


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


def run(case: Case, policy: CieraPolicy | None) -> tuple[list[torch.Tensor], CieraStats | None]:
    """All losses, then all parameters' local shards after each operation."""
    model = build(case, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    snapshot = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        return model(torch.randint(VOCAB, (29,), generator=generator))

    for operation in case.operations:
        if operation in ("train", "accumulate"):
            for _ in range(2 if operation == "accumulate" else 1):
                value = loss()
                seen.append(value.detach().clone())
                value.backward()
            optimizer.step()
            optimizer.zero_grad()
        elif operation == "no_sync":  # accumulation without reduce-scatter
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                value = loss()
                seen.append(value.detach().clone())
                value.backward()
            optimizer.step()
            optimizer.zero_grad()
        elif operation == "eval":
            with torch.no_grad():
                seen.append(loss())
        elif operation == "inference":
            with torch.inference_mode():
                seen.append(loss().clone())
        elif operation == "forward_only":
            loss()
            reshard(model)
        elif operation == "load":
            reshard(model)
            model.load_state_dict(snapshot)
        elif operation == "mutate":
            reshard(model)
            for index, parameter in enumerate(model.parameters()):
                noise = torch.Generator().manual_seed(index + 7 * dist.get_rank())
                local = parameter.data.to_local()
                local.copy_(local + 0.5 * torch.randn(local.shape, generator=noise))
        elif operation == "invalidate":
            if policy is not None:
                invalidate(model)
        elif operation == "invalidate_rank_0":
            if policy is not None and dist.get_rank() == 0:
                invalidate(model)
        elif operation == "detach_attach":
            if policy is not None:
                detach(model)
                attach(model, policy)
        elif operation == "freeze":
            for name, parameter in model.named_parameters():
                if "experts" in name:
                    parameter.requires_grad_(False)
        elif operation == "unfreeze":
            model.requires_grad_(True)
        elif operation == "specials":
            reshard(model)
            plant_special_values(model)
        elif operation == "unshard":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    seen += [p.detach().clone() for p in module.parameters() if not isinstance(p, DTensor)]
                    module.reshard()
        elif operation == "unshard_async":
            handle = model.unshard(async_op=True)
            handle.wait()
            seen += [p.detach().clone() for p in model.parameters() if not isinstance(p, DTensor)]
            model.reshard()
        else:
            raise ValueError(operation)
        seen += [local_part(parameter).clone() for parameter in model.parameters()]
    return seen, stats(model) if policy is not None else None


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
    expected, _ = run(case, None)
    got, report = run(case, policy)
    assert len(expected) == len(got) > 0
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(bits(a), bits(b)), (
            f"rank {rank}: tensor {index} of {len(expected)} differs, {case}, {policy}"
        )
    assert report is not None
    return report

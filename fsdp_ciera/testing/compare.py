"""`compare_with_stock`: the same training under stock FSDP2 and under a policy, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ciera.api import detach, fully_shard, stats
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.statistics import CieraStats

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class ShardFunction(Protocol):
    """`fully_shard`, of torch or of fsdp_ciera with the policy already given."""

    def __call__(self, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Shards a module, with the arguments of torch's `fully_shard` -> the module, which is now an `FSDPModule` too."""


def compare_with_stock(
    build: Callable[[ShardFunction], nn.Module],
    train: Callable[[nn.Module], Iterable[torch.Tensor]],
    policy: CieraPolicy | None = None,
    seed: int = 0,
) -> CieraStats:
    """Builds and trains a model twice: with torch's `fully_shard`, and with this package's and `policy`. Returns what was sent
    in the second training.

    `build(shard)` makes the model, seeds nothing, and calls `shard` where it would call `fully_shard`. `train(model)` returns
    or yields what should be compared: losses, outputs, gradients. All parameters are compared too, at the end. torch gets the
    same seed before each training. Call it on all ranks (`run_ranks`).

    Raises `AssertionError` on a rank where bits differ; it names the first tensor and how many of its bytes differ. Memory:
    both models are in memory at different times; what `train` yields is kept.
    """
    policy = CieraPolicy() if policy is None else policy
    trained: list[NamedTensors] = []
    report = CieraStats()
    for shard in (torch_fully_shard, partial(fully_shard, ciera_policy=policy)):
        torch.manual_seed(seed)
        model = build(shard)  # type: ignore[arg-type]
        results = [(f"result {number}", _local(value).clone()) for number, value in enumerate(train(model))]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        trained.append([*results, *((name, _local(value).clone()) for name, value in model.named_parameters())])
        if shard is not torch_fully_shard:
            report = stats(model)
            detach(model)
    check_equal(trained[0], trained[1], f"under {policy}")
    return report


def check_equal(expected: NamedTensors, got: NamedTensors, where: str) -> None:
    """Raises `AssertionError` unless both have the same names and the same bits: a NaN equals itself, -0 is not 0."""
    names, expected_names = ([name for name, _ in tensors] for tensors in (got, expected))
    assert names == expected_names, f"{where}: {names} where stock FSDP2 gives {expected_names}"
    for (name, stock), (_, ours) in zip(expected, got, strict=True):
        a, b = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (stock, ours))
        if not torch.equal(a, b):
            extent = f"{int((a != b).sum())} of {a.numel()} bytes" if a.numel() == b.numel() else f"{b.numel()} bytes"
            raise AssertionError(f"{where}: {name} differs from stock FSDP2's in {extent}")


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()

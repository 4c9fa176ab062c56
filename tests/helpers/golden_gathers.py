"""Golden gathers: shards made of integers alone, changed as an optimizer step might change them, gathered by every codec.

`python tests/helpers/golden_gathers.py --write` freezes what is sent and decoded; test_golden.py compares. No value comes from
floating-point arithmetic, so the digests are the same on every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_ciera import CieraPolicy, fully_shard, stats
from fsdp_ciera.testing import run_ranks

GOLDEN = Path(__file__).parent / "golden" / "gathers.json"
WORLD_SIZE = 4
CODECS = ("raw", "entropy", "exponent_block", "exponent_delta", "value_delta")
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "flat": {},
    "pairs": {"topology": "hierarchical", "ranks_per_node": 2},
}
SHARES = (0.0, 0.012, 0.0, 0.076, 0.5, 0.0)
"""Of the values, changed before each pass but the first."""
ROWS = {"mlp.experts.gate_up_proj": 1500, "self_attn.q_proj": 700, "embed_tokens": 901}
COLUMNS = 613


class Weights(nn.Module):
    """Named as models name them, so that several categories are among them; forward does nothing with them."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in ROWS.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(patterns(rows, len(name)), requires_grad=False))

    def forward(self) -> str:
        return digest(self)


def patterns(rows: int, seed: int) -> torch.Tensor:
    """bf16 [rows, COLUMNS] that look like trained weights: exponents 110 to 122, most of them large."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, COLUMNS)
    coins = torch.randint(1 << 12, shape, generator=generator)
    leading_zeros = 11 - (torch.stack([coins >> bit for bit in range(12)]) > 0).sum(0)
    words = (122 - leading_zeros) << 7 | torch.randint(128, shape, generator=generator)
    words |= torch.randint(2, shape, generator=generator) << 15
    return words.to(torch.int16).view(torch.bfloat16)


def change(model: nn.Module, step: int, share: float) -> None:
    """Moves a share of all values by one or two units in the last place, more of the small ones."""
    for number, parameter in enumerate(model.parameters()):
        local = parameter.data.to_local()  # type: ignore[attr-defined]
        words = local.view(torch.int16)
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + torch.distributed.get_rank())
        dice = torch.randint(1 << 20, words.shape, generator=generator)
        is_small = (words.to(torch.int32) >> 7 & 255) < 121
        chosen = dice < (share * (1 << 20) * torch.where(is_small, 1.6, 0.4)).to(torch.int64)
        moves = torch.randint(4, words.shape, generator=generator).to(torch.int16) - 2
        words += torch.where(chosen, moves, 0).to(torch.int16)


def digest(model: nn.Module) -> str:
    """Of all parameters, as they are gathered."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().clone().view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def gather_all(rank: int, world_size: int, policies: dict[str, CieraPolicy | None]) -> dict[str, Any]:
    """By policy: the digest of each pass, and bytes by phase."""
    found: dict[str, Any] = {}
    for name, policy in policies.items():
        model = fully_shard(Weights(), ciera_policy=policy, reshard_after_forward=True)
        digests = []
        for step in range(len(SHARES) + 1):
            if step:
                change(model, step, SHARES[step - 1])
            digests.append(model())
            assert isinstance(model, FSDPModule)
            model.reshard()
        report = None if policy is None else stats(model)
        by_phase = {} if report is None else {phase: amount.wire_bytes for phase, amount in report.by_phase.items()}
        found[name] = {"digests": digests, "wire_bytes": by_phase}
    return found


def measure() -> dict[str, Any]:
    """What all ranks saw; bytes are those of rank 0."""
    policies: dict[str, CieraPolicy | None] = {"stock": None}
    for topology, arguments in TOPOLOGIES.items():
        policies |= {f"{codec}, {topology}": CieraPolicy(codecs=(codec,), **arguments) for codec in CODECS}
    by_rank = run_ranks(gather_all, WORLD_SIZE, policies, timeout_s=300)
    for found in by_rank:
        assert [one["digests"] for one in found.values()] == [one["digests"] for one in by_rank[0].values()]
    return by_rank[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="freeze what this version does")
    found = measure()
    if parser.parse_args().write:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))

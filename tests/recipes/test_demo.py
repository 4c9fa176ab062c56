"""`ciera demo`: both runs, the summary, the picture, and the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_ciera.cli.demo import DemoOptions
from fsdp_ciera.cli.tasks.demo import summarize
from fsdp_ciera.recipes.demo_model import DemoModel
from fsdp_ciera.recipes.train import TrainResult

STATS = {
    "raw_bytes": 8, "wire_bytes": 4, "ratio": 2.0, "warm_ratio": 2.0, "reuse_rate": 1.0, "cache_bytes": 1,
}  # fmt: skip


def result(losses: list[float], stats: dict[str, Any] | None = None) -> TrainResult:
    return TrainResult(first_step=0, losses=losses, grad_norms=[1.0] * len(losses), seconds=losses, stats=stats)


@pytest.mark.parametrize(
    ("losses", "same_parameters", "identical", "difference"),
    [
        ([2.0, 1.0], True, True, 0.0),
        ([2.0, 1.0], False, False, 0.0),
        ([2.0, 1.0 + 2**-23], True, False, 2**-23),
    ],
)
def test_summary_tells_when_a_bit_differs(
    losses: list[float], same_parameters: bool, identical: bool, difference: float
) -> None:
    model = DemoModel(folder=Path("x"), name="m", pretrained=True, num_layers=1, num_parameters=1)
    summary = summarize(DemoOptions(steps=2), model, result([2.0, 1.0]), result(losses, STATS), same_parameters)
    assert summary["bit_identical"] is identical
    assert summary["max_abs_loss_diff"] == difference

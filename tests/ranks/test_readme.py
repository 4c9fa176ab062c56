"""The README's Python examples run as they stand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fsdp_ciera.planning import Link, conditions
from fsdp_ciera.testing import run_ranks
from places import ROOT
from tiny_moe import Case, TinyMoe

README = ROOT / "README.md"
EXAMPLES = dict(re.findall(r"<!-- test: (.*?) -->\n```python\n(.*?)```", README.read_text(), re.DOTALL))


def run_example(rank: int, world_size: int, source: str, sharded: bool) -> float:
    torch.manual_seed(0)
    model = TinyMoe(Case(hidden=64)).bfloat16()
    if sharded:
        fully_shard(model)
    seen: dict[str, Any] = {}
    conditions.measure_link = lambda group, backend: Link(0.0, 1e3)  # type: ignore[attr-defined]  # where it pays

    def train(model: torch.nn.Module) -> None:
        for _ in range(3):
            model(torch.arange(30)).backward()
        from fsdp_ciera import stats

        seen["ratio"] = stats(model).ratio

    exec(compile(source, str(README), "exec"), {"model": model, "train": train})
    return float(seen["ratio"])


@pytest.mark.parametrize(
    ("name", "sharded", "least_ratio"),
    # attach's policy leaves out attention and embedding
    [("own loop", False, 1.6), ("attach", True, 1.2), ("choose", False, 10)],
)
def test_example_runs_and_saves_bytes(name: str, sharded: bool, least_ratio: float) -> None:
    for ratio in run_ranks(run_example, 2, EXAMPLES[name], sharded):
        assert ratio > least_ratio


def test_every_python_example_is_run() -> None:
    assert sorted(EXAMPLES) == ["attach", "choose", "own loop"]
    assert README.read_text().count("```python") == len(EXAMPLES)


def test_files_that_the_architecture_names_exist() -> None:
    root = README.parent
    text = (root / "docs" / "architecture.md").read_text()
    names = re.findall(r"`([\w/]+\.(?:py|md))`", text)
    assert len(names) >= 10
    for name in names:
        assert any(root.glob(f"**/{name}")), name

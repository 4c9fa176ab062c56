"""`ciera profile` end to end on a tiny model: files, table, figures, what it prints, and that training is not touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fsdp_ciera import Profile, Profiler
from fsdp_ciera.cli.figures.profile import draw_profile
from fsdp_ciera.cli.main import main
from fsdp_ciera.cli.tasks.profile import codecs_table_of, cost_of, rates_table_of, table_of
from fsdp_ciera.policies.rates import Rates
from fsdp_ciera.policies.tables import load_table
from fsdp_ciera.recipes.config import load_recipe, recipe_from_tables
from fsdp_ciera.recipes.train import TrainResult, train
from fsdp_ciera.testing import run_ranks
from tiny_models import save_tiny_model, write_text

FIGURES = (
    "fig2_exponent_change.png",
    "fig3_shard_and_block_change.png",
    "fig4_distribution.png",
    "fig5_check_cost.png",
    "fig6_beyond_the_paper.png",
)
CATEGORIES = ["expert_ffn", "attention", "routing_gate", "layer_norm", "embedding"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `olmoe`, the text `t.txt` and the recipe `r.toml`."""
    root = tmp_path_factory.mktemp("profile")
    save_tiny_model(root / "olmoe")
    write_text(root / "t.txt")
    (root / "r.toml").write_text(
        f'[model]\nfolder = "{root}/olmoe"\n[data]\nfiles = "{root}/t.txt"\nseq_len = 32\n[optimizer]\nlr = 1e-3\n'
        f'[train]\nsteps = 5\noutput = "{root}/out"\n[parallel]\nranks = 2\n[ciera]\npolicy = "none"\n',
        encoding="utf-8",
    )
    return root


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    """The command, run on two local ranks."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "fsdp_ciera", "profile", str(folder / "r.toml"), "--warmup-steps", "2"]
    return subprocess.run(
        [*command, "--set", "train.seed=3", "--table", "tiny"],
        env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_command_writes_profile_table_and_figures(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    output = folder / "out" / "profile"
    assert sorted(path.name for path in output.iterdir()) == sorted((*FIGURES, "profile.json", "table.json"))
    assert all((output / name).read_bytes().startswith(b"\x89PNG") for name in FIGURES)
    profile = Profile.from_json(json.loads((output / "profile.json").read_text()))
    assert (profile.model, profile.world_size, profile.steps, profile.num_steps) == ("olmoe", 2, (3, 5), 5)
    assert [look.step for look in profile.series] == [2, 3, 4, 5]
    assert list(profile.num_values) == CATEGORIES
    for name in CATEGORIES:
        rates = profile.rates[name]
        assert rates.exponent_change is not None and rates.value_change is not None
        assert 0 < rates.exponent_change <= rates.value_change < 1
        assert list(profile.shard_change[name]) == [2, 4, 8, 16]
        assert all(0 < bits <= 64 for bits in rates.codec_bits.values())
    table = json.loads((output / "table.json").read_text())
    assert (table["name"], table["model"], table["format"]) == ("tiny", "olmoe", 1)
    assert table["provenance"]["optimizer"] == "AdamW, betas 0.9 and 0.95, weight decay 0, fp32 masters"
    assert table["provenance"]["notes"] == (
        "the learning rate is the peak: cosine decay to 0 of it over 5 steps; 1 x 32 tokens a rank"
    )
    (entry,) = table["entries"]
    assert (entry["lr"], entry["steps"], entry["interval"]) == (1e-3, [3, 5], 1)
    assert {name: Rates.from_json(rates) for name, rates in entry["categories"].items()} == dict(profile.rates)
    assert list(entry["categories"]) == [*CATEGORIES, "all"]
    assert load_table(str(output / "table.json")).lrs == [1e-3]


def test_command_shows_progress_and_a_table(done: subprocess.CompletedProcess[str]) -> None:
    assert "step 5/5" in done.stdout
    assert "olmoe: what each step changes (%), steps 3 to 5, 2 ranks" in done.stdout
    for word in ("expert ffn", "value_delta", "% of the iteration at interval 1 (derived:", "fig4_distribution.png"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup-steps", "5"], "train.steps: got 5, allowed: at least 6 to measure a step after --warmup-steps 5"),
        (["--interval", "3", "--warmup-steps", "0"], "allowed: at least 6 to measure"),
        (["--set", "train.stepz=3"], "train.stepz is not a key"),
        (["--set", "data.files=nowhere/*.txt", "--warmup-steps", "1"], "data.files"),
    ],
)
def test_command_refuses_before_it_starts(
    folder: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["profile", str(folder / "r.toml"), *arguments]) == 2
    assert message in capsys.readouterr().err


class _Observer:
    """As the command's, without files."""

    def __init__(self, model: nn.Module) -> None:
        self.profiler = Profiler(model, interval=2, warmup_steps=0)
        self.calls: list[str] = []

    def step(self) -> None:
        self.calls.append("step")
        self.profiler.step()

    def finish(self) -> None:
        self.calls.append("finish")
        self.profiler.result()


def train_with_and_without(rank: int, world_size: int, tables: dict[str, Any]) -> tuple[TrainResult, TrainResult]:
    observers: list[_Observer] = []

    def observe(model: nn.Module) -> _Observer:
        observers.append(_Observer(model))
        return observers[-1]

    plain = train(recipe_from_tables(tables))
    observed = train(recipe_from_tables(tables), observe=observe)
    (observer,) = observers
    assert observer.calls == ["step"] * 4 + ["finish"]
    return plain, observed


def test_measuring_changes_no_bit(folder: Path) -> None:
    tables = {
        "model": {"folder": str(folder / "olmoe")},
        "data": {"files": str(folder / "t.txt"), "seq_len": 32},
        "train": {"steps": 4, "output": str(folder / "same")},
        "ciera": {"policy": "none"},
    }
    for plain, observed in run_ranks(train_with_and_without, 2, tables):
        assert plain.losses == observed.losses and plain.grad_norms == observed.grad_norms
        assert plain.final_parameters_digest == observed.final_parameters_digest


# --- reports of profiles that are not the usual ones


def small_profile(**changes: Any) -> Profile:
    model = nn.ModuleDict({"mlp": nn.Linear(64, 64, bias=False)})
    profiler = Profiler(model, interval=3, warmup_steps=0)
    for _ in range(6):
        model["mlp"].weight.data *= 1.01
        profiler.step()
    return replace(profiler.result(), **changes)


def test_figures_and_tables_of_one_rank_and_interval(tmp_path: Path, folder: Path) -> None:
    profile = small_profile()
    assert [path.name for path in draw_profile(profile, tmp_path)] == list(FIGURES)
    assert str(rates_table_of(profile).title).startswith(
        "ModuleDict: what every 3 steps changes (%), steps 4 to 6, 1 rank"
    )
    assert codecs_table_of(profile).row_count == 2
    assert "at interval 3 (derived:" in cost_of(profile)
    recipe = load_recipe(
        folder / "r.toml", ["schedule.decay=constant", "schedule.warmup_steps=1", "train.gradient_accumulation=2"]
    )
    table = table_of(profile, recipe, "t")
    assert table["provenance"]["notes"] == (  # type: ignore[index]
        "the learning rate rises over the first 1 steps; 1 x 32 tokens a rank, 2 micro-batches"
    )


def test_figures_of_a_run_that_was_too_short(tmp_path: Path) -> None:
    profile = small_profile(rates={}, shard_change={}, distribution={}, steps=None, check_seconds=None)
    assert [path.name for path in draw_profile(profile, tmp_path)] == ["fig2_exponent_change.png"]
    assert draw_profile(replace(profile, series=()), tmp_path) == []
    assert cost_of(profile) == "the cost of looking was not measured"

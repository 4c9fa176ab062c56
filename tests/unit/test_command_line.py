"""The command line: what it reads, what it says of wrong words, and that help does not wait for torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_ciera.cli.bench_compare import CompareOptions
from fsdp_ciera.cli.bench_gather import GatherOptions
from fsdp_ciera.cli.finetune import FinetuneOptions
from fsdp_ciera.cli.main import BenchOptions, main, parse
from fsdp_ciera.cli.simulate import SimulateOptions
from places import ROOT


def test_help_needs_no_torch() -> None:
    program = "import sys; from fsdp_ciera.cli.main import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("False")
    for command in ("finetune", "demo", "profile", "plan", "bench", "simulate"):
        assert f"• {command}" in done.stdout


@pytest.mark.parametrize("words", [["plan"], ["bench", "gather"], ["bench", "compare"], ["finetune"], ["profile"]])
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert f"usage: ciera {' '.join(words)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Expected one of {finetune, demo, profile, plan, bench, simulate}"),
        (["plan"], "MODEL"),
        (["demo", "--ranks", "0"], "--ranks: '0' is not a whole number of at least 1"),
        (["profile", "r.toml", "--warmup-steps", "-1"], "--warmup-steps"),
        (["simulate", "--speedup", "0"], "'0' is not above 0"),
        (["simulate", "--topology", "round"], "'flat', 'hierarchical'"),
        (["bench", "e2e", "--lr", "-1"], "--lr"),
        (["demo", "--rank", "2"], "--rank"),  # no abbreviations
    ],
)
def test_wrong_words_are_said_in_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("ciera: ") and says in error and error.count("\n") == 1


def test_options_are_what_the_words_say() -> None:
    finetune = parse(["finetune", "r.toml", "--set", "train.steps=3", "--set", "ciera.policy=none"])
    assert finetune == FinetuneOptions(recipe="r.toml", overrides=("train.steps=3", "ciera.policy=none"))
    simulate = parse(["simulate", "a.json", "b.json", "--gpus", "16", "8", "8", "--json", "-", "--unvalidated"])
    assert simulate == SimulateOptions(
        traces=(Path("a.json"), Path("b.json")), gpus=(16, 8, 8), json_path="-", unvalidated=True
    )
    assert isinstance(simulate, SimulateOptions) and simulate.world_sizes == [8, 16]
    compare = parse(["bench", "compare", "a", "b", "--plot", "p.png"])
    assert compare == BenchOptions(bench=CompareOptions(first=Path("a"), others=(Path("b"),), plot=Path("p.png")))


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ([], ("200mbit", "1gbit")),
        (["--loopback"], (None,)),
        (["--rate", "100mbit", "none"], ("100mbit", None)),
        (["--rate", "100mbit", "--rate", "1gbit"], ("100mbit", "1gbit")),
    ],
)
def test_rates_of_gathers(words: list[str], rates: tuple[str | None, ...]) -> None:
    command = parse(["bench", "gather", *words])
    assert isinstance(command, BenchOptions) and isinstance(command.bench, GatherOptions)
    assert command.bench.rates == rates
    assert command.bench.sizes_bytes == tuple(size << 10 for size in (64, 256, 1024, 4096, 16384, 65536))


def test_a_size_is_checked_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gather", "--loopback", "--sizes", "64kib"]) == 2
    error = capsys.readouterr().err
    assert "ciera: --sizes: '64kib' is not a byte size" in error and error.count("\n") == 1


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code and capsys.readouterr().out.startswith("ciera ")


def test_imports_go_one_way() -> None:
    """The contracts in pyproject.toml: rooms import rooms below them alone, and there is no circle."""
    root = ROOT
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

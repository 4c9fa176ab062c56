"""The stand itself: the ring, turns in forked ranks, equal bits, counted bytes, and failures that stay with their contender."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_ciera.bench.contenders import ABLATION, CONTENDERS, Kind, chosen, reshard_size
from fsdp_ciera.bench.job import JobModel
from fsdp_ciera.bench.netns import NetnsCluster
from fsdp_ciera.bench.options import JobOptions, RunOptions
from fsdp_ciera.bench.rank import STOPPED, run_forked
from fsdp_ciera.bench.report import verdicts
from fsdp_ciera.bench.results import Results
from fsdp_ciera.bench.ring import ring_reduce_scatter
from fsdp_ciera.bench.run import measure_contenders
from fsdp_ciera.cli.bench_e2e import E2EOptions
from fsdp_ciera.cli.main import BenchOptions, main, parse
from fsdp_ciera.cli.tasks import bench_e2e as e2e
from fsdp_ciera.errors import NetnsError
from fsdp_ciera.profiling.trace import Trace
from fsdp_ciera.testing import run_ranks

LOSSLESS = ["fsdp2", "fsdp2-keep", "zstd", "value_delta", "default-settled"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobModel:
    """A Mixtral of 3.9 M random weights in place of the pretrained one, and its text."""
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("bench") / "job"
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
                           max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
                           tie_word_embeddings=True)  # fmt: skip
    model = MixtralForCausalLM(config)
    model.save_pretrained(folder)
    torch.save(torch.randint(512, (4000,), dtype=torch.int32), folder / "tokens.pt")
    return JobModel(folder=folder, name="a tiny Mixtral", num_parameters=model.num_parameters())


@pytest.fixture(scope="module")
def measured(job: JobModel) -> tuple[Results, dict[str, object], list[str]]:
    """One run on the loopback: results, traces, and who was told to run when."""
    options = RunOptions(hosts=2, rate=None, loopback=True, rounds=2, warmup_steps=1, timed_steps=1,
                         job=JobOptions(learning_rate=1e-4))  # fmt: skip
    order: list[str] = []
    contenders = [one for one in CONTENDERS.values() if one.key in (*LOSSLESS, "int8")]
    results, traces = measure_contenders(options, job, contenders, lambda text, done, total: order.append(text))
    return results, traces, order


def add_integers(rank: int, world_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-8, 8, (world_size * 5,), generator=generator).to(dtype)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        ours, theirs = torch.empty(5, dtype=dtype), torch.empty(5, dtype=dtype)
        ring_reduce_scatter(ours, values, op, dist.group.WORLD)
        dist.reduce_scatter_tensor(theirs, values.clone(), op=dist.ReduceOp.SUM)
        expected = theirs if op == dist.ReduceOp.SUM else theirs / world_size
        assert torch.equal(ours, expected), (op, ours, expected)
    with pytest.raises(ValueError, match="is not SUM or AVG"):
        ring_reduce_scatter(torch.empty(5), torch.empty(5 * world_size), dist.ReduceOp.MAX, dist.group.WORLD)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ring_adds_what_gloo_adds(world_size: int) -> None:
    run_ranks(add_integers, world_size, torch.float32)
    run_ranks(add_integers, world_size, torch.bfloat16)


def test_contenders_run_in_turn_round_after_round(measured: tuple[Results, dict[str, object], list[str]]) -> None:
    results, _, order = measured
    labels = [CONTENDERS[one.contender].label for one in results.measured]
    assert order == [f"round {number} of 2: {label}" for number in (1, 2) for label in labels]
    for one in results.measured:
        assert one.failure is None
        assert [(step.round, step.step) for step in one.steps] == [(0, 1), (1, 1)]


def test_lossless_contenders_have_the_bits_of_stock_fsdp2(
    measured: tuple[Results, dict[str, object], list[str]],
) -> None:
    results, _, _ = measured
    stock, lossy = results.of("fsdp2"), results.of("int8")
    assert stock is not None and lossy is not None
    for key in LOSSLESS:
        one = results.of(key)
        assert one is not None and one.losses == stock.losses and one.parameters_digest == stock.parameters_digest, key
    assert lossy.losses != stock.losses and lossy.parameters_digest != stock.parameters_digest
    bits = next(verdict for verdict in verdicts(results) if verdict.name == "bits")
    assert bits.passed, bits.text


def test_bytes_of_stock_fsdp2_follow_from_its_shards(
    measured: tuple[Results, dict[str, object], list[str]], job: JobModel
) -> None:
    results, traces, _ = measured
    trace = Trace.from_json(json.dumps(traces["fsdp2"]))
    values_per_rank = sum(group.values_per_rank for group in trace.groups)
    assert 2 * values_per_rank >= job.num_parameters
    stock, kept = results.of("fsdp2"), results.of("fsdp2-keep")
    assert stock is not None and kept is not None
    other_bytes = 2 * 4 * 2 // 2  # the norm's and the loss's all-reduces of 4 bytes, each way
    for step in stock.steps:
        assert step.gathered_bytes == 2 * values_per_rank * 2
        assert step.counted_bytes == 3 * values_per_rank * 2 + other_bytes
    for step in kept.steps:
        assert step.gathered_bytes == values_per_rank * 2
    ours = results.of("value_delta")
    assert ours is not None and 0 < ours.steps[0].gathered_bytes < 0.2 * stock.steps[0].gathered_bytes


def test_seconds_add_up_and_belong_to_their_parts(
    measured: tuple[Results, dict[str, object], list[str]],
) -> None:
    results, traces, _ = measured
    for one in results.measured:
        for step in one.steps:
            parts = (step.compute_seconds, step.gather_seconds, step.reduce_scatter_seconds,
                     step.other_collective_seconds, step.codec_seconds)  # fmt: skip
            assert all(seconds >= 0 for seconds in parts), (one.contender, parts)
            assert sum(parts) <= step.seconds * (1 + 1e-9)
            has_codec = one.contender not in ("fsdp2", "fsdp2-keep", "default-settled")
            assert (step.codec_seconds > 0) or not has_codec, one.contender
    trace = Trace.from_json(json.dumps(traces["fsdp2"]))
    assert sum(event.seconds for event in trace.events) == pytest.approx(trace.iteration_seconds[0])
    gathers = [(event.phase, event.group) for event in trace.events if event.node == "AllGather"]
    root, *layers = range(3)
    forward, backward = (
        [("forward", group) for group in (root, *layers)],
        [("backward", group) for group in (root, 2, 1)],
    )
    assert gathers == forward + backward
    reduced = [event.group for event in trace.events if event.node == "ReduceScatter"]
    assert sorted(group for group in reduced if group is not None) == [0, 1, 2]


def test_results_are_written_and_read_back(
    measured: tuple[Results, dict[str, object], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    results, traces, _ = measured
    assert e2e.report(results, dict(traces), tmp_path, Console(width=120)) == 0
    assert Results.load(tmp_path / "results.json") == results
    for name in ("results.csv", "steps.csv", "iterations.png", "ablation.png", "losses.png", "traces/value_delta.json"):
        assert (tmp_path / name).stat().st_size > 200, name
    path = str(tmp_path / "results.json")
    assert main(["bench", "compare", path, path]) == 0
    assert "apart" in capsys.readouterr().out
    (tmp_path / "none.json").write_text("{}")
    assert main(["bench", "compare", path, str(tmp_path / "none.json")]) == 2
    assert "measure again" in capsys.readouterr().err


def test_a_contender_that_fails_stays_alone(job: JobModel) -> None:
    """A reduce dtype that ZeRO-3 does not take: its turn fails on all ranks, and the next contender runs."""
    options = RunOptions(hosts=2, rate=None, loopback=True, rounds=2, warmup_steps=0, timed_steps=1,
                         job=JobOptions(reduce_dtype="float16"))  # type: ignore[arg-type]  # fmt: skip
    told: list[str] = []
    results, _ = measure_contenders(
        options, job, [CONTENDERS["zero3"], CONTENDERS["fsdp2"]], lambda text, *_: told.append(text)
    )
    failed, stock = results.of("zero3"), results.of("fsdp2")
    assert failed is not None and stock is not None
    assert failed.failure is not None and "reduce_dtype='float16' is not allowed" in failed.failure and not failed.steps
    assert stock.failure is None and len(stock.steps) == 2


def test_a_turn_that_dies_is_told_apart_from_one_that_raises(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    run_forked(lambda: os._exit(7), tmp_path / "dead.json", stop)
    assert "ended with status" in json.loads((tmp_path / "dead.json").read_text())["failure"]
    run_forked(lambda: {"a": 1}, tmp_path / "fine.json", stop)
    assert json.loads((tmp_path / "fine.json").read_text()) == {"a": 1}
    run_forked(lambda: {"a": 1 / 0}, tmp_path / "raised.json", stop)
    assert json.loads((tmp_path / "raised.json").read_text())["failure"] == "ZeroDivisionError: division by zero"
    stop.touch()
    run_forked(lambda: {"a": time.sleep(600)}, tmp_path / "stopped.json", stop)  # type: ignore[func-returns-value]
    assert json.loads((tmp_path / "stopped.json").read_text()) == {"failure": STOPPED}


@pytest.mark.rotating
def test_a_turn_that_takes_too_long_is_stopped(job: JobModel) -> None:
    options = RunOptions(hosts=2, rate=None, loopback=True, rounds=1, turn_seconds=0.1)
    results, _ = measure_contenders(options, job, [CONTENDERS["fsdp2"]])
    assert results.measured[0].failure == STOPPED


@pytest.mark.rotating
def test_interfaces_count_what_is_counted(job: JobModel) -> None:
    try:
        with NetnsCluster(1):
            pass
    except NetnsError as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    options = RunOptions(hosts=2, rate="1gbit", rounds=1, warmup_steps=1, timed_steps=2)
    results, _ = measure_contenders(options, job, chosen(["fsdp2", "exponent_delta"]))
    for one in results.measured:
        for step in one.steps:
            assert step.interface_bytes is not None
            assert 1.0 < step.interface_bytes / step.counted_bytes < 1.01, (one.contender, step)


def test_every_contender_can_be_made() -> None:
    for one in CONTENDERS.values():
        assert one.label.isascii() and len(one.label) <= 32
        assert (one.make_policy(1e-5, 2) is not None) == (one.kind is Kind.OURS), one.key
        assert one.is_lossless or not one.is_bitwise
    assert {key for _, key in ABLATION} <= CONTENDERS.keys()
    assert CONTENDERS["default"].may_choose_nothing and not CONTENDERS["value_delta"].may_choose_nothing
    assert "several ranks" in (CONTENDERS["hierarchical"].lacks(4, 1) or "")
    assert CONTENDERS["hierarchical"].lacks(2, 2) is None
    assert [reshard_size(*hosts) for hosts in ((4, 1), (2, 1), (2, 2), (3, 1), (1, 4))] == [2, None, 2, None, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contenders", "fsdp3"], "contender 'fsdp3' is none of fsdp2, fsdp2-keep"),
        (["--rate", "fast"], "rate='fast' must be a number"),
        (["--loopback", "--rate", "200mbit"], "only network namespaces can limit it"),
    ],
)
def test_wrong_arguments_are_said_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "e2e", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_without_root_the_loopback_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["bench", "e2e"]) == 2
    error = capsys.readouterr().err
    assert "network namespaces need root" in error and "--loopback needs no root" in error


@pytest.mark.rotating
def test_an_interrupted_run_leaves_no_rank_behind(job: JobModel, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from fsdp_ciera.cli.main import main; sys.exit(main())"]
    command += ["bench", "e2e", "--loopback", "--hosts", "2", "--out", str(tmp_path / "out"), "--contenders", "fsdp2"]
    code = "from pathlib import Path; import fsdp_ciera.cli.tasks.bench_e2e as e; from fsdp_ciera.bench.job import JobModel\n"
    code += f"e.prepare = lambda folder: JobModel(folder=Path({str(job.folder)!r}), name='tiny', num_parameters=1)\n"
    code += "import sys; from fsdp_ciera.cli.main import main; sys.exit(main())"
    command[2] = code
    command += ["--steps", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks: set[int] = set()
    try:
        while len(ranks) < 4:  # two ranks, and a fork of each in its turn
            assert process.poll() is None
            ranks = _descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    for pid in ranks:
        with contextlib.suppress(OSError):
            assert f"\nPPid:\t{process.pid}\n" not in Path(f"/proc/{pid}/status").read_text()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert state == "Z", f"rank process {pid} is left"


def _descendants(pid: int) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def test_bench_is_on_the_command_line() -> None:
    parsed = parse(["bench", "e2e", "--hosts", "3", "--rate", "none"])
    assert isinstance(parsed, BenchOptions) and isinstance(parsed.bench, E2EOptions)
    settings = parsed.bench.settings
    assert (settings.hosts, settings.rate, settings.limit, settings.rounds) == (3, "none", None, 2)

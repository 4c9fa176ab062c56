"""The stand's report: figures against hand-made records, verdicts both ways, CSV and JSON read back, pictures written."""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fsdp_ciera.bench.ablation import ablation_steps
from fsdp_ciera.bench.compare import compare
from fsdp_ciera.bench.contenders import ABLATION, CONTENDERS, Kind
from fsdp_ciera.bench.report import (
    Verdict,
    exit_code,
    summarize,
    verdicts,
    write_csv,
    write_steps_csv,
)
from fsdp_ciera.bench.results import Measured, Results, Setting, Step
from fsdp_ciera.cli.figures import bench_e2e as figures
from fsdp_ciera.cli.tables.bench_e2e import ablation_table, comparison_table, print_report, print_verdicts
from fsdp_ciera.errors import ReportError

NUM_STEPS, NUM_WARMUP_STEPS = 5, 2
SPEEDS = {"fsdp2": 1.0, "fsdp2-keep": 1.45, "fsdp2-int": 1.2, "zero3": 0.9, "int8": 1.6, "zstd": 1.1, "zipnn": 1.15,
          "entropy": 1.2, "exponent_block": 1.35, "exponent_delta": 1.6, "value_delta": 2.5, "paper": 1.4,
          "paper-settled": 1.42, "delta-settled": 1.7, "default-settled": 2.7, "default": 2.6}  # fmt: skip
"""How many times as fast as FSDP2 the made-up contenders are."""


def setting(**changes: object) -> Setting:
    made = Setting(hosts=4, ranks_per_host=1, rate="200mbit", mode="namespaces", rounds=2, warmup_steps=NUM_WARMUP_STEPS,
                   timed_steps=NUM_STEPS, model="SmolLM2-135M", num_parameters=134_515_008, tokens_per_rank=512,
                   learning_rate=1e-4, reduce_dtype="bfloat16", reduce_scatter="ring", machine="x", num_cores=2,
                   torch_version="2.13.0", date="2026-01-01T00:00:00Z", command="ciera bench e2e")  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def step(seconds: float, **changes: object) -> Step:
    made = Step(round=0, step=0, seconds=seconds, compute_seconds=0.0, gather_seconds=seconds, reduce_scatter_seconds=0.0,
                other_collective_seconds=0.0, codec_seconds=0.0, counted_bytes=1e8, gathered_bytes=6e7,
                interface_bytes=1.004e8, loss=2.5)  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def measured(key: str, seconds: Sequence[float], losses: Sequence[float] = (3.0, 2.5), **changes: object) -> Measured:
    """With one timed iteration for each of `seconds`."""
    made = Measured(contender=key, steps=tuple(step(value, step=number) for number, value in enumerate(seconds)),
                    losses=tuple(losses), parameters_digest="d", peak_memory_bytes=10**9)  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def results(*everyone: Measured, **changes: object) -> Results:
    return Results(setting=setting(**changes), measured=everyone)


def made_run(
    seed: int = 0,
    speeds: Mapping[str, float] = SPEEDS,
    stock_seconds: float = 14.0,
    num_rounds: int = 2,
    **changes: object,
) -> Results:
    """All contenders with noise, as a run might look; the lossy one drifts, the foreign one differs in the last bits."""
    dice = random.Random(seed)
    curve = [2.2 * math.exp(-0.2 * number) + 1.3 for number in range(NUM_STEPS + NUM_WARMUP_STEPS)]
    everyone = []
    for key, speed in speeds.items():
        is_ours = CONTENDERS[key].kind is Kind.OURS
        has_codec = is_ours or CONTENDERS[key].gather is not None
        drift = {"int8": 3e-3, "zero3": 4e-7}.get(key, 0.0)
        losses = tuple(value + drift * number * dice.uniform(-0.2, 1) for number, value in enumerate(curve))
        steps = []
        for number in range(num_rounds * NUM_STEPS):
            seconds = stock_seconds / speed * dice.uniform(0.97, 1.06)
            compute, codec = 2.2 * dice.uniform(0.9, 1.2), 0.25 * has_codec
            reduce, other = min(3.0, 0.4 * stock_seconds), 0.1 * dice.uniform(0.5, 2)
            scale = min(1.0, 0.8 * seconds / (compute + codec + reduce + other))
            compute, codec, reduce, other = (scale * value for value in (compute, codec, reduce, other))
            sent = 4e8 / speed
            at = NUM_WARMUP_STEPS + number % NUM_STEPS
            steps.append(
                Step(round=number // NUM_STEPS, step=at, seconds=seconds, compute_seconds=compute,
                     gather_seconds=seconds - compute - codec - reduce - other, reduce_scatter_seconds=reduce,
                     other_collective_seconds=other, codec_seconds=codec, counted_bytes=sent, gathered_bytes=0.7 * sent,
                     interface_bytes=sent * dice.uniform(1.001, 1.004), loss=losses[at])
            )  # fmt: skip
        everyone.append(
            Measured(contender=key, steps=tuple(steps), losses=losses, parameters_digest=f"{key if drift else 'same'}",
                     peak_memory_bytes=int(1.3e9 * dice.uniform(1, 1.4)), cache_bytes=201_000_000 if is_ours else 0)
        )  # fmt: skip
    return Results(setting=setting(rounds=num_rounds, **changes), measured=tuple(everyone))


def shown(*what: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    for one in what:
        console.print(one)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def report_text(run: Results) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_report(console, run)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def verdict(run: Results, name: str) -> Verdict:
    return next(one for one in verdicts(run) if one.name == name)


def row_of(text: str, label: str) -> list[str]:
    """The cells behind a label in the first line that begins with it."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label + "  "))
    return line.strip().removeprefix(label).split()


def cells(run: Results, key: str) -> tuple[list[str], list[str]]:
    """Of the time table and of the bytes table."""
    text = report_text(run)
    first, _, second = text.partition("Bytes and losses")
    label = CONTENDERS[key].label
    return row_of(first, label), row_of(second, label)


def test_figures_of_a_contender_by_hand() -> None:
    run = results(
        measured("fsdp2", [10, 30, 20]),
        measured("fsdp2-keep", [12]),
        replace(
            measured("default", []),
            steps=tuple(
                step(seconds, step=number, codec_seconds=seconds / 10, counted_bytes=counted, interface_bytes=interface)
                for number, (seconds, counted, interface) in enumerate(
                    [(4, 100, 101), (1, 300, 306), (5, 200, 205), (2, 200, 205), (3, 200, 203)]
                )
            ),
            losses=(3.0, 2.75),
        ),
    )
    _, _, one = summarize(run)
    # percentiles: linear between sorted 1 2 3 4 5, 5 % of the way from first to last is 0.2
    assert (one.seconds, one.p5_seconds, one.p95_seconds) == (3, pytest.approx(1.2), pytest.approx(4.8))
    assert one.part_seconds == {"compute": 0, "gather": 3, "reduce_scatter": 0, "other_collective": 0, "codec": 0.3}
    assert (one.stock_ratio, one.keep_ratio) == (pytest.approx(20 / 3), 4)
    assert (one.counted_bytes, one.interface_bytes, one.interface_percent) == (200, 204, pytest.approx(2))
    assert (one.loss, one.loss_difference, one.has_stock_bits) == (2.75, 0.25, False)


def test_a_single_iteration_is_its_own_percentiles() -> None:
    (one,) = summarize(results(measured("fsdp2", [7.5])))
    assert one.seconds == one.p5_seconds == one.p95_seconds == 7.5
    assert one.stock_ratio == 1
    assert math.isnan(one.keep_ratio), "FSDP2 that keeps its parameters was not run"


def test_what_is_not_known_is_nan() -> None:
    without = replace(measured("default", [1.0]), steps=(step(1.0, interface_bytes=None),))
    failed = Measured(contender="paper", failure="RuntimeError: no\n  more")
    one, other = summarize(results(without, failed))
    assert math.isnan(one.interface_bytes) and math.isnan(one.interface_percent) and math.isnan(one.stock_ratio)
    assert one.has_stock_bits is None, "FSDP2 was not run"
    assert math.isnan(other.seconds) and math.isnan(other.p95_seconds) and math.isnan(other.loss)


def test_a_contender_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ReportError, match="'zero9' of the results is none of fsdp2, "):
        summarize(results(measured("zero9", [1.0])))


NEXT_AFTER = math.nextafter(2.5, 3)
TIMED = measured("default", [1.0, 1.0]).steps


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"losses": (3.0, NEXT_AFTER)}, False),
        ({"losses": (3.0,)}, False),
        ({"parameters_digest": "e"}, False),
        ({"steps": (TIMED[0], replace(TIMED[1], loss=NEXT_AFTER))}, False),
        ({"parameters_digest": ""}, None),
        ({"losses": ()}, None),
    ],
)
def test_bits_are_compared_exactly(changes: dict[str, object], expected: bool | None) -> None:
    run = results(measured("fsdp2", [1.0, 1.0]), replace(measured("default", [1.0, 1.0]), **changes))  # type: ignore[arg-type]
    assert summarize(run)[1].has_stock_bits is expected
    bits = verdict(run, "bits")
    assert bits.passed is expected and bits.decides
    assert ("DIFFERENT BITS: default policy" in bits.text) == (expected is False)
    assert ("not compared: default policy" in bits.text) == (expected is None)


@pytest.mark.parametrize(("stock", "other", "same"), [(math.nan, math.nan, True), (0.0, -0.0, False)])
def test_equal_means_the_same_bits(stock: float, other: float, same: bool) -> None:
    run = results(measured("fsdp2", [1.0], losses=(stock,)), measured("default", [1.0], losses=(other,)))
    assert summarize(run)[1].has_stock_bits is same


def test_only_what_must_be_bitwise_is_judged() -> None:
    foreign = measured("zero3", [1.0], losses=(3.0, 2.6), parameters_digest="other")
    lossy = measured("int8", [1.0], losses=(3.0, 2.7), parameters_digest="another")
    bits = verdict(results(measured("fsdp2", [1.0]), foreign, lossy, measured("zstd", [1.0])), "bits")
    assert bits.passed and bits.text.startswith("1 of 1 have")


def test_tables_show_every_contender_in_120_columns() -> None:
    text = report_text(made_run())
    assert max(map(len, text.splitlines())) <= 120
    for key in SPEEDS:
        times, sent = cells(made_run(), key)
        assert len(times) == 10 and len(sent) >= 9, key  # as many columns, none folded
    assert text.splitlines()[0].strip() == "Seconds of an iteration, 4 hosts x 1 rank, 200mbit"


def test_tables_have_the_figures() -> None:
    default = measured("default", [4.0], peak_memory_bytes=1_234_000_000, cache_bytes=56_000_000)
    drifting = measured("int8", [5.0], losses=(3.0, 2.625), parameters_digest="e")
    run = results(measured("fsdp2", [10.0]), measured("fsdp2-keep", [6.0]), default, drifting)
    times, sent = cells(run, "default")
    assert times == ["4.000", "4.000", "4.000", "0.000", "4.000", "0.000", "0.000", "0.000", "2.50", "1.50"]
    assert sent == ["60.00", "100.00", "100.40", "+0.40", "%", "1,234", "56", "2.500000", "same", "bits"]
    assert cells(run, "fsdp2")[1][-1] == "reference"
    assert cells(run, "int8")[1][-2:] == ["2.625000", "+1.25e-01"]


def test_tables_without_interfaces_and_with_failures() -> None:
    loopback = replace(measured("fsdp2", [1.0]), steps=(step(1.0, interface_bytes=None),), notes=("a [note]",))
    failed = Measured(contender="zero3", failure="ModuleNotFoundError:\n  No module named [bold]deepspeed")
    run = results(loopback, failed, mode="loopback", rate=None, hosts=1, ranks_per_host=2)
    text = report_text(run)
    assert "Seconds of an iteration, 1 host x 2 ranks, loopback" in text
    assert cells(run, "fsdp2")[1][2:4] == ["-", "-"]
    assert cells(run, "zero3") == (["-"] * 10, [*["-"] * 7, "not", "measured"])
    assert (
        "- DeepSpeed ZeRO-3 was not measured: ModuleNotFoundError: No module named [bold]deepspeed" in text
    )  # no markup
    assert "- FSDP2: a [note]" in text


def test_a_lossy_contender_says_so() -> None:
    int8 = replace(CONTENDERS["int8"], label="int8")
    (one,) = summarize(results(measured("int8", [1.0])), {"int8": int8})
    assert one.label == "int8 (lossy)"
    assert summarize(results(measured("int8", [1.0])))[0].label.lower().count("lossy") == 1


def test_csv_reads_back(tmp_path: Path) -> None:
    run = made_run()
    failed = Measured(contender="hierarchical", failure='no, "never"\nagain', notes=("one", "two"))
    run = replace(run, measured=(*run.measured, failed))
    write_csv(run, tmp_path / "contenders.csv")
    rows = list(csv.DictReader((tmp_path / "contenders.csv").open(newline="")))
    assert [row["key"] for row in rows] == [*SPEEDS, "hierarchical"]
    for row, one in zip(rows, summarize(run), strict=True):
        if one.measured.failure is None:
            for name in (
                "seconds",
                "p5_seconds",
                "p95_seconds",
                "stock_ratio",
                "counted_bytes",
                "interface_percent",
                "loss",
            ):
                assert float(row[name]) == getattr(one, name), name
            assert float(row["gather_seconds"]) == one.part_seconds["gather"]
            assert row["num_timed_steps"] == "10" and row["kind"] == one.contender.kind
    assert rows[-1]["failure"] == failed.failure and rows[-1]["notes"] == "one; two"
    assert rows[-1]["seconds"] == rows[-1]["loss"] == rows[-1]["has_stock_bits"] == ""
    assert {row["key"] for row in rows if row["is_lossless"] == "False"} == {"int8"}


def test_csv_of_iterations_reads_back(tmp_path: Path) -> None:
    loopback = replace(measured("default", [1.0]), steps=(step(0.1 + 0.2, round=1, step=7, interface_bytes=None),))
    run = replace(made_run(), measured=(*made_run().measured[:-1], loopback))
    write_steps_csv(run, tmp_path / "steps.csv")
    rows = list(csv.DictReader((tmp_path / "steps.csv").open(newline="")))
    assert len(rows) == 10 * (len(SPEEDS) - 1) + 1
    expected = [(one.contender, timed) for one in run.measured for timed in one.steps]
    for row, (key, timed) in zip(rows, expected, strict=True):
        assert (row["contender"], int(row["round"]), int(row["step"])) == (key, timed.round, timed.step)
        assert (float(row["seconds"]), float(row["loss"])) == (timed.seconds, timed.loss)
    assert rows[-1]["interface_bytes"] == "" and float(rows[-1]["seconds"]) == 0.1 + 0.2


def test_bytes_verdict_judges_ours_and_reports_peers() -> None:
    def with_interface(key: str, interface_bytes: float) -> Measured:
        return replace(measured(key, [1.0]), steps=(step(1.0, counted_bytes=1e6, interface_bytes=interface_bytes),))

    stock = with_interface("fsdp2", 1.002e6)
    kept = verdict(results(stock, with_interface("default", 1.009e6), with_interface("zero3", 1.5e6)), "bytes")
    assert kept.passed and "of peers: DeepSpeed ZeRO-3 +50.00 % (+500 kB an iteration)" in kept.text
    over = verdict(results(stock, with_interface("default", 1.011e6)), "bytes")
    assert over.passed is False and "over 1 %: default policy +1.10 % (+11 kB an iteration)" in over.text
    under = verdict(results(stock, with_interface("default", 0.98e6)), "bytes")
    assert under.passed is False and "-2.00 % (-20 kB" in under.text
    assert not over.decides
    largest = verdict(results(stock, with_interface("default", 1.009e6)), "bytes")
    assert largest.passed and "largest: default policy +0.90 %" in largest.text
    loopback = replace(measured("fsdp2", [1.0]), steps=(step(1.0, interface_bytes=None),))
    assert verdict(results(loopback), "bytes").passed is None


@pytest.mark.parametrize(("seconds", "passed"), [(10.19, True), (10.21, False), (5.0, True)])
def test_never_slower_by_more_than_two_percent(seconds: float, passed: bool) -> None:
    unjudged = measured("zstd", [20.0]), measured("entropy", [20.0])  # peers, and codecs that nobody weighed
    slower = verdict(results(measured("fsdp2", [10.0]), *unjudged, measured("default", [seconds])), "never slower")
    assert slower.passed is passed and not slower.decides
    assert f"default policy {10 * seconds - 100:+.1f} %" in slower.text and "entropy" not in slower.text


def test_nothing_of_ours_leaves_never_slower_open() -> None:
    assert verdict(results(measured("fsdp2", [1.0]), measured("zstd", [1.0])), "never slower").passed is None


@pytest.mark.parametrize(
    ("seconds", "keep_seconds", "changes", "expected"),
    [
        (10.0, 18.0, {}, {"2.3x": True, "1.8x": True}),
        (10.01, 17.9, {}, {"2.3x": False, "1.8x": False}),
        (10.0, 18.0, {"rate": "400mbit"}, {}),
        (10.0, 18.0, {"hosts": 2}, {}),
    ],
)
def test_speed_marks(
    seconds: float, keep_seconds: float, changes: dict[str, object], expected: dict[str, bool]
) -> None:
    run = results(
        measured("fsdp2", [23.0]), measured("fsdp2-keep", [keep_seconds]), measured("default", [seconds]), **changes
    )
    marks = {one.name: one.passed for one in verdicts(run) if one.name.endswith("x")}
    assert marks == expected
    assert exit_code(verdicts(run)) == 0, "speed never decides the exit code"


def test_a_mark_without_its_rival_is_open() -> None:
    mark = verdict(results(measured("fsdp2", [23.0]), measured("default", [5.0])), "1.8x")
    assert mark.passed is None and "-x as fast" in mark.text


def test_failures_of_ours_decide_the_exit_code() -> None:
    stock, ours = measured("fsdp2", [1.0]), measured("default", [1.0])
    peer_failed = Measured(contender="zero3", failure="no deepspeed")
    ours_failed = Measured(contender="paper", failure="it broke")
    impossible = Measured(contender="hierarchical", failure="needs several ranks a host")
    assert exit_code(verdicts(results(stock, ours, peer_failed, impossible))) == 0
    run = results(stock, ours, ours_failed)
    assert exit_code(verdicts(run)) == 1 and "NOT measured: CieraPolicy.paper()" in verdict(run, "runs").text
    possible = results(stock, ours, impossible, ranks_per_host=2)
    assert exit_code(verdicts(possible)) == 1
    other_bits = measured("paper", [1.0], parameters_digest="other")
    assert exit_code(verdicts(results(stock, ours, other_bits))) == 1


def test_verdicts_are_printed_in_words() -> None:
    console = Console(file=io.StringIO(), width=400)
    lost = measured("default", [1.0], parameters_digest="other")
    print_verdicts(console, verdicts(results(measured("fsdp2", [1.0]), lost, rate="100mbit")))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[:3] for line in lines] == [["✓", "kept", "runs:"], ["✗", "MISSED", "bits:"],
                                                    ["✓", "kept", "bytes:"], ["✓", "kept", "never"]]  # fmt: skip


def test_ablation_is_cumulative_and_says_why_not() -> None:
    run = results(
        measured("fsdp2", [12.0, 14.0]),
        measured("exponent_block", [10.0]),
        measured("paper", [6.5]),
        Measured(contender="delta-settled", failure="\nit broke\nthere"),
        measured("default-settled", []),
    )
    steps = {one.label: one for one in ablation_steps(run)}
    assert list(steps) == [label for label, _ in ABLATION]
    assert (steps["+ER"].speedup, steps["+BSC"].speedup) == (1.3, 2.0)
    assert steps["+CCP"].reason == "was not run"
    assert steps["+exponent_delta"].reason == "it broke"
    assert steps["+value_delta"].reason == "has no timed iterations"
    assert "several ranks" in (steps["+hierarchical"].reason or "")
    text = shown(ablation_table(run))
    assert row_of(text, "SmolLM2-135M") == ["13.000", "1.30x", "2.00x", "n/a", "n/a", "n/a", "n/a"]
    assert "+CCP: was not run" in text and max(map(len, text.splitlines())) <= 120


def test_ablation_without_stock_has_no_speedups() -> None:
    (step_alone,) = ablation_steps(results(measured("paper", [1.0])), [("+BSC", "paper")])
    assert step_alone.seconds == 1.0 and step_alone.reason == "stock FSDP2 was not measured"


def test_ablation_says_what_a_later_step_lacks() -> None:
    run = made_run(speeds=SPEEDS | {"hierarchical": 3.0}, ranks_per_host=2)
    assert [one.caveat for one in ablation_steps(run)] == [*[None] * 5, "without sizes settled ahead"]
    assert "+hierarchical: without sizes settled ahead" in shown(ablation_table(run))


def test_runs_that_agree() -> None:
    first = results(measured("fsdp2", [10.0]), measured("default", [5.0]), measured("paper", [8.0]))
    second = results(measured("fsdp2", [20.0]), measured("default", [9.5]), measured("zstd", [19.0]))
    found = compare(first, second)
    assert found.agrees and found.stock_seconds == (10.0, 20.0)
    assert [row.contender for row in found.rows] == ["default", "paper", "zstd"]
    assert found.worst.contender == "default"
    assert found.worst.apart_percent == pytest.approx(100 * ((20 / 9.5) / 2 - 1))
    assert found.text == "1 ratios agree within 10 %: furthest apart default, 2.00 and 2.11, 5.3 %"
    text = shown(comparison_table(found))
    assert row_of(text, "default policy") == ["2.000", "2.105", "5.3", "%"]
    assert row_of(text, "CieraPolicy.paper()") == ["1.250", "-", "one", "run", "only"]


def test_runs_that_do_not_agree_whichever_is_first() -> None:
    slow = results(measured("fsdp2", [10.0]), measured("default", [5.0]), measured("paper", [8.0]))
    fast = results(measured("fsdp2", [10.0]), measured("default", [4.5]), measured("paper", [8.0]))
    for found in (compare(slow, fast), compare(fast, slow)):
        assert not found.agrees and found.worst.contender == "default"
        assert found.worst.apart_percent == pytest.approx(100 * (5 / 4.5 - 1))
        assert "2 ratios DO NOT AGREE" in found.text


def test_runs_of_different_things_are_not_compared() -> None:
    run = made_run()
    with pytest.raises(ReportError, match="rate='200mbit' and rate=None cannot be compared"):
        compare(run, made_run(rate=None))
    with pytest.raises(ReportError, match="no ratio was measured in both runs"):
        compare(results(measured("fsdp2", [1.0]), measured("paper", [1.0])), results(measured("paper", [1.0])))


def test_json_of_a_run_with_everything_reads_back() -> None:
    run = made_run()
    run = replace(run, measured=(*run.measured, Measured(contender="hierarchical", failure="no", notes=("a",))))
    assert Results.from_json(run.to_json()) == run


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that the test draws, still open for a look at what is in them."""
    kept: list[Any] = []
    save = figures._save

    def save_and_keep(plt: Any, figure: Any, path: Path) -> None:
        kept.append(figure)
        save(plt, figure, path)

    monkeypatch.setattr(figures, "_save", save_and_keep)
    return kept


def texts_of(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def is_picture(path: Path) -> bool:
    from matplotlib.image import imread

    pixels = imread(path)
    return bool(min(pixels.shape[:2]) > 400 and 0.02 < (pixels[..., :3].min(axis=2) < 0.95).mean() < 0.7)


def test_bars_are_as_high_as_medians(tmp_path: Path, drawn: list[Any]) -> None:
    failed = Measured(contender="hierarchical", failure="no")
    run = made_run()
    run = replace(run, measured=(*reversed(run.measured), failed))
    figures.draw_iterations(run, tmp_path / "iterations.png")
    assert is_picture(tmp_path / "iterations.png")
    (axes,) = drawn[0].axes
    by_key = {one.contender.key: one for one in summarize(run)}
    labels = [
        label.get_text().replace("\n", " ").replace("_ ", "_").replace(". ", ".") for label in axes.get_xticklabels()
    ]
    order = [next(one.contender.key for one in by_key.values() if one.contender.label == label) for label in labels]
    assert order[:3] == ["fsdp2-int", "fsdp2-keep", "fsdp2"], "groups together, the order of the run inside"
    assert {CONTENDERS[key].kind for key in order[3:7]} == {Kind.PEER} and len(order) == len(SPEEDS)
    for place, key in enumerate(order):
        bars = [bar for bar in axes.patches if abs(bar.get_x() + bar.get_width() / 2 - place) < 1e-6]
        assert len(bars) == 5
        assert sum(bar.get_height() for bar in bars) == pytest.approx(by_key[key].seconds)
        assert bars[1].get_height() / bars[0].get_height() == pytest.approx(
            by_key[key].part_seconds["gather"] / by_key[key].part_seconds["compute"]
        )
        assert {bar.get_hatch() for bar in bars} == {"///" if key == "int8" else None}
        text = axes.texts[place].get_text()
        assert text == f"{by_key[key].stock_ratio:.2f}x" + ("\nlossy" if key == "int8" else "")
        low, high = axes.containers[5 * (place + 1) + place][2][0].get_segments()[0][:, 1]
        assert (low, high) == (pytest.approx(by_key[key].p5_seconds), pytest.approx(by_key[key].p95_seconds))
    assert texts_of(drawn[0])[-3:] == ["stock FSDP2", "peers", "fsdp_ciera"]
    assert "not measured: default, hierarchical" in axes.get_title()


def test_bars_without_stock_have_no_ratio(tmp_path: Path, drawn: list[Any]) -> None:
    figures.draw_iterations(results(measured("default", [1.0])), tmp_path / "one.png")
    assert texts_of(drawn[0]) == ["", "fsdp_ciera"] and is_picture(tmp_path / "one.png")
    with pytest.raises(ReportError, match="no contender of this run has timed iterations"):
        figures.draw_iterations(results(Measured(contender="paper", failure="no")), tmp_path / "none.png")


def test_picture_of_the_ablation(tmp_path: Path, drawn: list[Any]) -> None:
    run = made_run()
    figures.draw_ablation(run, tmp_path / "ablation.png")
    assert is_picture(tmp_path / "ablation.png")
    heights = [bar.get_height() for bar in drawn[0].axes[0].patches]
    assert heights == [1, *(one.speedup for one in ablation_steps(run) if one.reason is None)]
    assert texts_of(drawn[0])[-1].startswith("n/a: hierarchical")
    with pytest.raises(ReportError, match="no step of the ablation"):
        figures.draw_ablation(results(measured("fsdp2", [1.0])), tmp_path / "none.png")


def test_picture_of_losses_shows_drift_alone_by_name(tmp_path: Path, drawn: list[Any]) -> None:
    run = made_run()
    figures.draw_losses(run, tmp_path / "losses.png")
    assert is_picture(tmp_path / "losses.png")
    losses, drift = drawn[0].axes
    names = [line.get_label() for line in losses.lines]
    assert names == ["FSDP2", "13 with the same bits", "DeepSpeed ZeRO-3", "int8 gather as ZeRO++ (LOSSY)"]
    stock, int8 = run.of("fsdp2"), run.of("int8")
    assert stock is not None and int8 is not None
    away = [ours - theirs for ours, theirs in zip(int8.losses, stock.losses, strict=True)]
    assert list(drift.lines[2].get_ydata()) == away and drift.get_yscale() == "symlog"
    nan = measured("int8", [1.0], losses=(math.nan, 2.0), parameters_digest="e")
    figures.draw_losses(results(measured("fsdp2", [1.0]), nan), tmp_path / "nan.png")
    assert is_picture(tmp_path / "nan.png")
    with pytest.raises(ReportError, match="FSDP2 has no losses"):
        figures.draw_losses(results(nan), tmp_path / "none.png")


def test_picture_of_rates(tmp_path: Path, drawn: list[Any]) -> None:
    rates = {"1gbit": 1.1, "100mbit": 3.0, None: 1.0, "200mbit": 2.5}
    runs = [
        results(measured("fsdp2", [6.0]), measured("zstd", [1.0]), measured("default", [6 / ratio]), rate=rate)
        for rate, ratio in rates.items()
    ]
    again = results(measured("fsdp2", [6.0]), measured("fsdp2-keep", [4.0]), measured("default", [3.0]), rate="200mbit")
    figures.draw_rates([*runs, again], tmp_path / "rates.png")
    assert is_picture(tmp_path / "rates.png")
    (axes,) = drawn[0].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["100mbit", "200mbit", "1gbit", "no limit"]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["default policy"].get_ydata()) == pytest.approx([3.0, 2.25, 1.1, 1.0])
    assert list(lines["FSDP2, kept after forward"].get_xdata()) == [1] and "zstd per gather" not in lines
    with pytest.raises(ReportError, match="2 different"):
        figures.draw_rates([runs[0], made_run(hosts=2)], tmp_path / "none.png")
    with pytest.raises(ReportError, match="no ratio to FSDP2 of ours"):
        figures.draw_rates([results(measured("fsdp2", [1.0]))], tmp_path / "none.png")


@pytest.mark.parametrize("text", ["FSDP2 reshard_after_forward=False", "a", "", "x" * 40, "CieraPolicy.paper() = it"])
def test_labels_are_broken_and_not_cut(text: str) -> None:
    lines = figures._lines(text, 13)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(len(line) <= 13 for line in lines) or "x" * 40 in lines

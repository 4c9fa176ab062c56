"""Calibration finds planted constants, predictions meet measurements, and `ciera simulate` refuses what nothing vouches for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import nnls

from fsdp_ciera.cli.main import main
from fsdp_ciera.errors import SimulationError, UnitError
from fsdp_ciera.profiling.trace import Trace
from fsdp_ciera.simulator.calibrate import Calibration, calibrate
from fsdp_ciera.simulator.fit import fit_non_negative, fit_robust
from fsdp_ciera.simulator.report import STAMP
from fsdp_ciera.simulator.runs import load_run
from fsdp_ciera.simulator.validate import Predictor, validate
from fsdp_ciera.units import format_rate, parse_rate
from simulated_stand import CORES, OURS, STOCK, write_run


def test_least_squares_agree_with_scipy() -> None:
    dice = np.random.default_rng(0)
    for _ in range(30):
        columns, wanted = dice.normal(size=(12, 4)), dice.normal(size=12)
        expected, _ = nnls(columns, wanted)
        assert fit_non_negative(columns, wanted) == pytest.approx(expected, abs=1e-9)


def test_outliers_do_not_bend_the_fit() -> None:
    dice = np.random.default_rng(1)
    columns = np.stack([np.ones(40), np.arange(40.0)], axis=1)
    wanted = columns @ np.array([2.0, 0.5]) + dice.normal(scale=0.01, size=40)
    wanted[::8] += 30
    assert fit_robust(columns, wanted) == pytest.approx([2.0, 0.5], rel=0.02)
    assert fit_non_negative(columns, wanted) != pytest.approx([2.0, 0.5], rel=0.02)


def test_calibration_finds_the_planted_constants(tmp_path: Path) -> None:
    runs = [
        load_run(write_run(tmp_path / f"{hosts}-{rate}", hosts, rate))
        for hosts in (2, 4, 8)
        for rate in ("100mbit", "400mbit")
    ]
    found = calibrate(runs)
    assert found.contention == pytest.approx(STOCK.contention, abs=0.01)
    for kind in ("AllGather", "ReduceScatter"):
        constants = found.between[kind]
        assert constants.call_seconds == pytest.approx(STOCK.call_seconds, rel=1e-3)
        assert constants.hop_seconds == pytest.approx(STOCK.hop_seconds, rel=1e-3)
        assert 1 / constants.per_nominal_second == pytest.approx(STOCK.efficiency, rel=1e-3)
        assert found.between_at["4x1"][kind].per_nominal_second == pytest.approx(1 / STOCK.efficiency, rel=1e-3)
    assert found.num_cores == CORES and len(found.settings) == 6
    predictor = Predictor(runs)
    correction = predictor.calibration.corrections["value_delta"]["2x1"]
    assert correction.rest_seconds == pytest.approx(OURS.rest_seconds, abs=1e-3)
    assert correction.network_scale == pytest.approx(1, abs=1e-3)
    again = Calibration.from_json(predictor.calibration.to_json())
    assert again == predictor.calibration
    with pytest.raises(SimulationError, match="no calibration of format"):
        Calibration.from_json("{}")


def folders(tmp_path: Path, *, noise: float = 0.0, bias: float = 1.0) -> tuple[list[str], list[str]]:
    """Calibrated at 100 and 400 Mbit/s; to validate at 200 and 300, where medians are `bias` times too long."""
    noisy = [("fsdp2", replace(STOCK, noise=noise)), ("value_delta", replace(OURS, noise=noise))]
    biased = [(key, replace(planted, bias=bias)) for key, planted in noisy]
    learned = [
        write_run(tmp_path / f"c{hosts}-{rate}", hosts, rate, noisy)
        for hosts in (2, 4)
        for rate in ("100mbit", "400mbit")
    ]
    checked = [
        write_run(tmp_path / f"v{hosts}-{rate}", hosts, rate, biased)
        for hosts in (2, 4)
        for rate in ("200mbit", "300mbit")
    ]
    return [str(folder) for folder in learned], [str(folder) for folder in checked]


def test_predictions_between_calibrated_rates(tmp_path: Path) -> None:
    learned, checked = folders(tmp_path, noise=0.03)
    predictor = Predictor([load_run(Path(folder)) for folder in learned])
    found = validate(predictor, [load_run(Path(folder)) for folder in checked])
    assert len(found.checks) == len(found.counted) == 8
    assert found.passes and found.worst is not None and abs(found.worst.error) < 0.03


def test_predictions_for_hosts_that_were_not_calibrated(tmp_path: Path) -> None:
    learned = [load_run(write_run(tmp_path / f"c{hosts}", hosts, "200mbit")) for hosts in (2, 8)]
    checked = load_run(write_run(tmp_path / "v4", 4, "400mbit"))
    found = validate(Predictor(learned), [checked])
    assert found.worst is not None and abs(found.worst.error) < 0.02


def test_runs_that_were_calibrated_on_do_not_count(tmp_path: Path) -> None:
    learned, _ = folders(tmp_path)
    runs = [load_run(Path(folder)) for folder in learned]
    found = validate(Predictor(runs), runs)
    assert len(found.checks) == 8 and not found.counted and not found.passes
    assert "calibrated on" in found.verdict()


def test_a_contender_that_was_not_calibrated_is_named(tmp_path: Path) -> None:
    learned = load_run(write_run(tmp_path / "c", 2, "100mbit"))
    extra = [("fsdp2", STOCK), ("zstd", STOCK)]
    found = validate(Predictor([learned]), [load_run(write_run(tmp_path / "v", 2, "200mbit", extra))])
    assert [check.contender for check in found.checks] == ["fsdp2"]
    assert found.uncovered == ("zstd on 2 hosts, 200mbit",)


def test_deepspeed_has_medians_and_no_trace(tmp_path: Path) -> None:
    """Its step is stock FSDP2's, which its own medians correct."""
    slower = replace(STOCK, bias=1.3, rest_seconds=0.2)
    runs = []
    for rate in ("100mbit", "200mbit", "400mbit"):
        folder = write_run(tmp_path / rate, 4, rate, [("fsdp2", STOCK), ("zero3", slower)])
        (folder / "traces" / "zero3.json").unlink()
        runs.append(load_run(folder))
    slow, checked, fast = runs
    found = validate(Predictor([slow, fast]), [checked])
    assert {check.contender: abs(check.error) < 0.01 for check in found.counted} == {"fsdp2": True, "zero3": True}


def test_the_command_projects_what_it_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learned, checked = folders(tmp_path)
    out = tmp_path / "out.json"
    arguments = ["simulate", "--calibrate", *learned, "--validate", *checked, "--gpus", "8", "16", "16384"]
    assert main([*arguments, "--json", str(out), "--save-calibration", str(tmp_path / "calibration.json")]) == 0
    printed = capsys.readouterr().out
    assert "validated within 4 %" in printed and STAMP not in printed
    content = json.loads(out.read_text())
    assert content["unvalidated"] is False and content["stamp"] is None
    assert content["validation"]["passes"] and len(content["validation"]["checks"]) == 8
    by_key = {(point["contender"], point["world_size"]): point for point in content["projection"]}
    assert by_key["value_delta", 16]["source"] == "recorded" and by_key["paper", 16]["source"] == "derived"
    assert by_key["fsdp2", 16]["speedup"] == 1.0
    assert by_key["value_delta", 16]["host_bytes"] < by_key["fsdp2", 16]["host_bytes"]
    Calibration.from_json((tmp_path / "calibration.json").read_text())


def test_the_stand_at_another_rate_adds_the_calibrated_rest(tmp_path: Path) -> None:
    learned, checked = folders(tmp_path)
    out = tmp_path / "out.json"
    arguments = ["simulate", "--calibrate", *learned, "--validate", *checked, "--ranks-per-node", "1", "--gpus", "4"]
    assert main([*arguments, "--rate", "200mbit", "--contenders", "value_delta", "--json", str(out)]) == 0
    points = {point["contender"]: point for point in json.loads(out.read_text())["projection"]}
    measured = load_run(Path(checked[2])).medians
    assert format_rate(load_run(Path(checked[2])).setting.rate_bits_per_second) == "200mbit"
    for key in ("fsdp2", "value_delta"):
        assert points[key]["seconds"] == pytest.approx(measured[key], rel=0.01)


def test_the_command_refuses_beyond_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learned, checked = folders(tmp_path, bias=1.1)
    out, picture = tmp_path / "out.json", tmp_path / "projection.png"
    arguments = ["simulate", "--calibrate", *learned, "--validate", *checked, "--gpus", "8", "--json", str(out)]
    assert main(arguments) == 3
    said = capsys.readouterr()
    assert (
        "8 of 8 measured medians" in said.err and "value_delta on 4 hosts, 300mbit" in said.err and "-9.1 %" in said.err
    )
    assert not out.exists() and "projected" not in said.out
    assert main([*arguments, "--unvalidated", "--plot-projection", str(picture)]) == 0
    assert f"{STAMP}: projected" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content["unvalidated"] is True and content["stamp"] == STAMP and not content["validation"]["passes"]
    assert picture.stat().st_size > 10_000


def test_the_command_refuses_without_anything_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", 2, "100mbit")
    trace = str(folder / "traces" / "fsdp2.json")
    assert main(["simulate", trace]) == 3
    assert "no measured run to compare with" in capsys.readouterr().err
    assert main(["simulate", trace, "--calibrate", str(folder), "--validate", str(folder)]) == 3
    assert "have the hosts and rate of a run that was calibrated on" in capsys.readouterr().err
    assert main(["simulate", trace, "--unvalidated", "--gpus", "4", "--contenders", "default"]) == 0
    assert STAMP in capsys.readouterr().out


def test_runs_of_another_job_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learned, checked = folders(tmp_path)
    results = Path(checked[0]) / "results.json"
    results.write_text(results.read_text().replace('"tokens_per_rank": 1', '"tokens_per_rank": 2'))
    assert main(["simulate", "--calibrate", *learned, "--validate", *checked, "--gpus", "8"]) == 2
    error = capsys.readouterr().err
    assert "trained another job" in error and "2 tokens a rank" in error and error.count("\n") == 1


def test_pictures_carry_the_stamp(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    texts: list[list[str]] = []
    original = Figure.savefig

    def watched(figure: Figure, *args: object, **kwargs: object) -> None:
        texts.append([text.get_text() for text in figure.texts])
        original(figure, *args, **kwargs)

    folder = write_run(tmp_path / "run", 2, "100mbit")
    arguments = ["simulate", str(folder / "traces" / "fsdp2.json"), "--unvalidated", "--gpus", "16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", watched)
        assert main([*arguments, "--plot", str(tmp_path / "t.png"), "--plot-projection", str(tmp_path / "p.png")]) == 0
    assert len(texts) == 2 and all(text.count(STAMP) == 2 for text in texts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--validate", "x"], "--validate needs --calibrate"),
        (["--calibrate", "nowhere"], "is no output folder"),
        (["nowhere.json", "--unvalidated"], "'nowhere.json' cannot be read"),
        (["--unvalidated"], "nothing to simulate"),
        (["--unvalidated", "--rate", "200mbit"], "--rate is one of the measured stand"),
        (["TRACE", "--unvalidated", "--gpus", "12"], "12 GPUs in nodes of 8 are not allowed"),
        (["TRACE", "--unvalidated", "--contenders", "magic"], "contender 'magic' is not known here"),
        (["TRACE", "--unvalidated", "--between-nodes", "fast"], "--between-nodes: 'fast' is no link"),
        (["STRANGE", "--unvalidated"], "is no trace: event 'Teleport'"),
        (["OURS", "--unvalidated"], "one of stock FSDP2 ('fsdp2') is needed"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", 2, "100mbit")
    trace = folder / "traces" / "fsdp2.json"
    strange = tmp_path / "strange.json"
    strange.write_text(trace.read_text().replace('"Compute"', '"Teleport"', 1))
    paths = {"TRACE": trace, "STRANGE": strange, "OURS": folder / "traces" / "value_delta.json"}
    assert main(["simulate", *(str(paths.get(word, word)) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_traces_and_rates_go_round(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 2, "100mbit")
    trace = Trace.load(folder / "traces" / "fsdp2.json")
    assert Trace.from_json(trace.to_json()) == trace
    assert load_run(folder).medians["fsdp2"] == pytest.approx(sum(trace.iteration_seconds))
    assert load_run(folder).scatters["fsdp2"] == pytest.approx((1.1 - 0.95) / 2)  # iterations of 0.9, 1 and 1.2 medians
    assert parse_rate("1.5gbit") == 1.5e9 and format_rate(2e8) == "200mbit" and format_rate(None) == "no limit"
    with pytest.raises(UnitError, match="fast"):
        parse_rate("fast")

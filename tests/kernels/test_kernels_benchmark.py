"""benchmarks/kernels.py: a tiny run on CPU, what it counts, its goals and its picture. No figure of speed is asserted."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from fake_cuda import run_with_fake_cuda
from fsdp_ciera.kernels import cuda, host, reference, reference_tiles
from fsdp_ciera.kernels.changes import Form
from fsdp_ciera.kernels.dispatch import VARIABLE
from fsdp_ciera.kernels.formats import FORMATS, packed_bytes
from fsdp_ciera.kernels.tiles import make_tiles
from places import BENCHMARKS

SCRIPT = BENCHMARKS / "kernels.py"
NAMES = ["hash", "checksum", "split", "merge", "scan", "find 1.2 %", "apply 1.2 %", "find 8 %", "apply 8 %"]
needs_host_build = pytest.mark.skipif(bool(host.WHY_NOT), reason=host.WHY_NOT)


def load_benchmark() -> ModuleType:
    """By path: a plain `import kernels` could find the package of that name."""
    spec = importlib.util.spec_from_file_location("kernels_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels_benchmark"] = module
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()


def run_script(*arguments: str) -> str:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_host_build
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp32"])
def test_a_tiny_run(fmt: str, tmp_path: Path) -> None:
    extra = ["--reference"] if fmt == "bf16" else []
    path = tmp_path / "rates.json"
    printed = run_script("--mib", "1", "--rounds", "1", "--format", fmt, "--json", str(path), *extra)
    found: dict[str, Any] = json.loads(path.read_text())
    assert set(found) == {"title", "identity", "threads", "rounds", "rates", "goals"}
    about = found["identity"]
    assert set(about) == {"ptx_sha256", "host_sources", "device", "driver", "torch"} and all(about.values())
    assert len(about["ptx_sha256"]) == 64 and about["torch"] == torch.__version__
    assert found["title"].startswith(f"host kernels, {fmt}")
    rates = [benchmark.Rate(**rate) for rate in found["rates"]]
    implementations = ["host", "reference"] if extra else ["host"]
    assert [(rate.implementation, rate.name) for rate in rates] == [(one, n) for one in implementations for n in NAMES]
    for rate in rates:
        assert rate.mib == 1 and rate.num_bytes >= 1 << 20 and rate.counted and not rate.waited_for_host
        for figure in (rate.share, rate.gb_per_s, rate.copy_gb_per_s, rate.seconds, rate.copy_seconds):
            assert math.isfinite(figure) and figure > 0
    assert [goal["verdict"] for goal in found["goals"]] == ["not measured here"] * 8
    assert about["ptx_sha256"] in printed.replace("\n", "") and all(name in printed for name in NAMES)


def test_it_tells_what_it_would_measure() -> None:
    line = run_script("--sha")
    assert line.startswith("PTX SHA-256 ") and f"torch {torch.__version__}" in line and line.count("\n") == 1


class CountingTimer:
    """Runs every call, and says that each took a second."""

    def __init__(self, num_sets: int) -> None:
        self._num_sets = num_sets

    def num_sets(self, num_bytes: int) -> int:
        return self._num_sets

    def seconds(self, calls: Any, copies: Any, may_queue: bool) -> tuple[float, float, bool]:
        assert len(calls) == self._num_sets
        for call in (*calls, *calls, *calls):
            call()
        return 1.0, 1.0, False


def cases_of(make_cases: Any, kernels: Any, dtype: torch.dtype, num_values: int, num_sets: int) -> dict[str, Any]:
    """Runs every case, twice, and demands right results -> by name."""
    fmt, found = FORMATS[dtype], {}
    values, timer = benchmark.make_values(fmt, num_values, torch.device("cpu")), CountingTimer(num_sets)
    for case in make_cases(kernels, fmt, values, timer):
        for _ in range(2):
            timer.seconds(case.calls, [], True)
            assert case.is_right(), case.name
        found[case.name] = case
    return found


@pytest.mark.parametrize("dtype", FORMATS)
def test_bytes_are_those_of_the_algorithm(dtype: torch.dtype) -> None:
    fmt, num_values = FORMATS[dtype], 70_003
    cases = cases_of(benchmark.host_cases, reference, dtype, num_values, 2)
    value_bytes, plane_bytes = num_values * fmt.item_bytes, num_values + fmt.remainder_bytes(num_values)
    bitmap_bytes = packed_bytes(num_values, 1)
    assert {name: cases[name].num_bytes for name in ("hash", "checksum", "split", "merge", "scan")} == {
        "hash": value_bytes + 16 * 137,
        "checksum": value_bytes,
        "split": value_bytes + plane_bytes,
        "merge": value_bytes + plane_bytes,
        "scan": 2 * value_bytes + bitmap_bytes,
    }
    values = benchmark.make_values(fmt, num_values, torch.device("cpu"))
    for share in benchmark.SHARES:
        fresh = benchmark.make_changed(values, fmt, share)
        changes = reference.find_changes(fresh, values.clone(), fmt, Form())
        assert len(changes.moves) == pytest.approx(share * num_values, rel=0.1)
        assert 0 < len(changes.literals) < 0.05 * len(changes.moves)
        sent = len(changes.moves) + len(changes.literals) * fmt.item_bytes
        for kernel, more in (("find", 0), ("apply", len(changes.moves) * fmt.item_bytes)):
            case = cases[f"{kernel}, {100 * share:g} % changed"]
            assert case.num_bytes == 2 * value_bytes + bitmap_bytes + sent + more


@pytest.mark.parametrize("dtype", FORMATS)
def test_bytes_of_tile_kernels_are_those_of_the_algorithm(dtype: torch.dtype) -> None:
    fmt, num_values = FORMATS[dtype], 70_003
    cases = cases_of(benchmark.tile_cases, reference_tiles, dtype, num_values, 2)
    beside = cases_of(benchmark.host_cases, reference, dtype, num_values, 2)
    symbols = ("scan symbols", "put nibbles", "merge symbols")
    assert list(cases) == [*beside, *symbols]
    for name in ("hash", "checksum", "split", "merge", "scan"):
        assert cases[name].num_bytes == beside[name].num_bytes, name
    values = benchmark.make_values(fmt, num_values, torch.device("cpu"))
    tiles = make_tiles([(0, num_values)], "cpu")
    num_escapes = int(reference_tiles.scan_symbols(values, tiles, fmt).up_to[-1])
    value_bytes, nibble_bytes, side_bytes = values.nbytes, -(-num_values // 2), 144 + 48 + num_escapes
    assert tiles.num_tiles == 35 and num_escapes < 1e-3 * num_values
    assert [cases[name].num_bytes for name in symbols] == [
        value_bytes + side_bytes,
        value_bytes + nibble_bytes,
        value_bytes + fmt.remainder_bytes(num_values) + nibble_bytes + side_bytes,
    ]
    for share in benchmark.SHARES:
        fresh = benchmark.make_changed(values, fmt, share)
        changes = reference.find_changes(fresh, values.clone(), fmt, Form())
        num_octets = int((changes.changed != 0).sum())
        sections = (12 * 36, -(-num_values // 64), num_octets, len(changes.moves), changes.literals.nbytes)
        end = 0
        for num_bytes in sections:
            end = -(-end // 16) * 16 + num_bytes
        find, apply = (cases[f"{kernel}, {100 * share:g} % changed"].num_bytes for kernel in ("find", "apply"))
        assert find == cases["scan"].num_bytes + end
        assert apply == end + 2 * 8 * fmt.item_bytes * num_octets


def cuda_cases_in_child(dtype_name: str) -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda(check_races=False)
    cases_of(benchmark.tile_cases, cuda, getattr(torch, dtype_name), 4999, 2)
    assert not [name for name in fake.calls() if "Synchronize" in name]
    print(" ".join(sorted({launch.kernel for launch in fake.launches})))


def test_on_cuda_it_launches_what_does_not_wait() -> None:
    """Behind the stand-in driver: no more than that each case makes the launches it should, with right results."""
    printed = run_with_fake_cuda(cuda_cases_in_child, "bfloat16", env={VARIABLE: "cuda"})
    assert printed.split() == [
        "apply_values_bf16", "checksum", "finish_checksums", "hash_blocks_bf16", "merge_rows_bf16", "merge_symbols_bf16",
        "pack_symbols_bf16", "pack_values_bf16", "put_nibbles_bf16", "scan_symbols_bf16", "scan_values_bf16", "split_bf16",
    ]  # fmt: skip


def rate(kernel: str, changed: float | None, implementation: str, mib: int, share: float, seconds: float = 1.0) -> Any:
    return benchmark.Rate(
        kernel, changed, implementation, "bf16", mib, "values", 1, seconds, 1.0, share, 100.0, share, False
    )


def verdicts(rates: list[Any], device: str, num_threads: int = 1) -> dict[str, str]:
    return {goal.text: goal.verdict for goal in benchmark.goals_of(rates, device, num_threads)}


def test_goals_on_the_device_take_the_worst_figure_above_8_mib() -> None:
    rates = [rate("merge", None, "cuda", mib, share) for mib, share in ((1, 9), (8, 9), (64, 81), (512, 90))]
    rates += [rate("apply", changed, "cuda", 64, share) for changed, share in ((0.012, 90), (0.08, 79))]
    rates += [rate("hash", None, "cuda", 64, 70), rate("find", 0.08, "cuda", 64, 49)]
    found = verdicts(rates, "NVIDIA H200")
    of = {name: found[f"H200, above 8 MiB: {name} in % of the copy"] for name in ("merge", "apply", "hash", "scan")}
    assert of == {"merge": "reached", "apply": "not reached", "hash": "reached", "scan": "not measured here"}
    assert found["H200, above 8 MiB: every kernel in % of the copy"] == "not reached"
    assert set(verdicts(rates, "another GPU").values()) == {"not measured here"}
    assert set(verdicts(rates[:2], "NVIDIA H200").values()) == {"not measured here"}


def test_goals_on_cpu_are_beside_the_reference() -> None:
    rates = []
    for kernel, changed, slow in (
        ("hash", None, 5.0),
        ("merge", None, 1.9),
        ("find", 0.012, 6.0),
        ("apply", 0.012, 3.0),
    ):
        rates += [rate(kernel, changed, "host", 64, 50), rate(kernel, changed, "reference", 64, 10, slow)]
    found = [goal for goal in benchmark.goals_of(rates, "some CPU", 1) if goal.text.startswith("CPU")]
    assert [(goal.verdict, goal.found) for goal in found] == [("reached", 5.0), ("not reached", 1.9), ("reached", 4.5)]
    assert set(verdicts(rates, "some CPU", 2).values()) == {"not measured here"}
    smaller = [replace(one, mib=8) for one in rates]
    assert set(verdicts(smaller, "some CPU").values()) == {"not measured here"}


def test_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rates = []
    for mib in (1, 64):
        for implementation in ("cuda", "reference"):
            rates += [rate("hash", None, implementation, mib, 70), rate("find", 0.08, implementation, mib, 50, 2.0)]
    rates[0] = replace(rates[0], waited_for_host=True)
    console = Console(width=120, record=True)
    console.print(benchmark.table_of(rates, "title", "caption"), benchmark.goal_table(benchmark.goals_of(rates, "", 1)))
    text = console.export_text()
    assert "70.0 % *" in text and "find 8 %" in text and text.count("not measured here") == 8
    benchmark.draw(rates, "title", str(tmp_path / "bars.png"))
    assert (tmp_path / "bars.png").stat().st_size > 5000


class FakeEvent:
    """Of a device that starts a batch once its sleeping kernel has slept for as long as `launches` take."""

    slept, needed = 0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return FakeEvent.slept < FakeEvent.needed

    def elapsed_time(self, end: FakeEvent) -> float:
        return 40.0


@pytest.mark.parametrize(("needed", "waited"), [(1 << 25, False), (1 << 40, True)])
def test_device_timer_sleeps_until_all_is_queued(monkeypatch: pytest.MonkeyPatch, needed: int, waited: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 << 20))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: setattr(FakeEvent, "slept", cycles))
    monkeypatch.setattr(FakeEvent, "needed", needed)
    timer = benchmark.DeviceTimer(3, torch.device("cuda", 0))
    assert (timer.num_sets(1 << 20), timer.num_sets(2 << 30)) == (100, 2)
    calls = [0, 0]

    def call(number: int) -> None:
        calls[number] += 1

    seconds, copy_seconds, has_waited = timer.seconds([lambda: call(0), lambda: call(1)], [lambda: None] * 40, True)
    assert (seconds, copy_seconds, has_waited) == (40e-3 / timer.MIN_CALLS, 40e-3 / 40, waited)
    assert calls[0] == calls[1] >= 3 * timer.MIN_CALLS / 2

"""`ciera bench gather`: equal bits, a crossover, all files; and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ciera.bench import netns
from fsdp_ciera.bench.gather_cells import Cell, crossovers, link_break_evens
from fsdp_ciera.bench.gather_rank import GatherJob, Outcome, measure_gathers, moved
from fsdp_ciera.cli.main import main
from fsdp_ciera.cli.tasks import bench_gather as gather
from fsdp_ciera.testing import run_ranks
from fsdp_ciera.units import format_bytes, format_host_rate

KIB, MIB = 2**10, 2**20


def run_command(*arguments: str) -> int:
    return main(["bench", "gather", *arguments])


def cell(size_bytes: int, ratio: float, **changes: Any) -> Cell:
    """A cell whose plain gather takes 1 s."""
    fields: dict[str, Any] = {
        "rate": None,
        "codec": "entropy",
        "changed_percent": 1.0,
        "measured_changed_percent": 1.0,
        "plain_samples": (0.5, 1.0, 9.0),
        "samples": (1 / ratio,),
        "raw_bytes": 1e6,
        "wire_bytes": 5e5,
        "is_equal": True,
    }
    return Cell(size_bytes=size_bytes, **{**fields, **changes})


def test_loopback_measures_every_cell_and_writes_all_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    options = ["--hosts", "2", "--loopback", "--sizes", "4KiB", "64KiB", "--changes", "0", "5", "100", "--repeats", "3",
               "--codecs", "value_delta", "exponent_block", "--out", str(tmp_path / "made")]  # fmt: skip
    assert run_command(*options) == 0
    content = json.loads((tmp_path / "made" / "gathers.json").read_text())
    cells = content["cells"]
    assert len(cells) == 2 * 3 * 2
    assert content["setting"]["mode"] == "loopback"
    for one in cells:
        assert one["is_equal"]
        assert one["ratio"] > 0
        assert len(one["samples"]) == len(one["plain_samples"]) == 3
        assert one["raw_bytes"] == one["size_bytes"] / 2
    by_place = {(one["codec"], one["size_bytes"], one["changed_percent"]): one for one in cells}
    for size in (4 * KIB, 64 * KIB):
        sent = [by_place["value_delta", size, percent]["wire_bytes"] for percent in (0, 5, 100)]
        assert 0 < sent[0] < sent[1] < sent[2]
        assert by_place["value_delta", size, 0]["measured_changed_percent"] == 0
        assert by_place["value_delta", size, 5]["measured_changed_percent"] == pytest.approx(5, abs=2)
        assert by_place["value_delta", size, 100]["measured_changed_percent"] == 100
    # the other half of a value travels always, and with it nothing but headers and bitmap where nothing changed
    assert 0.5 < by_place["exponent_block", 64 * KIB, 0]["wire_bytes"] / (32 * KIB) < 0.52
    with (tmp_path / "made" / "gathers.csv").open() as file:
        assert [float(row["ratio"]) for row in csv.DictReader(file)] == [one["ratio"] for one in cells]
    assert len(content["crossovers"]) == 2 * 3
    assert (tmp_path / "made" / "gathers.png").read_bytes().startswith(b"\x89PNG")
    said = capfd.readouterr().out
    assert "Ours is faster from this size on, no limit" in said


def measure_with_a_flipped_bit(rank: int, world_size: int) -> list[Outcome]:
    """A gather of the codec that rank 1 gets wrong in one bit, as if it had decoded badly."""
    from fsdp_ciera.gather.collective import CieraAllGather

    real = CieraAllGather.__call__

    def wrong(self: CieraAllGather, output_tensor: torch.Tensor, **named: Any) -> Any:
        work = real(self, output_tensor, **named)
        if rank == 1 and self.policy.codecs == ("entropy",):
            output_tensor.view(torch.int16)[3] ^= 1
        return work

    CieraAllGather.__call__ = wrong  # type: ignore[method-assign]
    job = GatherJob(
        sizes_bytes=(4 * KIB,), repeats=(1,), changed_percents=(5,), codecs=("raw", "entropy"), drain_bytes=KIB
    )
    return list(measure_gathers(job))


def test_a_wrong_gather_is_noticed_on_all_ranks() -> None:
    for outcomes in run_ranks(measure_with_a_flipped_bit, 2):
        assert [(outcome.codec, outcome.is_equal) for outcome in outcomes] == [("raw", True), ("entropy", False)]


def test_a_wrong_gather_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [cell(MIB, 2.0), cell(4 * MIB, 2.0, is_equal=False)]
    monkeypatch.setattr(gather, "measure_cells", lambda options, console: cells)
    assert run_command("--loopback", "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert said.err == "ciera: entropy gave other bits than the plain gather: 4 MiB, 1 % changed, no limit\n"
    assert said.out.count("WRONG BITS") == 1
    assert json.loads((tmp_path / "gathers.json").read_text())["cells"][1]["is_equal"] is False


def test_a_rank_that_fails_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gather.sys, "executable", "false")  # type: ignore[attr-defined]
    assert run_command("--loopback", "--out", str(tmp_path / "made")) == 1
    assert "rank 0 ended with 1" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_the_crossover_lies_between_the_last_slower_and_the_first_faster_size() -> None:
    # 1/4, 1/2, 2, 4: equal half way between 256 KiB and 1 MiB on a logarithmic axis
    sizes = [64 * KIB, 256 * KIB, MIB, 4 * MIB]
    found = crossovers(cell(size, ratio) for size, ratio in zip(sizes, [0.25, 0.5, 2.0, 4.0], strict=True))
    assert [(one.smallest_faster_bytes, one.break_even_bytes) for one in found] == [(MIB, pytest.approx(512 * KIB))]


@pytest.mark.parametrize(
    ("ratios", "smallest", "break_even"),
    [
        ([2.0, 2.0, 2.0], 64 * KIB, None),  # at all sizes
        ([0.5, 0.5, 0.5], None, None),  # at none
        ([2.0, 2.0, 0.5], None, None),  # not at the largest
        ([2.0, 0.5, 2.0], MIB, 512 * KIB),  # faster once below does not count
        ([0.5, 1.0, 2.0], MIB, 256 * KIB),  # equal is not faster
    ],
)
def test_crossovers_of_other_shapes(ratios: list[float], smallest: int | None, break_even: float | None) -> None:
    cells = [cell(size, ratio) for size, ratio in zip([64 * KIB, 256 * KIB, MIB], ratios, strict=True)]
    (found,) = crossovers(cells)
    assert found.smallest_faster_bytes == smallest
    assert found.break_even_bytes == (None if break_even is None else pytest.approx(break_even))


def test_crossovers_are_told_apart_by_link_codec_and_share() -> None:
    cells = [
        cell(size, ratio, rate=rate, codec=codec, changed_percent=percent)
        for rate in (None, "200mbit")
        for codec in ("raw", "entropy")
        for percent in (0.0, 1.0)
        for size, ratio in ((KIB, 0.5), (MIB, 2.0 if percent else 0.9))
    ]
    found = {(one.rate, one.codec, one.changed_percent): one.smallest_faster_bytes for one in crossovers(cells)}
    assert len(found) == 8
    assert all(smallest == (MIB if percent else None) for (_, _, percent), smallest in found.items())


def test_the_break_even_of_link_speeds() -> None:
    # 8 Mbit/s and 800 Mbit/s as the plain gather reaches them; ratios 4 and 1/4: equal at 80 Mbit/s
    slow = {"rate": "8mbit", "plain_samples": (1.0,)}
    fast = {"rate": None, "plain_samples": (0.01,)}
    cells = [
        cell(MIB, 1, **slow, samples=(0.25,)),
        cell(MIB, 1, **fast, samples=(0.04,)),
        cell(MIB, 1, **slow, samples=(0.5,), codec="raw"),
        cell(MIB, 1, **fast, samples=(0.005,), codec="raw"),
        cell(KIB, 1, **slow, samples=(2.0,)),  # a smaller size is not looked at
    ]
    found = {one.codec: (one.bits_per_second, one.always) for one in link_break_evens(cells)}
    assert found == {"entropy": (pytest.approx(8e7), None), "raw": (None, True)}
    assert link_break_evens(cells[:1]) == []


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.2, 1.0])
def test_values_move_as_an_optimizer_step_moves_them(share: float) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=random).mul(0.02).bfloat16()
    values[:4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    after = moved(values, share, random)
    moves = after.view(torch.int16).int() - values.view(torch.int16).int()
    num_moved = int((moves != 0).sum())
    assert num_moved == (1 if share == 1e-6 else pytest.approx(20_000 * share, rel=0.05))
    assert torch.isfinite(after).all()
    assert torch.equal(torch.signbit(after), torch.signbit(values))
    if share == 0.2:
        assert float((moves.abs() == 1).sum() / num_moved) == pytest.approx(0.8, abs=0.03)
        assert float((moves > 0).sum() / num_moved) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "many"], "--sizes: 'many' is not a byte size"),
        (["--sizes", "1B"], "--sizes: 1 bytes must be from 1 KiB to 16 GiB"),
        (["--changes", "101"], "--changes: 101 must be from 0 to 100 percent of values"),
        (["--codecs", "zip"], "--codecs: 'zip' is not one of raw, entropy"),
        (["--codecs", "raw", "raw"], "--codecs: ('raw', 'raw') must be at least one value, each once"),
        (["--hosts", "1"], "--hosts 1 --ranks-per-host 1: a gather needs at least 2 ranks"),
        (["--rate", "200mb"], "--rate: rate='200mb' must be a number and one of kbit, mbit, gbit"),
        (["--loopback", "--rate", "1gbit"], "--loopback has no links to limit, so --rate 1gbit must be left out"),
        (["--repeats", "0"], "--repeats 0 must be at least 1"),
    ],
)
def test_what_is_not_allowed_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ciera: {message}")
    assert error.count("\n") == 1


def test_without_root_it_names_the_loopback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run_command("--out", str(tmp_path / "made")) == 2
    error = capsys.readouterr().err
    assert error.startswith("ciera: network namespaces need root, but this runs as user 1000")
    assert "--loopback" in error and error.count("\n") == 1


def test_ranks_on_limited_links(tmp_path: Path) -> None:
    try:
        with netns.NetnsCluster(1):
            pass
    except (netns.NetnsError, FileNotFoundError) as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    options = ["--hosts", "2", "--rate", "1gbit", "--sizes", "16KiB", "--changes", "1", "--repeats", "1",
               "--codecs", "exponent_delta", "--out", str(tmp_path)]  # fmt: skip
    assert run_command(*options) == 0
    content = json.loads((tmp_path / "gathers.json").read_text())
    assert [(one["rate"], one["is_equal"]) for one in content["cells"]] == [("1gbit", True)]
    assert content["setting"]["mode"] == "namespaces"
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"{netns.PREFIX}-{os.getpid()}-" not in listed


def test_sizes_and_speeds_in_words() -> None:
    assert [format_bytes(size) for size in (512, 64 * KIB, 1.5 * MIB, 1023 * KIB, 2**30)] == [
        "512 B", "64 KiB", "1.5 MiB", "1023 KiB", "1 GiB",
    ]  # fmt: skip
    assert [format_host_rate(rate) for rate in ("200mbit", "1.5gbit", None)] == [
        "200 Mbit/s a host", "1.5 Gbit/s a host", "no limit",
    ]  # fmt: skip

"""The report of a run of the stand: figures by contender, CSV and verdicts.

    Results  ->  summarize  ->  write_csv, verdicts      (tables and pictures: cli/tables, cli/figures)

Every ratio divides the median seconds of FSDP2 by those of the contender, over all timed iterations of one run, so that 2 means
half as long. Since contenders take turns in each round, a slow minute of the machine affects them all. Bytes are means over the
timed iterations, of one host. Unknown figures (no iterations, no interface, no FSDP2 in the run) are NaN: "-" in tables, empty
in CSV.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fsdp_ciera.bench.contenders import CONTENDERS, FSDP2, KEEP, Contender, Kind
from fsdp_ciera.bench.frames import frame_of, mean, median, quantiles
from fsdp_ciera.bench.frames import write_csv as records_to_csv
from fsdp_ciera.bench.results import Measured, Results, Setting, Step
from fsdp_ciera.errors import ReportError
from fsdp_ciera.units import format_number, format_share

DEFAULT = "default"
"""Key of our default policy."""
PARTS = ("compute", "gather", "reduce_scatter", "other_collective", "codec")
"""Parts of an iteration; with `_seconds` added, fields of `Step`."""

STEP_COLUMNS = tuple(field.name for field in fields(Step))
BYTES_BAR_PERCENT, SLOWER_BAR_PERCENT = 1.0, 2.0
MARKS = ((FSDP2, "FSDP2", 2.3), (KEEP, "FSDP2 reshard_after_forward=False", 1.8))
"""(Contender key, its name, how many times as fast the default policy is to be), on `MARK_HOSTS` at `MARK_RATE`."""
MARK_HOSTS, MARK_RATE = 4, "200mbit"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one contender. Seconds are medians over its timed iterations."""

    contender: Contender
    measured: Measured
    seconds: float
    p5_seconds: float
    p95_seconds: float
    part_seconds: Mapping[str, float]
    """Median seconds by `PARTS`; their sum is only about `seconds`, since each is a median of its own."""
    stock_ratio: float
    """Seconds of FSDP2 / seconds."""
    keep_ratio: float
    """Seconds of FSDP2 with `reshard_after_forward=False` / seconds."""
    counted_bytes: float
    gathered_bytes: float
    interface_bytes: float
    has_stock_bits: bool | None
    """Whether all losses and the final parameters have the bits of FSDP2; `None` where either was not measured."""
    loss: float
    """Last loss of a round."""
    loss_difference: float
    """`loss` minus that of FSDP2 at the same iteration."""

    @property
    def label(self) -> str:
        """Label of the contender, marked if it is lossy."""
        label = self.contender.label
        return label if self.contender.is_lossless or "lossy" in label.lower() else f"{label} (lossy)"

    @property
    def is_slower(self) -> bool:
        """Whether it takes more than `SLOWER_BAR_PERCENT` longer than FSDP2."""
        return self.stock_ratio * (1 + SLOWER_BAR_PERCENT / 100) < 1

    @property
    def interface_percent(self) -> float:
        """Excess of the interface's count over the library's, in percent of the latter."""
        return 100 * (_ratio(self.interface_bytes, self.counted_bytes) - 1)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One promise, and whether this run kept it."""

    name: str
    passed: bool | None
    """Whether the promise was kept; `None` if this run cannot tell."""
    text: str
    decides: bool
    """Whether a promise not kept makes the command's exit code 1."""


def summarize(results: Results, contenders: Mapping[str, Contender] = CONTENDERS) -> list[Summary]:
    """Returns the figures of every contender of a run, in the run's order.

    Raises `ReportError` for a contender that `contenders` lacks.
    """
    unknown = [measured.contender for measured in results.measured if measured.contender not in contenders]
    if unknown:
        raise ReportError(f"contender {unknown[0]!r} of the results is none of {', '.join(contenders)}")
    stock, keep = results.of(FSDP2), results.of(KEEP)
    return [_summary(measured, contenders[measured.contender], stock, keep) for measured in results.measured]


def median_seconds(measured: Measured | None) -> float:
    """Returns the median seconds of the timed iterations; NaN if there are none."""
    return median(frame_of(measured.steps, STEP_COLUMNS), "seconds") if measured else math.nan


def _summary(measured: Measured, contender: Contender, stock: Measured | None, keep: Measured | None) -> Summary:
    steps = frame_of(measured.steps, STEP_COLUMNS)
    seconds = median(steps, "seconds")
    p5, p95 = quantiles(steps, "seconds", (0.05, 0.95))
    last = min(len(measured.losses), len(stock.losses)) - 1 if stock else -1
    return Summary(
        contender=contender,
        measured=measured,
        seconds=seconds,
        p5_seconds=p5,
        p95_seconds=p95,
        part_seconds={part: median(steps, f"{part}_seconds") for part in PARTS},
        stock_ratio=_ratio(median_seconds(stock), seconds),
        keep_ratio=_ratio(median_seconds(keep), seconds),
        counted_bytes=mean(steps, "counted_bytes"),
        gathered_bytes=mean(steps, "gathered_bytes"),
        interface_bytes=mean(steps, "interface_bytes"),
        has_stock_bits=_has_same_bits(measured, stock) if stock else None,
        loss=measured.losses[-1] if measured.losses else math.nan,
        loss_difference=measured.losses[last] - stock.losses[last] if stock and last >= 0 else math.nan,
    )


def _has_same_bits(measured: Measured, stock: Measured) -> bool | None:
    if not (measured.losses and stock.losses and measured.parameters_digest and stock.parameters_digest):
        return None
    # Losses of timed iterations too: `losses` is of one round, and every round starts from the same weights.
    stock_losses = {(step.round, step.step): step.loss for step in stock.steps}
    timed = [(step.loss, stock_losses.get((step.round, step.step), step.loss)) for step in measured.steps]
    return (
        measured.parameters_digest == stock.parameters_digest
        and _bits(measured.losses) == _bits(stock.losses)
        and _bits(ours for ours, _ in timed) == _bits(theirs for _, theirs in timed)
    )


def _bits(values: Iterable[float]) -> bytes:
    return b"".join(struct.pack("<d", value) for value in values)  # unlike ==, tells -0 from 0 and a NaN is itself


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan


def setting_text(setting: Setting) -> str:
    """Returns the setting for titles, such as `4 hosts x 1 rank, 200mbit`."""
    ranks = "1 rank" if setting.ranks_per_host == 1 else f"{setting.ranks_per_host} ranks"
    where = "loopback" if setting.mode == "loopback" else setting.rate or "no limit"
    return f"{setting.hosts} host{'s' * (setting.hosts != 1)} x {ranks}, {where}"


def verdicts(results: Results, contenders: Mapping[str, Contender] = CONTENDERS) -> list[Verdict]:
    """Judges bits, bytes, whether ours is ever slower, and in their setting the speed marks.

    Only different bits and failed runs decide the exit code.
    """
    summaries = summarize(results, contenders)
    all_verdicts = [
        _ran(results.setting, summaries),
        _bits_kept(summaries),
        _bytes_agree(summaries),
        _never_slower(summaries),
    ]
    if results.setting.hosts == MARK_HOSTS and results.setting.rate == MARK_RATE:
        default_seconds = median_seconds(results.of(DEFAULT))
        for key, name, mark in MARKS:
            ratio = _ratio(median_seconds(results.of(key)), default_seconds)
            passed = None if math.isnan(ratio) else ratio >= mark
            text = f"default policy {format_number(ratio, 3)}x as fast as {name} (mark {mark})"
            all_verdicts.append(Verdict(name=f"{mark}x", passed=passed, text=text, decides=False))
    return all_verdicts


def exit_code(all_verdicts: Sequence[Verdict]) -> int:
    """Returns 1 if a promise that decides was not kept, else 0."""
    return int(any(verdict.decides and verdict.passed is False for verdict in all_verdicts))


def _ran(setting: Setting, summaries: Sequence[Summary]) -> Verdict:
    able = [summary for summary in summaries if not summary.contender.lacks(setting.hosts, setting.ranks_per_host)]
    expected = [summary for summary in able if summary.contender.kind is not Kind.PEER]
    failed = [
        summary.label for summary in expected if summary.measured.failure is not None or not summary.measured.steps
    ]
    text = f"NOT measured: {'; '.join(failed)}" if failed else f"all {len(expected)} of FSDP2 and ours were measured"
    return Verdict(name="runs", passed=not failed, text=text, decides=True)


def _bits_kept(summaries: Sequence[Summary]) -> Verdict:
    others = [summary for summary in summaries if summary.contender.is_bitwise and summary.contender.key != FSDP2]
    judged = [summary for summary in others if summary.has_stock_bits is not None]
    lost = [summary.label for summary in judged if not summary.has_stock_bits]
    text = f"{len(judged) - len(lost)} of {len(judged)} have FSDP2's losses and parameters, bit for bit"
    if lost:
        text += f"; DIFFERENT BITS: {'; '.join(lost)}"
    if unknown := [summary.label for summary in others if summary.has_stock_bits is None]:
        text += f"; not compared: {'; '.join(unknown)}"
    return Verdict(name="bits", passed=not lost if judged else None, text=text, decides=True)


def _bytes_agree(summaries: Sequence[Summary]) -> Verdict:
    known = [summary for summary in summaries if not math.isnan(summary.interface_percent)]
    if not known:
        return Verdict(name="bytes", passed=None, text="no interface was read", decides=False)
    over = [summary for summary in known if abs(summary.interface_percent) > BYTES_BAR_PERCENT]
    over_of_peers = [summary for summary in over if summary.contender.kind is Kind.PEER]
    judged = [summary for summary in over if summary.contender.kind is not Kind.PEER]
    text = f"interface against count, {len(known)} read, over {BYTES_BAR_PERCENT:g} %: {_percents(judged)}"
    text += f", of peers: {_percents(over_of_peers)}"
    if not over:
        text += f"; largest: {_percents([max(known, key=lambda summary: abs(summary.interface_percent))])}"
    return Verdict(name="bytes", passed=not judged, text=text, decides=False)


def _percents(summaries: Sequence[Summary]) -> str:
    # Where little is sent, the messages of gloo and TCP themselves are a large share: so the difference itself too.
    texts = [
        f"{summary.label} {summary.interface_percent:+.2f} % "
        f"({(summary.interface_bytes - summary.counted_bytes) / 1e3:+,.0f} kB an iteration)"
        for summary in summaries
    ]
    return "; ".join(texts) or "none"


def _never_slower(summaries: Sequence[Summary]) -> Verdict:
    """Judges policies that may choose plain gathers. A single codec is used whether it pays or not, so it is not judged."""
    ours = [summary for summary in summaries if summary.contender.may_choose_nothing]
    known = [summary for summary in ours if not math.isnan(summary.stock_ratio)]
    if not known:
        return Verdict(name="never slower", passed=None, text="no policy of ours beside FSDP2", decides=False)
    slow = [summary for summary in known if summary.is_slower]
    worst = min(known, key=lambda summary: summary.stock_ratio)
    text = f"of our policies, {len(slow)} of {len(known)} take over {SLOWER_BAR_PERCENT:g} % longer than FSDP2"
    named = "; ".join(
        f"{summary.label} {format_share(1 / summary.stock_ratio - 1, signed=True)}" for summary in slow or [worst]
    )
    return Verdict(
        name="never slower",
        passed=not slow,
        text=f"{text}: {named}" if slow else f"{text}; the slowest: {named}",
        decides=False,
    )


def write_csv(results: Results, path: Path, contenders: Mapping[str, Contender] = CONTENDERS) -> None:
    """Writes one row for each contender, with exact figures. Raises `OSError`."""
    contender_columns = ("key", "label", "kind", "is_lossless", "is_bitwise")
    summary_columns = ("seconds", "p5_seconds", "p95_seconds", "stock_ratio", "keep_ratio", "gathered_bytes", "counted_bytes",
                  "interface_bytes", "interface_percent", "loss", "loss_difference", "has_stock_bits")  # fmt: skip
    measured_columns = ("peak_memory_bytes", "cache_bytes", "failure")
    rows = [
        {name: getattr(summary.contender, name) for name in contender_columns}
        | {"num_timed_steps": len(summary.measured.steps)}
        | {name: getattr(summary, name) for name in summary_columns}
        | {f"{part}_seconds": summary.part_seconds[part] for part in PARTS}
        | {name: getattr(summary.measured, name) for name in measured_columns}
        | {"notes": "; ".join(summary.measured.notes)}
        for summary in summarize(results, contenders)
    ]
    records_to_csv(rows, list(rows[0]) if rows else [], path)


def write_steps_csv(results: Results, path: Path) -> None:
    """Writes one row for each timed iteration of each contender. Raises `OSError`."""
    rows = [
        {"contender": measured.contender, **asdict(step)} for measured in results.measured for step in measured.steps
    ]
    records_to_csv(rows, ["contender", *STEP_COLUMNS], path)

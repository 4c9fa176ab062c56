"""Compares predicted with measured iteration times, in settings that the calibration has not seen.

A prediction for (contender, hosts, rate) uses calibration runs alone: the contender's traces at the same number of hosts (the
median over rates; payloads from the nearest rate) or, moved, those at another number; the calibrated network; and corrections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median

from fsdp_ciera.profiling.trace import Trace
from fsdp_ciera.simulator.calibrate import Calibration, calibrate, with_corrections
from fsdp_ciera.simulator.engine import simulate
from fsdp_ciera.simulator.graph import build, priced
from fsdp_ciera.simulator.network import Place
from fsdp_ciera.simulator.place import COLLECTIVES, move
from fsdp_ciera.simulator.runs import MeasuredRun, RunSetting, setting_of
from fsdp_ciera.simulator.schemes import BY_KEY, derive
from fsdp_ciera.units import format_share

BAR = 0.04
"""The largest relative error that passes: the paper's simulator matches measured iteration times within 4 %."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One contender in one measured setting."""

    contender: str
    setting: RunSetting
    predicted_seconds: float
    measured_seconds: float
    """The median seconds of its iterations."""
    measured_scatter: float
    """The scatter of its iterations, see `MeasuredRun.scatters`."""
    is_independent: bool
    """Whether no run of this setting was calibrated on. Only such a check counts."""

    @property
    def error(self) -> float:
        """The relative error with its sign: above 0 where the prediction is too long."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True, kw_only=True)
class Validation:
    """All checks, and what could not be checked."""

    checks: tuple[Check, ...] = ()
    uncovered: tuple[str, ...] = ()
    """Measured contenders, with their settings, that cannot be predicted."""

    @property
    def counted(self) -> tuple[Check, ...]:
        """The checks that count."""
        return tuple(check for check in self.checks if check.is_independent)

    @property
    def worst(self) -> Check | None:
        """The check with the largest error among those that count; `None` where none counts."""
        return max(self.counted, key=lambda check: abs(check.error), default=None)

    @property
    def passes(self) -> bool:
        """Whether a check counts, and none that counts misses the bar."""
        return self.worst is not None and abs(self.worst.error) <= BAR

    def verdict(self) -> str:
        """Says in one line what passed or missed the bar."""
        worst = self.worst
        if worst is None:
            if self.checks:
                return (
                    "not validated: all runs to validate with have the hosts and rate of a run that was calibrated on"
                )
            return "not validated: no measured run to compare with (--calibrate FOLDER ... --validate FOLDER ...)"
        worst_text = f"{worst.contender} on {worst.setting}: predicted {worst.predicted_seconds:.3f} s, measured"
        worst_text += f" {worst.measured_seconds:.3f} s ({format_share(worst.error, signed=True)})"
        count = f"{len(self.counted)} measured medians that were not calibrated on"
        if self.passes:
            return f"validated within {100 * BAR:g} % on {count}; the worst is {worst_text}"
        num_misses = sum(abs(check.error) > BAR for check in self.counted)
        return f"{num_misses} of {count} miss the bar of {100 * BAR:g} %; the worst is {worst_text}"


class Predictor:
    """Predicts iterations of the stand from calibration runs."""

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        """Calibrates with `runs`. Raises `SimulationError` where it cannot, as `calibrate` does."""
        self._runs = runs
        self.traces = [trace for run in runs for trace in run.traces.values()]
        self.calibration: Calibration = calibrate(runs)
        self.calibration = with_corrections(self.calibration, list(self._samples()))

    def trace_for(self, contender: str, setting: RunSetting) -> Trace | None:
        """Returns a contender's step in a setting, before a network prices its collectives; `None` where no calibration run
        gives one."""
        traces = [trace for trace in self.traces if trace.contender == contender]
        if not traces:
            return self._derived(contender, setting)
        place = setting.place
        at_place = [trace for trace in traces if setting_of(trace).place == place]
        if not at_place:
            nearest = min(
                traces,
                key=lambda trace: (abs(log(trace.world_size / place.world_size)), _distance(trace, setting)),
            )
            at_place = [trace for trace in traces if setting_of(trace).place == setting_of(nearest).place]
        typical = _typical(sorted(at_place, key=lambda trace: _distance(trace, setting)))
        machine = self.calibration.machine
        return replace(move(typical, place, machine, machine), rate_bits_per_second=setting.rate_bits_per_second)

    def _derived(self, contender: str, setting: RunSetting) -> Trace | None:
        """Derives the step of a contender that was measured but not recorded (DeepSpeed): stock FSDP2's with its own bytes."""
        was_measured = any(contender in run.medians for run in self._runs)
        if not was_measured or contender not in BY_KEY or BY_KEY[contender].needs_costs or contender == "fsdp2":
            return None
        stock = self.trace_for("fsdp2", setting)
        return None if stock is None else derive(stock, BY_KEY[contender], (), setting.place, None)

    def predict(self, contender: str, setting: RunSetting) -> float | None:
        """Predicts the seconds of a contender's median iteration; `None` where `trace_for` finds no step."""
        parts = self._parts(contender, setting)
        if parts is None:
            return None
        own_seconds, network_seconds = parts
        correction = self.calibration.correction_of(contender, setting.place)
        return own_seconds + correction.network_scale * network_seconds + correction.rest_seconds

    def _parts(self, contender: str, setting: RunSetting) -> tuple[float, float] | None:
        """Returns the seconds of a contender's own work and of its collectives: together, a serial schedule."""
        trace = self.trace_for(contender, setting)
        if trace is None:
            return None
        network = self.calibration.network(setting.rate_bits_per_second, setting.place)
        schedule = simulate(build(priced(trace, network), is_serial=True))
        network_seconds = sum(schedule.kind_seconds(kind) for kind in COLLECTIVES)
        return schedule.seconds - network_seconds, network_seconds

    def _samples(self) -> Iterator[tuple[str, Place, float, float, float]]:
        for run in self._runs:
            for contender, measured_seconds in run.medians.items():
                parts = self._parts(contender, run.setting)
                if parts is not None:
                    yield contender, run.setting.place, *parts, measured_seconds


def validate(predictor: Predictor, runs: Sequence[MeasuredRun]) -> Validation:
    """Compares every measured contender of `runs` with its prediction."""
    checks, uncovered = [], []
    calibrated_settings = set(predictor.calibration.settings)
    for run in runs:
        for contender, measured_seconds in run.medians.items():
            predicted_seconds = predictor.predict(contender, run.setting)
            if predicted_seconds is None:
                uncovered.append(f"{contender} on {run.setting}")
                continue
            checks.append(
                Check(
                    contender=contender,
                    setting=run.setting,
                    predicted_seconds=predicted_seconds,
                    measured_seconds=measured_seconds,
                    measured_scatter=run.scatters[contender],
                    is_independent=run.setting not in calibrated_settings,
                )
            )
    return Validation(checks=tuple(checks), uncovered=tuple(uncovered))


def _typical(traces: Sequence[Trace]) -> Trace:
    """Returns the first (nearest) trace with the median seconds, event by event, of all traces that have the same events."""
    first = traces[0]
    shape = [(event.node, event.phase, event.group) for event in first.events]
    alike = [trace for trace in traces if [(event.node, event.phase, event.group) for event in trace.events] == shape]
    events = [
        replace(event, seconds=median(trace.events[index].seconds for trace in alike))
        for index, event in enumerate(first.events)
    ]
    return replace(first, events=tuple(events))


def _distance(trace: Trace, setting: RunSetting) -> float:
    """Returns how far the rate of a trace is from that of the setting: the absolute logarithm of their ratio."""
    rates = [1e12 if rate is None else rate for rate in (trace.rate_bits_per_second, setting.rate_bits_per_second)]
    return abs(log(rates[0] / rates[1]))

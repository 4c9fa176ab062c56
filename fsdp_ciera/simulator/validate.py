"""Validation: predicted beside measured iteration times, in settings that the calibration has not seen.

A prediction for (contender, hosts, rate) uses calibration runs alone: the contender's trace at the same number of hosts (the
median over rates; payloads from the nearest rate), or at another number, moved; the calibrated network and corrections.
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
from fsdp_ciera.simulator.runs import Run, Setting, setting_of
from fsdp_ciera.simulator.schemes import BY_KEY, derive
from fsdp_ciera.units import format_share

BAR = 0.04
"""The paper's: its simulator matches measured iteration times within 4 %."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One contender in one measured setting."""

    contender: str
    setting: Setting
    predicted_seconds: float
    measured_seconds: float
    """The median of its iterations."""
    measured_scatter: float
    """Of them, see `Run.scatters`."""
    is_independent: bool
    """Whether nothing of this setting was calibrated on; only then it counts."""

    @property
    def error(self) -> float:
        """Relative, with its sign: above 0 where the prediction is too long."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True, kw_only=True)
class Validation:
    """All checks, and what could not be checked."""

    checks: tuple[Check, ...] = ()
    uncovered: tuple[str, ...] = ()
    """Measured contenders that the calibration knows nothing of."""

    @property
    def counted(self) -> tuple[Check, ...]:
        """Those that count."""
        return tuple(check for check in self.checks if check.is_independent)

    @property
    def worst(self) -> Check | None:
        """The one with the largest error that counts."""
        return max(self.counted, key=lambda check: abs(check.error), default=None)

    @property
    def passes(self) -> bool:
        """Whether something was checked, and nothing misses the bar."""
        return self.worst is not None and abs(self.worst.error) <= BAR

    def verdict(self) -> str:
        """One line."""
        worst = self.worst
        if worst is None:
            if self.checks:
                return (
                    "not validated: all runs to validate with have the hosts and rate of a run that was calibrated on"
                )
            return "not validated: no measured run to compare with (--calibrate FOLDER ... --validate FOLDER ...)"
        what = f"{worst.contender} on {worst.setting}: predicted {worst.predicted_seconds:.3f} s, measured"
        what += f" {worst.measured_seconds:.3f} s ({format_share(worst.error, signed=True)})"
        count = f"{len(self.counted)} measured medians that were not calibrated on"
        if self.passes:
            return f"validated within {100 * BAR:g} % on {count}; the worst is {what}"
        misses = sum(abs(check.error) > BAR for check in self.counted)
        return f"{misses} of {count} miss the bar of {100 * BAR:g} %; the worst is {what}"


class Predictor:
    """Predicts iterations of the stand from calibration runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Calibrates. Raises `SimulationError` where it cannot."""
        self._runs = runs
        self.traces = [trace for run in runs for trace in run.traces.values()]
        self.calibration: Calibration = calibrate(runs)
        self.calibration = with_corrections(self.calibration, list(self._samples()))

    def trace_for(self, contender: str, setting: Setting) -> Trace | None:
        """Its step there, without the network's seconds; `None` where no calibration run has a trace of it."""
        known = [trace for trace in self.traces if trace.contender == contender]
        if not known:
            return self._derived(contender, setting)
        place = setting.place
        here = [trace for trace in known if setting_of(trace).place == place]
        if not here:
            nearest = min(known, key=lambda one: (abs(log(one.world_size / place.world_size)), _distance(one, setting)))
            here = [trace for trace in known if setting_of(trace).place == setting_of(nearest).place]
        typical = _typical(sorted(here, key=lambda one: _distance(one, setting)))
        machine = self.calibration.machine
        return replace(move(typical, place, machine, machine), rate_bits_per_second=setting.rate_bits_per_second)

    def _derived(self, contender: str, setting: Setting) -> Trace | None:
        """Of a contender that was measured but could not be recorded (DeepSpeed): stock FSDP2's step with its own bytes."""
        was_measured = any(contender in run.medians for run in self._runs)
        if not was_measured or contender not in BY_KEY or BY_KEY[contender].needs_costs or contender == "fsdp2":
            return None
        stock = self.trace_for("fsdp2", setting)
        return None if stock is None else derive(stock, BY_KEY[contender], (), setting.place, None)

    def predict(self, contender: str, setting: Setting) -> float | None:
        """Seconds of its median iteration; `None` where nothing is known of it."""
        parts = self._parts(contender, setting)
        if parts is None:
            return None
        own, network = parts
        correction = self.calibration.correction_of(contender, setting.place)
        return own + correction.network_scale * network + correction.rest_seconds

    def _parts(self, contender: str, setting: Setting) -> tuple[float, float] | None:
        """Seconds of its own work and of collectives: in a serial schedule, all of an iteration."""
        trace = self.trace_for(contender, setting)
        if trace is None:
            return None
        network = self.calibration.network(setting.rate_bits_per_second, setting.place)
        found = simulate(build(priced(trace, network), is_serial=True))
        in_network = sum(found.kind_seconds(kind) for kind in COLLECTIVES)
        return found.seconds - in_network, in_network

    def _samples(self) -> Iterator[tuple[str, Place, float, float, float]]:
        for run in self._runs:
            for contender, measured in run.medians.items():
                parts = self._parts(contender, run.setting)
                if parts is not None:
                    yield contender, run.setting.place, *parts, measured


def validate(predictor: Predictor, runs: Sequence[Run]) -> Validation:
    """Compares every measured contender of `runs` with its prediction."""
    checks, uncovered = [], []
    calibrated = set(predictor.calibration.settings)
    for run in runs:
        for contender, measured in run.medians.items():
            predicted = predictor.predict(contender, run.setting)
            if predicted is None:
                uncovered.append(f"{contender} on {run.setting}")
                continue
            checks.append(
                Check(
                    contender=contender,
                    setting=run.setting,
                    predicted_seconds=predicted,
                    measured_seconds=measured,
                    measured_scatter=run.scatters[contender],
                    is_independent=run.setting not in calibrated,
                )
            )
    return Validation(checks=tuple(checks), uncovered=tuple(uncovered))


def _typical(traces: Sequence[Trace]) -> Trace:
    """The first (nearest) trace, its own work with the median seconds of all that have the same events."""
    first = traces[0]
    shape = [(event.node, event.phase, event.group) for event in first.events]
    alike = [trace for trace in traces if [(one.node, one.phase, one.group) for one in trace.events] == shape]
    events = [
        replace(event, seconds=median(trace.events[place].seconds for trace in alike))
        for place, event in enumerate(first.events)
    ]
    return replace(first, events=tuple(events))


def _distance(trace: Trace, setting: Setting) -> float:
    """How far its rate is from that of the setting."""
    rates = [1e12 if rate is None else rate for rate in (trace.rate_bits_per_second, setting.rate_bits_per_second)]
    return abs(log(rates[0] / rates[1]))

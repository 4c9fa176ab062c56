"""Calibration: the constants of the stand's network and of its shared cores, from measured traces.

1. collectives   every recorded collective gives one equation for the constants call, hop, efficiency and copying:
                 seconds = calls * call + calls * hops * hop + bytes / rate * 1/efficiency   (throttled)
                 seconds = calls * call + calls * hops * hop + bytes * slow-down * copying   (no limit)
                 They are solved for each kind, inside and between hosts, for each place with several rates and for all
                 places together: least squares, nothing below zero, outliers count less.
2. contention    how much longer the same forward and backward take on W ranks that share the cores, from all W in the traces
3. corrections   by contender and place, from all calibrated rates:  measured iteration = own work + scale * network + rest.
                 They are needed because ranks wait for one another, and a median of sums is not the sum of medians.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from statistics import median
from typing import Any

import numpy as np

from fsdp_ciera.bench.netns import burst_bytes
from fsdp_ciera.errors import SimulationError
from fsdp_ciera.profiling.trace import Trace
from fsdp_ciera.simulator.fit import fit_robust
from fsdp_ciera.simulator.network import Network, Place, Wire, hops, sent_bytes
from fsdp_ciera.simulator.place import COLLECTIVES, Machine, hierarchical_param_groups, place_of, ring_of
from fsdp_ciera.simulator.runs import MeasuredRun, RunSetting

FORMAT = 1
_NOISE_SECONDS, _NOISE_SHARE = 0.005, 0.05
"""A collective's seconds are expected to vary by the sum of the first, in seconds, and the second, as a share of them."""
_LEAST_SCALE = 0.75
"""A fitted network scale below this, or above its inverse, is not believed."""
_MAX_CONTENTION, _CONTENTION_STEPS = 3.0, 301


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of one kind of collective, between hosts or inside a host."""

    call_seconds: float = 0.0
    hop_seconds: float = 0.0
    per_nominal_second: float = 1.0
    """Seconds that the link takes for what its nominal rate carries in one second: the inverse of the efficiency, which headers
    of TCP/IP and pauses lower."""
    copy_seconds_per_byte: float = 0.0
    """Seconds to copy a byte on a rank with a core of its own."""

    def wire(self, rate_bytes_per_second: float, slowdown: float) -> Wire:
        """Returns the wire at this rate (`inf`: no limit), for ranks that compute `slowdown` times as long as one alone."""
        return Wire(
            call_seconds=self.call_seconds,
            hop_seconds=self.hop_seconds,
            seconds_per_byte=self.per_nominal_second / rate_bytes_per_second,
            copy_seconds_per_byte=self.copy_seconds_per_byte * slowdown,
        )


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The difference between a measured iteration and the sum of its parts."""

    network_scale: float = 1.0
    """The factor for the seconds of collectives; 1 where only one rate was measured."""
    rest_seconds: float = 0.0

    @classmethod
    def fit(cls, samples: Sequence[tuple[float, float, float]]) -> Correction:
        """Fits (own seconds, network seconds, measured seconds) at one place by least squares of relative errors."""
        own_seconds, network_seconds, measured_seconds = np.array(samples).T
        rests_seconds = measured_seconds - own_seconds - network_seconds
        if np.ptp(network_seconds) <= 0.05 * network_seconds.max():
            return cls(rest_seconds=float(np.median(rests_seconds)))
        columns = np.stack([network_seconds, np.ones_like(network_seconds)], axis=1) / measured_seconds[:, None]
        wanted = (measured_seconds - own_seconds) / measured_seconds
        network_scale, rest_seconds = np.linalg.lstsq(columns, wanted, rcond=None)[0]
        if not _LEAST_SCALE <= network_scale <= 1 / _LEAST_SCALE:
            # the network's constants cannot be so wrong: the run was disturbed
            return cls(rest_seconds=float(np.median(rests_seconds)))
        # the rest may be below zero: recorded work holds disturbances that the median iteration was spared
        return cls(network_scale=float(network_scale), rest_seconds=float(rest_seconds))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The constants that were fitted, and the settings of the runs that they were fitted to."""

    settings: tuple[RunSetting, ...]
    num_cores: int
    contention: float
    between: Mapping[str, Constants]
    """Constants between hosts by kind of collective, fitted to all places together."""
    inside: Mapping[str, Constants]
    """The same inside a host."""
    between_at: Mapping[str, Mapping[str, Constants]] = field(default_factory=dict)
    """Constants between hosts by place ("<hosts>x<ranks per host>") and kind, for places with at least two rates. A place uses
    its own constants where there are any, since the number of ranks decides how well a ring fills its links."""
    corrections: Mapping[str, Mapping[str, Correction]] = field(default_factory=dict)
    """Corrections by contender and place."""
    num_collectives: int = 0
    """The number of recorded collectives that the constants were fitted to."""

    @property
    def machine(self) -> Machine:
        """The machine that the calibrated runs computed on."""
        return Machine(num_cores=self.num_cores, contention=self.contention)

    def network(self, rate_bits_per_second: float | None, place: Place) -> Network:
        """Returns the stand's network at a rate (`None`: no limit), where the ranks of `place` share the stand's cores."""
        rate = inf if rate_bits_per_second is None else rate_bits_per_second / 8
        slowdown = self.machine.slowdown(place.world_size)
        between = {**self.between, **self.between_at.get(_key(place), {})}
        default = Constants()
        return Network(
            between={"any": default.wire(rate, slowdown)}
            | {kind: constants.wire(rate, slowdown) for kind, constants in between.items()},
            inside={"any": default.wire(inf, slowdown)}
            | {kind: constants.wire(inf, slowdown) for kind, constants in self.inside.items()},
            burst_bytes=0.0 if rate == inf else burst_bytes(8 * rate),
            rate_bytes_per_second=rate,
            label="the stand's calibrated network",
        )

    def correction_of(self, contender: str, place: Place) -> Correction:
        """Returns the correction that was fitted for a contender at `place`.

        Where none was, it returns that of the nearest world size, its rest scaled by the slow-down. A contender that was not
        measured gets the corrections of stock FSDP2.
        """
        by_place = self.corrections.get(contender) or self.corrections.get("fsdp2", {})
        if (key := _key(place)) in by_place:
            return by_place[key]
        if not by_place:
            return Correction()
        nearest = min(by_place, key=lambda place_key: abs(np.log(_world_size(place_key) / place.world_size)))
        slowdown = self.machine.slowdown
        factor = slowdown(place.world_size) / slowdown(_world_size(nearest))
        return replace(by_place[nearest], rest_seconds=factor * by_place[nearest].rest_seconds)

    def to_json(self) -> str:
        """Returns the text that `from_json` reads back to the same calibration."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Reads what `to_json` wrote. Raises `SimulationError` for anything else."""
        try:
            read: dict[str, Any] = json.loads(text)
            if read.pop("format", None) != FORMAT:
                raise SimulationError(f"this is no calibration of format {FORMAT}: calibrate again")
            settings = tuple(RunSetting(**fields) for fields in read.pop("settings"))
            between, inside = (
                {kind: Constants(**fields) for kind, fields in read.pop(name).items()} for name in ("between", "inside")
            )
            between_at = {
                key: {kind: Constants(**fields) for kind, fields in by_kind.items()}
                for key, by_kind in read.pop("between_at").items()
            }
            corrections = {
                contender: {key: Correction(**fields) for key, fields in by_place.items()}
                for contender, by_place in read.pop("corrections").items()
            }
            return cls(settings=settings, between=between, inside=inside, between_at=between_at, corrections=corrections,
                       **read)  # fmt: skip
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise SimulationError(f"this is no calibration: {error!r}") from None


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """Fits a calibration to all traces of these runs, without corrections (see `with_corrections`).

    Raises `SimulationError` if no trace of 2 ranks or more has blocking collectives, or if the runs come from machines with
    different numbers of cores.
    """
    traces = [trace for run in runs for trace in run.traces.values() if trace.is_serial and trace.world_size > 1]
    if not traces:
        raise SimulationError(
            "no traces of 2 ranks or more, with collectives that block, to calibrate with: give output folders of "
            "`ciera bench e2e`, with their traces"
        )
    num_cores = traces[0].num_cores
    if any(trace.num_cores != num_cores for trace in traces):
        counts = sorted({trace.num_cores for trace in traces})
        raise SimulationError(f"runs to calibrate with come from machines with {counts} cores, allowed: one machine")
    contention = _contention(traces, num_cores)
    machine = Machine(num_cores=num_cores, contention=contention)
    between, inside, num_rows = _constants(traces, machine)
    traces_at: dict[str, list[Trace]] = {}
    for trace in traces:
        traces_at.setdefault(_key(place_of(trace)), []).append(trace)
    between_at = {
        key: _constants(place_traces, machine)[0]
        for key, place_traces in traces_at.items()
        if len({trace.rate_bits_per_second for trace in place_traces}) > 1
    }
    return Calibration(
        settings=tuple(dict.fromkeys(run.setting for run in runs)),
        num_cores=num_cores,
        contention=contention,
        between=between,
        inside=inside,
        between_at=between_at,
        num_collectives=num_rows,
    )


def with_corrections(
    calibration: Calibration, samples: Iterable[tuple[str, Place, float, float, float]]
) -> Calibration:
    """Returns the calibration with corrections fitted to `samples`: (contender, place, own, network and measured seconds)."""
    by_contender: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for contender, place, own_seconds, network_seconds, measured_seconds in samples:
        place_samples = by_contender.setdefault(contender, {}).setdefault(_key(place), [])
        place_samples.append((own_seconds, network_seconds, measured_seconds))
    corrections = {
        contender: {key: Correction.fit(place_samples) for key, place_samples in by_place.items()}
        for contender, by_place in by_contender.items()
    }
    return replace(calibration, corrections=corrections)


def _key(place: Place) -> str:
    return f"{place.hosts}x{place.local_size}"


def _world_size(key: str) -> int:
    hosts, local_size = key.split("x")
    return int(hosts) * int(local_size)


def _contention(traces: Sequence[Trace], num_cores: int) -> float:
    """Returns the factor in 1 + factor x (W / cores - 1) that fits forward and backward best over several W; 1 for one W."""
    all_seconds: dict[tuple[str, int], list[float]] = {}
    for trace in traces:
        seconds = sum(event.seconds for event in trace.events if event.node == "Compute" and event.phase != "optimizer")
        all_seconds.setdefault((trace.contender, trace.world_size), []).append(seconds)
    medians = {key: median(samples) for key, samples in all_seconds.items() if median(samples) > 0}
    world_sizes: dict[str, list[int]] = {}
    for contender, world_size in medians:
        world_sizes.setdefault(contender, []).append(world_size)
    excess = {size: max(0.0, size / num_cores - 1) for _, size in medians} if num_cores else {}
    compared = {
        contender: sizes
        for contender, sizes in world_sizes.items()
        if len({excess.get(size, 0.0) for size in sizes}) > 1
    }
    if not compared:
        return 1.0

    def error(factor: float) -> float:
        total = 0.0
        for contender, sizes in compared.items():
            logs = [np.log(medians[contender, size] / (1 + factor * excess[size])) for size in sizes]
            total += float(np.var(logs)) * len(logs)
        return total

    return float(min(np.linspace(0, _MAX_CONTENTION, _CONTENTION_STEPS), key=error))


def _constants(traces: Sequence[Trace], machine: Machine) -> tuple[dict[str, Constants], dict[str, Constants], int]:
    """Returns constants by kind, between hosts and inside a host, and the number of collectives that they were fitted to."""
    rows: dict[tuple[str, bool], list[tuple[tuple[float, ...], float]]] = {}
    for trace in traces:
        bytes_per_second = inf if trace.rate_bits_per_second is None else trace.rate_bits_per_second / 8
        two_level = hierarchical_param_groups(trace)
        idle_seconds = inf
        for event in trace.events:
            if event.node not in COLLECTIVES:
                idle_seconds += event.seconds
                continue
            ring = ring_of(trace, event, two_level)
            if ring.ranks < 2:
                continue
            link_bytes = sent_bytes(event.node, event.payload_bytes, ring)
            num_calls = max(1, event.num_collectives)
            is_throttled = bytes_per_second < inf and not ring.is_inside
            free_bytes = (
                min(burst_bytes(8 * bytes_per_second), idle_seconds * bytes_per_second) if is_throttled else 0.0
            )
            row = (
                float(num_calls),
                float(num_calls * sum(hops(event.node, ring))),
                max(0.0, link_bytes - free_bytes) / bytes_per_second if is_throttled else 0.0,
                0.0 if is_throttled else link_bytes * machine.slowdown(trace.world_size),
            )
            rows.setdefault((event.node, ring.is_inside), []).append((row, event.seconds))
            idle_seconds = 0.0
    constants: tuple[dict[str, Constants], dict[str, Constants]] = ({}, {})
    for (kind, is_inside), samples in rows.items():
        columns = np.array([row for row, _ in samples])
        seconds = np.array([row_seconds for _, row_seconds in samples])
        weights = 1 / (_NOISE_SECONDS + _NOISE_SHARE * seconds)  # long collectives vary more than short ones
        call_seconds, hop_seconds, per_nominal_second, copy_seconds = fit_robust(
            columns * weights[:, None], seconds * weights
        )
        constants[is_inside][kind] = Constants(
            call_seconds=float(call_seconds),
            hop_seconds=float(hop_seconds),
            per_nominal_second=float(per_nominal_second) if columns[:, 2].any() else 1.0,
            copy_seconds_per_byte=float(copy_seconds),
        )
    return *constants, sum(map(len, rows.values()))

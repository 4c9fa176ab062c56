"""Calibration: the constants of the stand's network and of its shared cores, from measured traces.

1. collectives   every recorded one is a row of  calls * call + calls * hops * hop + bytes / rate * 1/efficiency   (throttled)
                                            or   calls * call + calls * hops * hop + bytes * slow-down * copying   (no limit)
                 by kind, inside and between hosts; least squares, nothing below zero, outliers count less; for each place with
                 several rates, and for all together
2. contention    how much longer the same forward and backward take on W ranks that share the cores, over all W at hand
3. corrections   by contender and place, over the calibrated rates:  measured iteration = own work + scale * network + rest.
                 Ranks wait for one another, and a median of sums is not the sum of medians.
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
from fsdp_ciera.simulator.place import COLLECTIVES, Machine, hierarchical_groups, place_of, ring_of
from fsdp_ciera.simulator.runs import Run, Setting

FORMAT = 1
_NOISE_SECONDS, _NOISE_SHARE = 0.005, 0.05
"""By how much a collective's seconds are expected to vary: so much, and such a share of them."""
_LEAST_SCALE = 0.75
_MAX_CONTENTION, _CONTENTION_STEPS = 3.0, 301


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Of one kind of collective, between hosts or inside one."""

    call_seconds: float = 0.0
    hop_seconds: float = 0.0
    per_nominal_second: float = 1.0
    """Seconds for what the nominal rate carries in one; the inverse of the efficiency (headers of TCP/IP, pauses)."""
    copy_seconds_per_byte: float = 0.0
    """On a rank with a core of its own."""

    def wire(self, rate_bytes_per_second: float, slowdown: float) -> Wire:
        """At a rate (`inf`: no limit)."""
        return Wire(
            call_seconds=self.call_seconds,
            hop_seconds=self.hop_seconds,
            seconds_per_byte=self.per_nominal_second / rate_bytes_per_second,
            copy_seconds_per_byte=self.copy_seconds_per_byte * slowdown,
        )


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What a measured iteration makes of the sum of its parts."""

    network_scale: float = 1.0
    """Of the seconds of its collectives; 1 where only one rate was measured."""
    rest_seconds: float = 0.0

    @classmethod
    def fit(cls, samples: Sequence[tuple[float, float, float]]) -> Correction:
        """From (own seconds, network seconds, measured seconds) at one place. Least squares of relative errors."""
        own, network, measured = np.array(samples).T
        if np.ptp(network) <= 0.05 * network.max():
            return cls(rest_seconds=float(np.median(measured - own - network)))
        columns = np.stack([network, np.ones_like(network)], axis=1) / measured[:, None]
        scale, rest = np.linalg.lstsq(columns, (measured - own) / measured, rcond=None)[0]
        if not _LEAST_SCALE <= scale <= 1 / _LEAST_SCALE:  # the network's constants cannot be as wrong: a disturbed run
            return cls(rest_seconds=float(np.median(measured - own - network)))
        # the rest may be below zero: recorded work holds disturbances that the median iteration was spared
        return cls(network_scale=float(scale), rest_seconds=float(rest))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was learned, and from which settings."""

    settings: tuple[Setting, ...]
    num_cores: int
    contention: float
    between: Mapping[str, Constants]
    """By kind of collective: of all places together."""
    inside: Mapping[str, Constants]
    between_at: Mapping[str, Mapping[str, Constants]] = field(default_factory=dict)
    """By place ("<hosts>x<ranks per host>") with at least two rates, and kind. How well a ring fills its links depends on how
    many ranks it has, so a place goes by its own constants where it can."""
    corrections: Mapping[str, Mapping[str, Correction]] = field(default_factory=dict)
    """By contender and place."""
    num_collectives: int = 0
    """Recorded collectives that it was fitted to."""

    @property
    def machine(self) -> Machine:
        """What its ranks computed on."""
        return Machine(num_cores=self.num_cores, contention=self.contention)

    def network(self, rate_bits_per_second: float | None, place: Place) -> Network:
        """The stand's network at a rate, with the ranks of `place` that share its cores."""
        rate = inf if rate_bits_per_second is None else rate_bits_per_second / 8
        slowdown = self.machine.slowdown(place.world_size)
        between = {**self.between, **self.between_at.get(_key(place), {})}
        spare = Constants()
        return Network(
            between={"any": spare.wire(rate, slowdown)}
            | {kind: constants.wire(rate, slowdown) for kind, constants in between.items()},
            inside={"any": spare.wire(inf, slowdown)}
            | {kind: constants.wire(inf, slowdown) for kind, constants in self.inside.items()},
            burst_bytes=0.0 if rate == inf else burst_bytes(8 * rate),
            rate_bytes_per_second=rate,
            label="the stand's calibrated network",
        )

    def correction_of(self, contender: str, place: Place) -> Correction:
        """As calibrated there, or as at the nearest world size, its rest scaled by the slow-down; stock FSDP2's for a contender
        that was not measured."""
        known = self.corrections.get(contender) or self.corrections.get("fsdp2", {})
        if (key := _key(place)) in known:
            return known[key]
        if not known:
            return Correction()
        nearest = min(known, key=lambda one: abs(np.log(_world_size(one) / place.world_size)))
        slowdown = self.machine.slowdown
        factor = slowdown(place.world_size) / slowdown(_world_size(nearest))
        return replace(known[nearest], rest_seconds=factor * known[nearest].rest_seconds)

    def to_json(self) -> str:
        """Text that `from_json` reads back to the same calibration."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Raises `SimulationError` for anything else."""
        try:
            read: dict[str, Any] = json.loads(text)
            if read.pop("format", None) != FORMAT:
                raise SimulationError(f"this is no calibration of format {FORMAT}: calibrate again")
            settings = tuple(Setting(**one) for one in read.pop("settings"))
            between, inside = (
                {kind: Constants(**one) for kind, one in read.pop(name).items()} for name in ("between", "inside")
            )
            between_at = {
                key: {kind: Constants(**one) for kind, one in its.items()}
                for key, its in read.pop("between_at").items()
            }
            corrections = {
                name: {key: Correction(**one) for key, one in its.items()}
                for name, its in read.pop("corrections").items()
            }
            return cls(settings=settings, between=between, inside=inside, between_at=between_at, corrections=corrections,
                       **read)  # fmt: skip
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise SimulationError(f"this is no calibration: {error!r}") from None


def calibrate(runs: Sequence[Run]) -> Calibration:
    """From all traces of these runs, without corrections (see `with_corrections`).

    Raises `SimulationError` where there are none with blocking collectives.
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
    by_place: dict[str, list[Trace]] = {}
    for trace in traces:
        by_place.setdefault(_key(place_of(trace)), []).append(trace)
    between_at = {
        key: _constants(its, machine)[0]
        for key, its in by_place.items()
        if len({trace.rate_bits_per_second for trace in its}) > 1
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


def with_corrections(calibration: Calibration, found: Iterable[tuple[str, Place, float, float, float]]) -> Calibration:
    """The same with (contender, place, own, network, measured seconds) taken into account."""
    gathered: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for contender, place, own, network, measured in found:
        gathered.setdefault(contender, {}).setdefault(_key(place), []).append((own, network, measured))
    corrections = {
        name: {key: Correction.fit(samples) for key, samples in its.items()} for name, its in gathered.items()
    }
    return replace(calibration, corrections=corrections)


def _key(place: Place) -> str:
    return f"{place.hosts}x{place.local_size}"


def _world_size(key: str) -> int:
    hosts, local = key.split("x")
    return int(hosts) * int(local)


def _contention(traces: Sequence[Trace], num_cores: int) -> float:
    """The factor in 1 + factor x (W / cores - 1) that fits forward and backward best over several W; 1 if there is one W."""
    samples: dict[tuple[str, int], list[float]] = {}
    for trace in traces:
        seconds = sum(event.seconds for event in trace.events if event.node == "Compute" and event.phase != "optimizer")
        samples.setdefault((trace.contender, trace.world_size), []).append(seconds)
    medians = {key: median(its) for key, its in samples.items() if median(its) > 0}
    sizes: dict[str, list[int]] = {}
    for contender, world_size in medians:
        sizes.setdefault(contender, []).append(world_size)
    excess = {size: max(0.0, size / num_cores - 1) for _, size in medians} if num_cores else {}
    compared = {name: its for name, its in sizes.items() if len({excess.get(size, 0.0) for size in its}) > 1}
    if not compared:
        return 1.0

    def error(factor: float) -> float:
        total = 0.0
        for name, its in compared.items():
            logs = [np.log(medians[name, size] / (1 + factor * excess[size])) for size in its]
            total += float(np.var(logs)) * len(logs)
        return total

    return float(min(np.linspace(0, _MAX_CONTENTION, _CONTENTION_STEPS), key=error))


def _constants(traces: Sequence[Trace], machine: Machine) -> tuple[dict[str, Constants], dict[str, Constants], int]:
    rows: dict[tuple[str, bool], list[tuple[tuple[float, ...], float]]] = {}
    for trace in traces:
        rate = inf if trace.rate_bits_per_second is None else trace.rate_bits_per_second / 8
        two_level = hierarchical_groups(trace)
        idle_seconds = inf
        for event in trace.events:
            if event.node not in COLLECTIVES:
                idle_seconds += event.seconds
                continue
            ring = ring_of(trace, event, two_level)
            if ring.ranks < 2:
                continue
            sent = sent_bytes(event.node, event.payload_bytes, ring)
            calls = max(1, event.num_collectives)
            is_throttled = rate < inf and not ring.is_inside
            free = min(burst_bytes(8 * rate), idle_seconds * rate) if is_throttled else 0.0
            columns = (
                float(calls),
                float(calls * sum(hops(event.node, ring))),
                max(0.0, sent - free) / rate if is_throttled else 0.0,
                0.0 if is_throttled else sent * machine.slowdown(trace.world_size),
            )
            rows.setdefault((event.node, ring.is_inside), []).append((columns, event.seconds))
            idle_seconds = 0.0
    found: tuple[dict[str, Constants], dict[str, Constants]] = ({}, {})
    for (kind, is_inside), samples in rows.items():
        table = np.array([row for row, _ in samples])
        seconds = np.array([taken for _, taken in samples])
        weights = 1 / (_NOISE_SECONDS + _NOISE_SHARE * seconds)  # long collectives vary more than short ones
        call, hop, per_nominal, copying = fit_robust(table * weights[:, None], seconds * weights)
        found[is_inside][kind] = Constants(
            call_seconds=float(call),
            hop_seconds=float(hop),
            per_nominal_second=float(per_nominal) if table[:, 2].any() else 1.0,
            copy_seconds_per_byte=float(copying),
        )
    return *found, sum(map(len, rows.values()))

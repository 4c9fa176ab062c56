"""Calibration: the constants of the stand's network and of its shared cores, from measured traces.

1. collectives   every recorded one is a row of  calls * call + calls * hops * hop + bytes / rate * 1/efficiency   (throttled)
                                            or   calls * call + calls * hops * hop + bytes * slow-down * copying   (no limit)
                 by kind, inside and between hosts; least squares, nothing below zero, outliers count less
2. contention    how much longer the same forward and backward take on W ranks that share the cores, over all W at hand
3. the rest      by contender and place: what a measured iteration has beyond the sum of its parts (ranks that wait for one
                 another; a median of sums is not the sum of medians), the median over the calibrated rates
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from statistics import median
from typing import Any

import numpy as np

from fsdp_ciera.simulator.errors import SimulationError
from fsdp_ciera.simulator.fit import fit_robust
from fsdp_ciera.simulator.network import Network, Place, Wire, hops, sent_bytes
from fsdp_ciera.simulator.place import COLLECTIVES, Machine, hierarchical_groups, ring_of
from fsdp_ciera.simulator.runs import Run, Setting
from fsdp_ciera.trace import Trace

FORMAT = 1
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
class Calibration:
    """What was learned, and from which settings."""

    settings: tuple[Setting, ...]
    num_cores: int
    contention: float
    between: Mapping[str, Constants]
    """By kind of collective."""
    inside: Mapping[str, Constants]
    rest_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By contender, and by "<hosts>x<ranks per host>"."""
    num_collectives: int = 0
    """Recorded collectives that it was fitted to."""

    @property
    def machine(self) -> Machine:
        """What its ranks computed on."""
        return Machine(num_cores=self.num_cores, contention=self.contention)

    def network(self, rate_bits_per_second: float | None, world_size: int) -> Network:
        """The stand's network at a rate, with so many ranks that share its cores."""
        rate = inf if rate_bits_per_second is None else rate_bits_per_second / 8
        slowdown = self.machine.slowdown(world_size)
        spare = Constants()
        return Network(
            between={"any": spare.wire(rate, slowdown)}
            | {kind: constants.wire(rate, slowdown) for kind, constants in self.between.items()},
            inside={"any": spare.wire(inf, slowdown)}
            | {kind: constants.wire(inf, slowdown) for kind, constants in self.inside.items()},
            burst_bytes=0.0 if rate == inf else burst_bytes(rate),
            rate_bytes_per_second=rate,
            label="the stand's calibrated network",
        )

    def rest_of(self, contender: str, place: Place) -> float:
        """What to add to the sum of a contender's parts: as calibrated there, or as at the nearest world size, scaled by the
        slow-down; 0 where nothing is known of it."""
        known = self.rest_seconds.get(contender, {})
        if (key := _key(place)) in known:
            return known[key]
        if not known:
            return 0.0
        nearest = min(known, key=lambda one: abs(np.log(_world_size(one) / place.world_size)))
        slowdown = self.machine.slowdown
        return known[nearest] * slowdown(place.world_size) / slowdown(_world_size(nearest))

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
            return cls(settings=settings, between=between, inside=inside, **read)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise SimulationError(f"this is no calibration: {error!r}") from None


def burst_bytes(rate_bytes_per_second: float) -> float:
    """What a host may send at once after a pause: the bucket that netns.py gives tbf."""
    return max(2.0 * 2**16, rate_bytes_per_second * 0.004)


def calibrate(runs: Sequence[Run]) -> Calibration:
    """From all traces of these runs, except the measured rest (see `with_rest`). Raises `SimulationError` where there are none
    with blocking collectives."""
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
    return Calibration(
        settings=tuple(dict.fromkeys(run.setting for run in runs)),
        num_cores=num_cores,
        contention=contention,
        between=between,
        inside=inside,
        num_collectives=num_rows,
    )


def with_rest(calibration: Calibration, found: Iterable[tuple[str, Place, float]]) -> Calibration:
    """The same with (contender, place, measured - predicted seconds) taken into account, by their medians."""
    gathered: dict[str, dict[str, list[float]]] = {}
    for contender, place, seconds in found:
        gathered.setdefault(contender, {}).setdefault(_key(place), []).append(seconds)
    rest = {name: {key: median(all_seconds) for key, all_seconds in its.items()} for name, its in gathered.items()}
    return replace(calibration, rest_seconds=rest)


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
            free = min(burst_bytes(rate), idle_seconds * rate) if is_throttled else 0.0
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
        call, hop, per_nominal, copying = fit_robust(table, np.array([seconds for _, seconds in samples]))
        found[is_inside][kind] = Constants(
            call_seconds=float(call),
            hop_seconds=float(hop),
            per_nominal_second=float(per_nominal) if table[:, 2].any() else 1.0,
            copy_seconds_per_byte=float(copying),
        )
    return *found, sum(map(len, rows.values()))

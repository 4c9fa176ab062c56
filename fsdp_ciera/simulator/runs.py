"""What the stand measured, as the simulator uses it: a `MeasuredRun` holds one output folder of `ciera bench e2e`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from fsdp_ciera.bench.results import Results
from fsdp_ciera.errors import SimulationError
from fsdp_ciera.profiling.trace import Trace
from fsdp_ciera.simulator.network import Place
from fsdp_ciera.units import format_rate, parse_rate


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """The hosts and the rate of a run. Runs with the same setting cannot vouch for one another."""

    hosts: int
    ranks_per_host: int
    rate_bits_per_second: float | None

    @property
    def place(self) -> Place:
        """The place of its ranks."""
        return Place(world_size=self.hosts * self.ranks_per_host, ranks_per_host=self.ranks_per_host)

    def __str__(self) -> str:
        ranks = "" if self.ranks_per_host == 1 else f" x {self.ranks_per_host} ranks"
        return f"{self.hosts} hosts{ranks}, {format_rate(self.rate_bits_per_second)}"


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The settings, iteration times and traces in one output folder of `ciera bench e2e`."""

    folder: Path
    setting: RunSetting
    job: str
    """What was trained, in words. Runs of different jobs say nothing about one another."""
    num_cores: int
    medians: Mapping[str, float]
    """By contender: the median seconds of an iteration."""
    scatters: Mapping[str, float]
    """By contender: half of the interquartile range of its iterations' seconds, as a share of their median. If this is large,
    the machine did other things too, and nothing can predict the medians."""
    traces: Mapping[str, Trace]


def load_run(folder: Path) -> MeasuredRun:
    """Reads results.json and traces/ of `folder`. Raises `SimulationError` where they are missing or are something else."""
    try:
        results = Results.load(folder / "results.json")
    except OSError as error:
        raise SimulationError(f"{str(folder)!r} is no output folder of `ciera bench e2e`: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimulationError(f"{str(folder / 'results.json')!r} cannot be used: {error}") from None
    setting = results.setting
    traces = [load_trace(path) for path in sorted((folder / "traces").glob("*.json"))]
    seconds_of = {
        measured.contender: [step.seconds for step in measured.steps]
        for measured in results.measured
        if measured.steps and measured.failure is None
    }
    return MeasuredRun(
        folder=folder,
        setting=RunSetting(
            hosts=setting.hosts,
            ranks_per_host=setting.ranks_per_host,
            rate_bits_per_second=None if setting.rate is None else parse_rate(setting.rate),
        ),
        job=f"{setting.model}, {setting.num_parameters} parameters, {setting.tokens_per_rank} tokens a rank, learning rate "
        f"{setting.learning_rate:g}, {setting.reduce_dtype} gradients, {setting.reduce_scatter} reduce-scatter",
        num_cores=setting.num_cores,
        medians={key: median(seconds) for key, seconds in seconds_of.items()},
        scatters={key: _scatter(seconds) for key, seconds in seconds_of.items()},
        traces={trace.contender: trace for trace in traces},
    )


def load_trace(path: Path) -> Trace:
    """Reads the trace in a file. Raises `SimulationError` for a file that is no trace."""
    try:
        return Trace.load(path)
    except OSError as error:
        raise SimulationError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimulationError(f"{str(path)!r} is no trace: {error}") from None


def setting_of(trace: Trace) -> RunSetting:
    """Returns the hosts and the rate with which a trace was recorded."""
    return RunSetting(
        hosts=-(-trace.world_size // trace.ranks_per_host),
        ranks_per_host=trace.ranks_per_host,
        rate_bits_per_second=trace.rate_bits_per_second,
    )


def _scatter(seconds: Sequence[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle

"""What the stand measured, as the simulator uses it: one `Run` is one output folder of `ciera bench e2e`."""

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
class Setting:
    """Where a run was: hosts and rate. Runs that share it cannot vouch for one another."""

    hosts: int
    ranks_per_host: int
    rate_bits_per_second: float | None

    @property
    def place(self) -> Place:
        """Its ranks."""
        return Place(world_size=self.hosts * self.ranks_per_host, ranks_per_host=self.ranks_per_host)

    def __str__(self) -> str:
        ranks = "" if self.ranks_per_host == 1 else f" x {self.ranks_per_host} ranks"
        return f"{self.hosts} hosts{ranks}, {format_rate(self.rate_bits_per_second)}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One folder."""

    folder: Path
    setting: Setting
    job: str
    """What was trained, in words: runs of different jobs say nothing of one another."""
    num_cores: int
    medians: Mapping[str, float]
    """By contender: seconds of an iteration."""
    scatters: Mapping[str, float]
    """By contender: half of what the middle half of its iterations spans, as a share of the median. Much of it: a machine that
    did other things, and medians that nothing can predict."""
    traces: Mapping[str, Trace]


def load_run(folder: Path) -> Run:
    """Reads results.json and traces/. Raises `SimulationError` where they are missing or are something else."""
    try:
        results = Results.load(folder / "results.json")
    except OSError as error:
        raise SimulationError(f"{str(folder)!r} is no output folder of `ciera bench e2e`: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimulationError(f"{str(folder / 'results.json')!r} cannot be used: {error}") from None
    setting = results.setting
    traces = [load_trace(path) for path in sorted((folder / "traces").glob("*.json"))]
    seconds = {
        one.contender: [step.seconds for step in one.steps]
        for one in results.measured
        if one.steps and one.failure is None
    }
    return Run(
        folder=folder,
        setting=Setting(
            hosts=setting.hosts,
            ranks_per_host=setting.ranks_per_host,
            rate_bits_per_second=None if setting.rate is None else parse_rate(setting.rate),
        ),
        job=f"{setting.model}, {setting.num_parameters} parameters, {setting.tokens_per_rank} tokens a rank, learning rate "
        f"{setting.learning_rate:g}, {setting.reduce_dtype} gradients, {setting.reduce_scatter} reduce-scatter",
        num_cores=setting.num_cores,
        medians={key: median(its) for key, its in seconds.items()},
        scatters={key: _scatter(its) for key, its in seconds.items()},
        traces={trace.contender: trace for trace in traces},
    )


def load_trace(path: Path) -> Trace:
    """Raises `SimulationError` for a file that is no trace."""
    try:
        return Trace.load(path)
    except OSError as error:
        raise SimulationError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimulationError(f"{str(path)!r} is no trace: {error}") from None


def setting_of(trace: Trace) -> Setting:
    """Where a trace was recorded."""
    return Setting(
        hosts=-(-trace.world_size // trace.ranks_per_host),
        ranks_per_host=trace.ranks_per_host,
        rate_bits_per_second=trace.rate_bits_per_second,
    )


def _scatter(seconds: Sequence[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle

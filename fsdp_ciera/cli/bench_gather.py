"""`ciera bench gather`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import UseAppendAction

from fsdp_ciera.arguments import named
from fsdp_ciera.errors import GatherError, UnitError
from fsdp_ciera.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class GatherOptions:
    """One all-gather, plain and by each codec: from which size on is ours faster?

    Time one all-gather of one FSDP2 parameter group, plain and by each codec in turn in the same processes, over sizes, shares
    of changed values and link speeds; every gather is compared with the plain one bit by bit. Prints speed-ups and where the
    crossover is, and writes gathers.csv, gathers.json and gathers.png. Needs root for network namespaces with limited links;
    --loopback needs none. Exits with 1 if a bit differs, with 2 if it cannot be measured here.

    The defaults take 5 to 10 minutes on two cores; the full run, 30 to 60 minutes and about 8 GiB of memory, is: ciera bench
    gather --rate 200mbit 1gbit none --sizes 64KiB 256KiB 1MiB 4MiB 16MiB 64MiB 256MiB
    """

    hosts: int = 4
    """hosts that share the parameter"""
    ranks_per_host: int = 1
    """gloo ranks on each"""
    rate: Annotated[tuple[tuple[str, ...], ...], named(metavar="RATE"), UseAppendAction] = ()
    """what each host may send, such as 200mbit or 1gbit, or none for no limit; several give one run each; 200mbit 1gbit when
    left out"""
    loopback: bool = False
    """no namespaces and no root: ranks on 127.0.0.1, where nothing is limited"""
    sizes: Annotated[tuple[str, ...], named(metavar="BYTES")] = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")
    """bytes of the gathered total in bf16, of which each rank holds its share"""
    changes: Annotated[tuple[float, ...], named(metavar="PERCENT")] = (0, 0.01, 0.1, 1, 10, 100)
    """values that change between two gathers, in percent"""
    codecs: Annotated[tuple[str, ...], named(metavar="CODEC")] = (
        "value_delta",
        "exponent_delta",
        "exponent_block",
        "entropy",
    )
    """who is measured beside the plain gather"""
    repeats: int | None = None
    """timed gathers in each cell; 9 up to 4 MiB, 5 up to 16 MiB, then 3 when left out"""
    output: Annotated[Path, named("out", "FOLDER")] = Path("runs/bench-gather")
    """where results go"""

    @property
    def rates(self) -> tuple[str | None, ...]:
        """Link rates, one run for each: what a host may send; `None`: no limit."""
        default_rates = ["none"] if self.loopback else ["200mbit", "1gbit"]
        rates = [rate for rates in self.rate for rate in rates] or default_rates
        return tuple(None if rate == "none" else rate for rate in rates)

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Gathered totals in bytes. Raises `GatherError` for a text that is not a size."""
        try:
            return tuple(map(parse_bytes, self.sizes))
        except UnitError as error:
            raise GatherError(f"--sizes: {error}") from None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the parameter."""
        return self.hosts * self.ranks_per_host

    def repeats_of(self, size_bytes: int) -> int:
        """Returns the number of timed gathers of each contender in a cell of this size."""
        if self.repeats is not None:
            return self.repeats
        return 9 if size_bytes <= 4 * 2**20 else 5 if size_bytes <= 16 * 2**20 else 3

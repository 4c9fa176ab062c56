"""`ciera bench gather` on the command line."""

from __future__ import annotations

import argparse
import sys

_SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")
_FULL_RUN = "ciera bench gather --rate 200mbit 1gbit none --sizes " + " ".join([*_SIZES, "256MiB"])


def add_gather(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the sub-command `gather`."""
    parser = commands.add_parser(
        "gather",
        help="one all-gather, plain and by each codec: from which size on is ours faster?",
        description="Time one all-gather of one FSDP2 parameter group, plain and by each codec in turn in the same processes, "
        "over sizes, shares of changed values and link speeds; every gather is compared with the plain one bit by bit. "
        "Prints speed-ups and where the crossover is, and writes gathers.csv, gathers.json and gathers.png. Needs root for "
        "network namespaces with limited links; --loopback needs none. Exits with 1 if a bit differs, with 2 if it cannot be "
        "measured here.",
        epilog="The defaults take 5 to 10 minutes on two cores; the full run, 30 to 60 minutes and about 8 GiB of memory, is: "
        + _FULL_RUN,
    )
    parser.add_argument("--hosts", type=int, default=4, help="hosts that share the parameter (default: 4)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="gloo ranks on each (default: 1)")
    parser.add_argument(
        "--rate",
        nargs="+",
        action="extend",
        metavar="RATE",
        help="what each host may send, such as 200mbit or 1gbit, or none for no limit; several give one run each "
        "(default: 200mbit 1gbit)",
    )
    parser.add_argument(
        "--loopback",
        action="store_true",
        help="no namespaces and no root: ranks on 127.0.0.1, where nothing is limited",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        metavar="BYTES",
        default=list(_SIZES),
        help=f"bytes of the gathered total in bf16, of which each rank holds its share (default: {' '.join(_SIZES)})",
    )
    parser.add_argument(
        "--changes",
        nargs="+",
        type=float,
        metavar="PERCENT",
        default=[0, 0.01, 0.1, 1, 10, 100],
        help="values that change between two gathers, in percent (default: 0 0.01 0.1 1 10 100)",
    )
    parser.add_argument(
        "--codecs",
        nargs="+",
        metavar="CODEC",
        default=["value_delta", "exponent_delta", "exponent_block", "entropy"],
        help="(default: value_delta exponent_delta exponent_block entropy)",
    )
    parser.add_argument(
        "--repeats", type=int, help="timed gathers in each cell (default: 9 up to 4 MiB, 5 up to 16 MiB, then 3)"
    )
    parser.add_argument("--out", metavar="FOLDER", default="runs/bench-gather", help="(default: runs/bench-gather)")
    parser.set_defaults(run=_gather)


def _gather(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from fsdp_ciera.bench.gather import GatherOptions, run_gather
    from fsdp_ciera.errors import GatherError

    rates = parsed.rate or (["none"] if parsed.loopback else ["200mbit", "1gbit"])
    try:
        options = GatherOptions(
            hosts=parsed.hosts,
            ranks_per_host=parsed.ranks_per_host,
            rates=tuple(None if rate == "none" else rate for rate in rates),
            loopback=parsed.loopback,
            sizes_bytes=tuple(map(_size, parsed.sizes)),
            changed_percents=tuple(parsed.changes),
            codecs=tuple(parsed.codecs),
            repeats=parsed.repeats,
            output=Path(parsed.out),
        )
    except GatherError as error:
        print(f"ciera: {error}", file=sys.stderr)
        return 2
    return run_gather(options)


def _size(text: str) -> int:
    from fsdp_ciera.errors import GatherError, UnitError
    from fsdp_ciera.units import parse_bytes

    try:
        return parse_bytes(text)
    except UnitError:
        raise GatherError(f'--sizes: {text!r} is not a byte size such as "64KiB" or "1MiB"') from None

"""The command line: `ciera <command>`.

A command is a dataclass in a file of its own: its fields are the options, with their defaults, and their docstrings the help.
What commands do is in `cli/tasks/`, and is imported when one runs: `ciera --help` does not wait for torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import dropwhile, takewhile
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from fsdp_ciera.cli.bench_compare import CompareOptions
from fsdp_ciera.cli.bench_e2e import E2EOptions
from fsdp_ciera.cli.bench_gather import GatherOptions
from fsdp_ciera.cli.demo import DemoOptions
from fsdp_ciera.cli.finetune import FinetuneOptions
from fsdp_ciera.cli.plan import PlanOptions
from fsdp_ciera.cli.profile import ProfileOptions
from fsdp_ciera.cli.simulate import SimulateOptions
from fsdp_ciera.errors import (
    CieraFileError,
    CieraPolicyError,
    GatherError,
    MissingPackageError,
    RecipeError,
    SimulationError,
    UnitError,
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure: a training job by all contenders on throttled links, or single gathers. On this machine, in network namespaces
    (root), or on the loopback."""

    bench: (
        Annotated[E2EOptions, subcommand("e2e")]
        | Annotated[GatherOptions, subcommand("gather")]
        | Annotated[CompareOptions, subcommand("compare")]
    )


Command = (
    Annotated[FinetuneOptions, subcommand("finetune")]
    | Annotated[DemoOptions, subcommand("demo")]
    | Annotated[ProfileOptions, subcommand("profile")]
    | Annotated[PlanOptions, subcommand("plan")]
    | Annotated[BenchOptions, subcommand("bench")]
    | Annotated[SimulateOptions, subcommand("simulate")]
)
USERS_ERRORS = (
    RecipeError,
    CieraPolicyError,
    UnitError,
    CieraFileError,
    MissingPackageError,
    SimulationError,
    GatherError,
)
"""Errors that a user can cause; each is printed as one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    0: done; 2: the arguments, a recipe or a policy are wrong, said in one line on stderr; 130: interrupted; otherwise
    what the command says.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["--version"]:
        print(f"ciera {version('fsdp-ciera')}")
        raise SystemExit(0)
    command = parse(words)
    try:
        return _run(command.bench if isinstance(command, BenchOptions) else command)
    except USERS_ERRORS as error:
        # Such errors are raised on all ranks; one line per machine is enough.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"ciera: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parse(words: Sequence[str]) -> Command:
    """Parses the words of a command line. Ends with `SystemExit`: 0 after help, 2 with one line on stderr for what is wrong."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            command: Command = tyro.cli(
                Command,  # type: ignore[arg-type]  # a union of dataclasses
                prog="ciera",
                description="Bit-identical FSDP2 all-gathers in fewer bytes. `ciera --version` says which version this is.",
                args=words,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit:
        print(_in_one_line(stderr.getvalue()), end="", file=sys.stderr)
        raise
    return command


def _run(command: Any) -> int:
    """Runs a command and returns its exit code. Imports its modules here, since `ciera --help` must not wait for them."""
    match command:
        case FinetuneOptions():
            from fsdp_ciera.cli.progress import Progress
            from fsdp_ciera.recipes.launch import launch

            return launch(command.recipe, command.overrides, Progress)
        case DemoOptions():
            from fsdp_ciera.cli.tasks.demo import run_demo

            return run_demo(command)
        case ProfileOptions():
            from fsdp_ciera.cli.tasks.profile import run_profile

            return run_profile(command)
        case PlanOptions():
            from fsdp_ciera.cli.tasks.plan import run_plan

            return run_plan(command)
        case E2EOptions():
            from fsdp_ciera.cli.tasks.bench_e2e import run_e2e

            return run_e2e(command)
        case GatherOptions():
            from fsdp_ciera.cli.tasks.bench_gather import run_gather

            return run_gather(command)
        case CompareOptions():
            from fsdp_ciera.cli.tasks.bench_e2e import run_compare

            return run_compare([command.first, *command.others], command.plot)
        case SimulateOptions():
            from fsdp_ciera.cli.tasks.simulate import run_simulate

            return run_simulate(command)
    raise AssertionError(f"{command!r} is no command")


_RULE = set("─-╭╮╰╯│ ")


def _in_one_line(text: str) -> str:
    """What tyro says in a box of several lines, without the title, up to the rule below which it repeats the help."""
    rest = dropwhile(_is_rule, text.splitlines()[1:])
    lines = takewhile(lambda line: not _is_rule(line), rest)
    words = " ".join(line.strip("│ ") for line in lines).split()
    return f"ciera: {' '.join(words)} (--help says more)\n" if words else text


def _is_rule(line: str) -> bool:
    return set(line) <= _RULE

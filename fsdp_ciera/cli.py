"""The command line: `ciera <command>`. A command is one function here and one line in `_COMMANDS`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from fsdp_ciera.errors import CieraPolicyError, RecipeError

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    0: done; 2: the arguments, a recipe or a policy are wrong, said in one line on stderr; 130: interrupted; otherwise
    what the command says.
    """
    parsed = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except (RecipeError, CieraPolicyError) as error:
        # Such errors are raised on all ranks; one line per machine is enough.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"ciera: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _add_finetune(commands: _Commands) -> None:
    parser = commands.add_parser(
        "finetune",
        help="fine-tune a model as a recipe says",
        description="Fine-tune a model as a TOML recipe says, on parallel.ranks processes of this machine, or as one "
        "rank when started by torchrun.",
    )
    parser.add_argument("recipe", metavar="RECIPE.toml")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one key of the recipe, such as train.steps=20 or ciera.policy=none; may be repeated",
    )
    parser.set_defaults(run=_finetune)


def _finetune(parsed: argparse.Namespace) -> int:
    from fsdp_ciera.recipes.launch import launch

    return launch(parsed.recipe, parsed.overrides)


def _add_demo(commands: _Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="fine-tune a pretrained MoE twice, stock FSDP2 beside fsdp_ciera, and compare every bit",
        description="Fine-tune SmolLM2-135M, upcycled to a Mixtral of 4 experts, on the Python standard library's source: "
        "once under stock FSDP2 and once under fsdp_ciera with the same seeds. Exits with 1 if a bit differs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", metavar="FOLDER", default="runs/demo", help="where results go")
    parser.add_argument("--ranks", type=_count, default=4, help="gloo ranks on this machine")
    parser.add_argument("--steps", type=_count, default=14, help="optimizer steps of each run")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--seq-len", type=_count, default=128, help="tokens a rank and step")
    parser.add_argument("--codec", default="exponent_block", help="codec of the second run; the default is the paper's")
    parser.set_defaults(run=_demo)


def _demo(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from fsdp_ciera.recipes.demo import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            output=Path(parsed.out),
            ranks=parsed.ranks,
            steps=parsed.steps,
            lr=parsed.lr,
            seq_len=parsed.seq_len,
            codec=parsed.codec,
        )
    )


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


_COMMANDS: tuple[Callable[[_Commands], None], ...] = (_add_finetune, _add_demo)
"""Each adds one sub-command, with `set_defaults(run=function)`; the function takes the parsed arguments and returns the
exit code. What is slow to import is imported in the function."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ciera", description="Bit-identical FSDP2 all-gathers in fewer bytes.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ciera {version('fsdp-ciera')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in _COMMANDS:
        add_command(commands)
    return parser

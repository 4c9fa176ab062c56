"""The command line: `ciera <command>`. A command is one function here and one line in `_COMMANDS`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from fsdp_ciera.cli.arguments import count, count_or_zero
from fsdp_ciera.cli.bench import add_bench
from fsdp_ciera.cli.simulate import add_simulate
from fsdp_ciera.errors import CieraFileError, CieraPolicyError, MissingPackageError, RecipeError, UnitError

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
    except (RecipeError, CieraPolicyError, UnitError, CieraFileError, MissingPackageError) as error:
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
    parser.add_argument("--ranks", type=count, default=4, help="gloo ranks on this machine")
    parser.add_argument("--steps", type=count, default=14, help="optimizer steps of each run")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--seq-len", type=count, default=128, help="tokens a rank and step")
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


def _add_profile(commands: _Commands) -> None:
    parser = commands.add_parser(
        "profile",
        help="fine-tune as a recipe says and measure what each step changes",
        description="Fine-tune a model as a TOML recipe says, on parallel.ranks processes of this machine or as one rank "
        "when started by torchrun, and measure how often exponents, blocks, shards and values change. Writes profile.json, "
        "a table of change rates for policies, and the figures of the paper's section 2.",
    )
    parser.add_argument("recipe", metavar="RECIPE.toml")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one key of the recipe; may be repeated",
    )
    parser.add_argument("--interval", type=count, default=1, help="steps between two looks at the shards (default: 1)")
    parser.add_argument(
        "--warmup-steps",
        type=count_or_zero,
        default=30,
        help="first steps that are left out of averages and table, as the paper does (default: 30)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="where results go (default: <train.output>/profile)")
    parser.add_argument("--table", metavar="NAME", help="name of the table (default: that of the model's folder)")
    parser.set_defaults(run=_profile)


def _profile(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from fsdp_ciera.recipes.profile import ProfileOptions, run_profile

    return run_profile(
        ProfileOptions(
            recipe=Path(parsed.recipe),
            overrides=tuple(parsed.overrides),
            interval=parsed.interval,
            warmup_steps=parsed.warmup_steps,
            output=None if parsed.out is None else Path(parsed.out),
            table=parsed.table,
        )
    )


def _add_plan(commands: _Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="what would fsdp_ciera bring a model on a cluster? (no GPU and no weights needed)",
        description="Plan the codecs of a model's parameters on a cluster, and compare bytes and seconds of an optimizer step "
        "with FSDP2, ZeRO-3 and ZeRO++. A projection: links and codec costs are what you say they are.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "model", help="a model of the paper by name, such as olmoe-1b-7b, or a folder with a config.json"
    )
    parser.add_argument("--world-size", type=count, default=16, help="ranks that share the parameters")
    parser.add_argument("--ranks-per-node", type=count, default=8, help="ranks of a node")
    parser.add_argument("--between-nodes", metavar="SPEED", default="8GB/s 30us",
                        help="bus bandwidth and latency of an all-gather across nodes")  # fmt: skip
    parser.add_argument("--in-node", metavar="SPEED", default="230GB/s 15us", help="the same inside a node")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--budget", metavar="BYTES", default="8GiB", help="caches on each rank, or none for no limit")
    parser.add_argument(
        "--micro-batches", type=count, default=1, help="forward and backward passes in an optimizer step"
    )
    parser.add_argument("--codecs", nargs="+", metavar="CODEC", help="codecs to choose from")
    parser.add_argument("--paper", action="store_true", help="as published: exponent_block, chosen greedily")
    parser.add_argument("--topology", default="auto", help="flat, hierarchical or auto")
    parser.add_argument("--costs", default="a100", help="codec costs: a100, this-machine, or the path of a JSON file")
    parser.add_argument("--table", help="change rates: a shipped table or the path of one; the model's own by default")
    parser.add_argument(
        "--reduce-dtype", choices=("float32", "bfloat16"), default="float32", help="of FSDP2's gradients"
    )
    parser.add_argument("--json", metavar="PATH", help="write everything there; - for stdout, without tables")
    parser.add_argument("--plot", metavar="PATH", help="draw it there (PNG)")
    parser.set_defaults(run=_plan)


def _plan(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from fsdp_ciera.recipes.plan import PlanOptions, run_plan

    return run_plan(
        PlanOptions(
            model=parsed.model,
            world_size=parsed.world_size,
            ranks_per_node=parsed.ranks_per_node,
            between_nodes=parsed.between_nodes,
            in_node=parsed.in_node,
            lr=parsed.lr,
            budget=parsed.budget,
            micro_batches=parsed.micro_batches,
            codecs=tuple(parsed.codecs) if parsed.codecs else None,
            paper=parsed.paper,
            topology=parsed.topology,
            costs=parsed.costs,
            table=parsed.table,
            reduce_dtype=parsed.reduce_dtype,
            json_path=parsed.json,
            plot=Path(parsed.plot) if parsed.plot else None,
        )
    )


_COMMANDS: tuple[Callable[[_Commands], None], ...] = (
    _add_finetune,
    _add_demo,
    _add_profile,
    _add_plan,
    add_bench,
    add_simulate,
)
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

"""Does a plan send what it promised? Wire bytes as planned against those of the next 20 steps, on the demo's model.

    python benchmarks/predicted_bytes.py [--lr 1e-5 1e-4] [--json PATH] [--out FOLDER]

Fine-tunes SmolLM2-135M, upcycled, on four gloo ranks of this machine, for each learning rate and way to know the rates:

    table       the shipped table, which another run of the same model measured in steps 31 to 62
    adaptive    measured in this run, in step 30, and planned anew in step 31

The links are said to be 25 MB/s, so that codecs are chosen; the codecs' costs are measured. What counts are the bytes of rank 0
in steps 32 to 51, headers and padding in. A promise that is off by more than 5 % makes the exit code 1. About 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fsdp_ciera.cli.demo import DemoOptions
from fsdp_ciera.cli.progress import Progress
from fsdp_ciera.cli.tasks.demo import demo_recipe
from fsdp_ciera.processes import KEEP_MEMORY
from fsdp_ciera.recipes.config import Ciera, Recipe
from fsdp_ciera.recipes.demo_model import prepare_demo_model
from fsdp_ciera.recipes.launch import run_local_ranks
from fsdp_ciera.recipes.train import train

NUM_RANKS = 4
FIRST_STEP, NUM_STEPS = 32, 20
MOST_ERROR = 0.05
WAYS = {
    "table": Ciera(link="25MB/s", cache_budget="2GiB", tables="smollm2-moe"),
    "adaptive": Ciera(link="25MB/s", cache_budget="2GiB", adapt_every=30, warmup_steps=0),
}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="wire bytes as planned and as sent")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-4])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/predicted"), help="folder of the runs; the model is beside it"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    arguments = parser.parse_args()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return run_rank(arguments)
    prepare_demo_model(arguments.out.parent / "demo-model")
    return run_local_ranks([sys.executable, *sys.argv], NUM_RANKS, KEEP_MEMORY)


def run_rank(arguments: argparse.Namespace) -> int:
    """Does all runs as one rank, one after the other; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = [figure(lr, way, arguments.out) for lr in arguments.lr for way in WAYS]
    if dist.get_rank() == 0:
        report(figures)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return int(any(abs(run["error"]) > MOST_ERROR for run in figures))


def figure(lr: float, way: str, out: Path) -> dict[str, Any]:
    """Does one run. Returns what was promised and what was sent, in bytes a step of rank 0."""
    recipe = recipe_of(lr, way, out)
    result = train(recipe, show=Progress)
    assert result.stats is not None
    (plan,) = result.stats["plans"]
    assert plan["step"] == (0 if way == "table" else FIRST_STEP - 1), plan["step"]
    dist.barrier()
    lines = (Path(recipe.train.output) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][FIRST_STEP - 1 :]
    sent = statistics.mean(step["wire_bytes"] for step in steps)
    return {
        "lr": lr,
        "rates": way,
        "planned_bytes": plan["wire_bytes"],
        "sent_bytes": sent,
        "error": plan["wire_bytes"] / sent - 1,
        "raw_bytes": steps[0]["raw_bytes"],
        "codecs": sorted({row["codec"] for row in plan["rows"]}),
        "cache_bytes": result.stats["cache_bytes"],
        "planned_cache_bytes": plan["cache_bytes"],
    }


def recipe_of(lr: float, way: str, out: Path) -> Recipe:
    """The demo's recipe with another policy, long enough."""
    num_steps = FIRST_STEP + NUM_STEPS - 1
    recipe = demo_recipe(DemoOptions(output=out, ranks=NUM_RANKS, steps=num_steps, lr=lr), "ciera")
    output = str(out / f"{way}-{lr:g}")
    return replace(recipe, ciera=WAYS[way], train=replace(recipe.train, output=output))


def report(figures: list[dict[str, Any]]) -> None:
    """Prints the figures as a table."""
    table = Table(
        title=f"wire bytes of rank 0 a step, planned and sent in steps {FIRST_STEP} to {FIRST_STEP + NUM_STEPS - 1}"
    )
    for column in ("LR", "rates", "codecs", "raw MB", "planned MB", "sent MB", "off by"):
        table.add_column(column, justify="left" if column in ("rates", "codecs") else "right")
    for run in figures:
        table.add_row(
            f"{run['lr']:g}",
            run["rates"],
            ", ".join(run["codecs"]),
            f"{run['raw_bytes'] / 1e6:,.1f}",
            f"{run['planned_bytes'] / 1e6:,.3f}",
            f"{run['sent_bytes'] / 1e6:,.3f}",
            f"{100 * run['error']:+.1f} %",
            style=None if abs(run["error"]) <= MOST_ERROR else "bold red",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())

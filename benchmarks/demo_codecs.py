"""How many times fewer bytes do the parameter gathers of an optimizer step move, by codec and learning rate?

    python benchmarks/demo_codecs.py [--steps 8] [--lr 1e-5 1e-4] [--codecs entropy ...] [--json PATH] [--plot PATH]

Fine-tunes the demo's model (SmolLM2-135M, upcycled; AdamW, fp32 masters, bf16 gathers) on four gloo ranks of this machine,
once for each codec, learning rate and way to treat the root, and adds up the bytes of all gathers from the third
optimizer step on: what stock FSDP2 sends, over what fsdp_ciera sends with headers and padding.

*root freed*: `reshard_after_forward=True` on every module, as the marks mean it. *root kept*: on the layers only, which is
FSDP2's default; the root's repeat gather, the cheapest of a step, is then missing on both sides. All ranks send the same
number of bytes (payloads are padded to the largest), so rank 0 speaks for all.

Stock FSDP2 runs as well, and all runs of equal learning rate and micro-batches must end with the same bits of every
parameter. A mark that is missed with the root freed, or a bit that differs, makes the exit code 1. Everything takes about
12 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from fsdp_ciera.cli.demo import DemoOptions
from fsdp_ciera.cli.progress import Progress
from fsdp_ciera.cli.tasks.demo import demo_recipe
from fsdp_ciera.processes import KEEP_MEMORY
from fsdp_ciera.recipes.config import Recipe
from fsdp_ciera.recipes.demo_model import prepare_demo_model
from fsdp_ciera.recipes.launch import run_local_ranks
from fsdp_ciera.recipes.train import TrainResult, train

NUM_RANKS = 4
NUM_STEPS_LEFT_OUT = 2
STOCK = "stock"
MARKS = {
    ("entropy", 1): {1e-5: 1.45, 1e-4: 1.45},
    ("exponent_block", 1): {1e-5: 1.85, 1e-4: 1.74},
    ("exponent_delta", 1): {1e-5: 1.97, 1e-4: 1.95},
    ("value_delta", 1): {1e-5: 100.0, 1e-4: 30.0},
    ("value_delta", 4): {1e-5: 400.0, 1e-4: 120.0},
}
"""(codec, micro-batches) -> learning rate -> the least ratio."""

CODECS = tuple(dict.fromkeys(codec for codec, _ in MARKS))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training run."""

    codec: str
    num_micro_batches: int
    lr: float
    root_is_freed: bool

    def __str__(self) -> str:
        batches = f", {self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        root = "" if self.codec == STOCK else f", root {'freed' if self.root_is_freed else 'kept'}"
        return f"{self.codec}{batches}, LR {lr_text(self.lr)}{root}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What rank 0 sent in one run. Bytes are those of all parameter gathers of one optimizer step."""

    setting: Setting
    raw_bytes: list[int]
    """Bytes that stock FSDP2 sends, by optimizer step."""
    wire_bytes: list[int]
    """Bytes that were sent, by optimizer step."""
    cache_bytes: int
    seconds_per_step: float
    same_bits: bool
    """Whether all ranks ended with the parameters of the first run with this learning rate and as many micro-batches."""

    @property
    def ratio(self) -> float:
        """Raw / wire, from the third step on."""
        return sum(self.raw_bytes[NUM_STEPS_LEFT_OUT:]) / sum(self.wire_bytes[NUM_STEPS_LEFT_OUT:])

    @property
    def ratios(self) -> list[float]:
        """Raw / wire of each step."""
        return [raw / wire for raw, wire in zip(self.raw_bytes, self.wire_bytes, strict=True)]

    @property
    def mark(self) -> float | None:
        """The least ratio that this run must reach; `None` where none is set."""
        return MARKS.get((self.setting.codec, self.setting.num_micro_batches), {}).get(self.setting.lr)


def main() -> int:
    """Returns the exit code: 1 if a mark is missed or a bit differs."""
    parser = argparse.ArgumentParser(description="bytes of parameter gathers by codec and learning rate")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run; the first two do not count")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-4], help="learning rates")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS, help="codecs to measure")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/codecs"), help="folder of the runs; the model is beside it"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the figures there (PNG; needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.steps <= NUM_STEPS_LEFT_OUT:
        parser.error(f"--steps must be more than {NUM_STEPS_LEFT_OUT}")
    figures = arguments.out / "figures.json"
    settings = settings_of(arguments.codecs, arguments.lr)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        run_rank(settings, arguments.steps, arguments.out, figures)
        return 0
    console = Console(width=max(Console().width, 120))  # the table's
    console.print(f"{len(settings)} runs of {arguments.steps} steps on {NUM_RANKS} gloo ranks; preparing the model ...")
    model = prepare_demo_model(arguments.out.parent / "demo-model")
    figures.unlink(missing_ok=True)
    figures.parent.mkdir(parents=True, exist_ok=True)
    exit_code = run_local_ranks([sys.executable, *sys.argv], NUM_RANKS, KEEP_MEMORY)
    if exit_code:
        return exit_code
    measured = [Measured(**{**run, "setting": Setting(**run["setting"])}) for run in json.loads(figures.read_text())]
    console.print(table_of(measured, f"{model.name}: raw / wire bytes of an optimizer step's gathers"))
    same_bits = all(run.same_bits for run in measured)
    console.print(
        f"parameters at the end of runs of equal learning rate: {'the same bits' if same_bits else 'BITS DIFFER'}"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(measured, model.name), indent=2) + "\n")
    if arguments.plot is not None:
        draw(measured, model.name, arguments.plot)
    return 0 if same_bits and all(map(is_reached, measured)) else 1


def settings_of(codecs: Sequence[str], learning_rates: Sequence[float]) -> list[Setting]:
    """All runs. A stock run comes before those that it is compared with; the second learning rate goes without one for
    several micro-batches, to save time: its runs are compared with each other."""
    settings = []
    for lr in learning_rates:
        for count in sorted({count for codec, count in MARKS if codec in codecs}):
            if count == 1 or lr == learning_rates[0]:
                settings.append(Setting(codec=STOCK, num_micro_batches=count, lr=lr, root_is_freed=False))
            for codec in codecs:
                if (codec, count) in MARKS:
                    for freed in (True, False):
                        settings.append(Setting(codec=codec, num_micro_batches=count, lr=lr, root_is_freed=freed))
    return settings


def run_rank(settings: Sequence[Setting], num_steps: int, folder: Path, figures: Path) -> None:
    """Does all runs as one rank, one after the other. Rank 0 writes a list of `Measured` to `figures`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, console, started = dist.get_rank(), Console(), time.monotonic()
    digests: dict[tuple[float, int], str] = {}
    measured = []
    for index, setting in enumerate(settings):
        if rank == 0:
            # A micro-batch takes about as long in every run, whatever the codec.
            done, total = (sum(s.num_micro_batches for s in part) for part in (settings[:index], settings))
            left_s = (time.monotonic() - started) * (total - done) / max(done, 1)
            left = f"; about {left_s / 60:.1f} min left for all" if done else ""
            console.rule(f"run {index + 1} of {len(settings)}: {setting}{left}")
        recipe = recipe_of(setting, num_steps, folder)
        result = train(recipe, show=Progress)
        first = digests.setdefault((setting.lr, setting.num_micro_batches), result.final_parameters_digest)
        have_same_parameters: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(have_same_parameters, first == result.final_parameters_digest)
        if rank == 0:
            metrics = Path(recipe.train.output) / "metrics.jsonl"
            measured.append(measured_of(setting, result, metrics, all(have_same_parameters)))
            figures.write_text(json.dumps([asdict(run) for run in measured]))  # what is measured stays, come what may
    dist.barrier()
    dist.destroy_process_group()


def recipe_of(setting: Setting, num_steps: int, folder: Path) -> Recipe:
    """The demo's recipe, changed to this setting."""
    options = DemoOptions(output=folder, ranks=NUM_RANKS, steps=num_steps, lr=setting.lr, codec=setting.codec)
    recipe = demo_recipe(options, "stock" if setting.codec == STOCK else "ciera")
    return replace(
        recipe,
        train=replace(recipe.train, gradient_accumulation=setting.num_micro_batches),
        parallel=replace(recipe.parallel, reshard_root_after_forward=setting.root_is_freed),
    )


def measured_of(setting: Setting, result: TrainResult, metrics: Path, same_bits: bool) -> Measured:
    """The figures of a run, from rank 0's metrics and counts."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Measured(
        setting=setting,
        raw_bytes=[step.get("raw_bytes", 0) for step in steps],  # stock FSDP2 counts nothing
        wire_bytes=[step.get("wire_bytes", 0) for step in steps],
        cache_bytes=result.stats["cache_bytes"] if result.stats else 0,
        seconds_per_step=statistics.median(result.seconds),
        same_bits=same_bits,
    )


def is_reached(run: Measured) -> bool:
    """False if the run has a mark, frees its root as the marks mean it, and stays below the mark."""
    return run.mark is None or not run.setting.root_is_freed or run.ratio >= run.mark


def table_of(measured: Sequence[Measured], title: str) -> Table:
    """One row a run of a codec."""
    table = Table(title=title, box=SIMPLE)
    headings = (
        "codec",
        "micro-b.",
        "LR",
        "root",
        "stock MB",
        "sent MB",
        "ratio",
        "mark",
        "",
        "step 3",
        "last",
        "cache MB",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("codec", "root", "") else "right", no_wrap=True)
    for run in measured:
        setting = run.setting
        if setting.codec == STOCK:
            table.add_section()
            continue
        raw, wire = run.raw_bytes[NUM_STEPS_LEFT_OUT:], run.wire_bytes[NUM_STEPS_LEFT_OUT:]
        table.add_row(
            setting.codec,
            str(setting.num_micro_batches),
            lr_text(setting.lr),
            "freed" if setting.root_is_freed else "kept",
            f"{sum(raw) / len(raw) / 1e6:.1f}",
            f"{sum(wire) / len(wire) / 1e6:.2f}",
            f"{run.ratio:.2f}",
            "" if run.mark is None else f"{run.mark:g}",
            "" if run.mark is None else "reached" if run.ratio >= run.mark else "MISSED",
            f"{run.ratios[NUM_STEPS_LEFT_OUT]:.2f}",
            f"{run.ratios[-1]:.2f}",
            f"{run.cache_bytes / 1e6:.0f}",
        )
    return table


def as_json(measured: Sequence[Measured], model: str) -> dict[str, Any]:
    """The figures as JSON values, with ratios and marks."""
    runs = [{**asdict(run), "ratio": run.ratio, "mark": run.mark} for run in measured if run.setting.codec != STOCK]
    return {"model": model, "ranks": NUM_RANKS, "first_counted_step": NUM_STEPS_LEFT_OUT + 1, "runs": runs}


def draw(measured: Sequence[Measured], model: str, path: Path) -> None:
    """A PNG: the ratio of each codec beside its mark, and how it moves from step to step. Root freed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [run for run in measured if run.setting.codec != STOCK and run.setting.root_is_freed]
    rates = sorted({run.setting.lr for run in runs})
    names = list(dict.fromkeys(label_of(run) for run in runs))
    colors = dict(zip(names, ("#9aa5b1", "#e0a100", "#2a9d5c", "#1f6feb", "#8250df"), strict=False))
    shades = dict(zip(rates, (1.0, 0.5, 0.3), strict=False))
    figure, (bars, lines) = plt.subplots(1, 2, figsize=(13, 4.6), width_ratios=(3, 2))
    height = 0.8 / len(rates)
    for run in runs:
        name, lr = label_of(run), run.setting.lr
        position = names.index(name) + (rates.index(lr) - (len(rates) - 1) / 2) * height
        bars.barh(position, run.ratio, height=0.9 * height, color=colors[name], alpha=shades.get(lr, 0.3))
        text = f"  {run.ratio:.4g}x  at LR {lr_text(lr)}"
        if run.mark is not None:
            bars.plot([run.mark] * 2, [position - 0.45 * height, position + 0.45 * height], color="black", linewidth=2)
            text += "" if run.ratio >= run.mark else f", below {run.mark:g}"
        bars.text(max(run.ratio, run.mark or 0), position, text, va="center", fontsize=9)
        steps = range(2, len(run.ratios) + 1)
        lines.plot(steps, run.ratios[1:], color=colors[name], alpha=shades.get(lr, 0.3), marker="o", markersize=3)
    bars.set_xscale("log")
    bars.set_xlim(1, 6 * max(run.ratio for run in runs))
    bars.set_yticks(range(len(names)), names)
    bars.invert_yaxis()
    bars.set_xlabel("times fewer bytes than stock FSDP2 (black: the mark to reach)")
    bars.set_title(f"from optimizer step {NUM_STEPS_LEFT_OUT + 1} on", fontsize=11)
    lines.set_yscale("log")
    lines.set_xlabel("optimizer step")
    lines.set_title("step by step, " + ", ".join(f"{'dark' if lr == rates[0] else 'light'}: LR {lr_text(lr)}" for lr in rates),
                    fontsize=11)  # fmt: skip
    for axes in (bars, lines):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Parameter all-gathers of a step, {NUM_RANKS} ranks, {model}", fontsize=12)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def label_of(run: Measured) -> str:
    """`value_delta`, and with several micro-batches their number."""
    count = run.setting.num_micro_batches
    return run.setting.codec + (f"\n{count} micro-batches" if count > 1 else "")


def lr_text(lr: float) -> str:
    """`1e-4`."""
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


if __name__ == "__main__":
    sys.exit(main())

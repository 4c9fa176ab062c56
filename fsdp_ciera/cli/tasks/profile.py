"""`ciera profile`: fine-tunes as a recipe says, measures what each step changes, and writes profile, table and figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fsdp_ciera.cli.figures.profile import draw_profile
from fsdp_ciera.cli.profile import ProfileOptions
from fsdp_ciera.cli.progress import Progress
from fsdp_ciera.errors import RecipeError
from fsdp_ciera.policies.rates import Rates
from fsdp_ciera.processes import KEEP_MEMORY, is_rank
from fsdp_ciera.profiling.profile import ALL, DERIVED_INTERVALS, Profile
from fsdp_ciera.recipes.config import Recipe, load_recipe
from fsdp_ciera.recipes.launch import run_local_ranks
from fsdp_ciera.units import format_share

if TYPE_CHECKING:
    from torch import nn


def run_profile(options: ProfileOptions) -> int:
    """Runs the recipe with a `Profiler` on it and returns the exit code, as `fsdp_ciera.recipes.launch.launch` does.

    Raises `RecipeError` or `CieraPolicyError`, before anything is started as far as that can be known.
    """
    recipe = load_recipe(options.recipe, options.overrides)
    first_measured = -(-options.warmup_steps // options.interval) * options.interval or options.interval
    if recipe.train.steps < first_measured + options.interval:
        raise RecipeError(
            f"train.steps: got {recipe.train.steps}, allowed: at least {first_measured + options.interval} to measure a step "
            f"after --warmup-steps {options.warmup_steps} with --interval {options.interval}"
        )
    if is_rank():
        profile_recipe(recipe, options)
        return 0
    from fsdp_ciera.recipes.data import find_files
    from fsdp_ciera.recipes.shard import ciera_policy

    ciera_policy(recipe)
    find_files(recipe.data.files)
    return run_local_ranks(_command(options), recipe.parallel.ranks, KEEP_MEMORY)


def profile_recipe(recipe: Recipe, options: ProfileOptions) -> Profile:
    """Trains and measures as one rank; rank 0 writes and shows. Collective; returns the same profile on all ranks."""
    from fsdp_ciera.recipes.train import train

    watched: list[_Watch] = []

    def observe(model: nn.Module) -> _Watch:
        watched.append(_Watch(model, options))
        return watched[0]

    train(recipe, observe=observe, show=Progress)
    watch = watched[0]
    assert watch.profile is not None
    profile = replace(watch.profile, model=recipe.model.name or Path(recipe.model.folder).name)
    if watch.is_rank_zero:
        _report(profile, recipe, options)
    return profile


class _Watch:
    """The trainer's observer."""

    def __init__(self, model: nn.Module, options: ProfileOptions) -> None:
        from fsdp_ciera.profiling.profiler import Profiler

        self._profiler = Profiler(model, interval=options.interval, warmup_steps=options.warmup_steps)
        self.profile: Profile | None = None
        self.is_rank_zero = dist.get_rank() == 0

    def step(self) -> None:
        self._profiler.step()

    def finish(self) -> None:
        self.profile = self._profiler.result()


def _report(profile: Profile, recipe: Recipe, options: ProfileOptions) -> None:
    output = options.output or Path(recipe.train.output) / "profile"
    output.mkdir(parents=True, exist_ok=True)
    console = Console()
    _write_json(output / "profile.json", profile.to_json())
    written = ["profile.json"]
    if profile.steps is None:  # a resumed run may have had too few steps left
        console.print("no averages and no table: the run ended before two looks after the warm-up", style="yellow")
    else:
        _write_json(output / "table.json", table_of(profile, recipe, options.table or Path(recipe.model.folder).name))
        written.append("table.json")
        console.print(rates_table_of(profile))
        console.print(codecs_table_of(profile))
        console.print(cost_of(profile), highlight=False)
    try:
        written += [path.name for path in draw_profile(profile, output)]
    except ImportError:
        console.print("no figures: matplotlib is not installed (pip install 'fsdp-ciera[plot]')", style="yellow")
    for note in profile.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(f"written to {output}: {', '.join(written)}", highlight=False, soft_wrap=True)


def table_of(profile: Profile, recipe: Recipe, name: str) -> dict[str, object]:
    """The table of change rates of a run of `recipe`."""
    optimizer, schedule, steps = recipe.optimizer, recipe.schedule, recipe.train.steps
    notes = []
    if schedule.decay != "constant":
        notes.append(
            f"the learning rate is the peak: {schedule.decay} decay to {schedule.final_lr_fraction:g} of it over {steps} steps"
        )
    if schedule.warmup_steps:
        notes.append(f"the learning rate rises over the first {schedule.warmup_steps} steps")
    batch = f"{recipe.train.micro_batch_size} x {recipe.data.seq_len} tokens a rank"
    if recipe.train.gradient_accumulation > 1:
        batch += f", {recipe.train.gradient_accumulation} micro-batches"
    notes.append(batch)
    files = [Path(file).name for file in recipe.data.files]  # where they lie on this machine is nobody's business
    return profile.to_table(
        name,
        lr=optimizer.lr,
        data=", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else ""),
        optimizer=f"AdamW, betas {optimizer.betas[0]:g} and {optimizer.betas[1]:g}, weight decay {optimizer.weight_decay:g}, "
        "fp32 masters",
        notes="; ".join(notes),
    )


def rates_table_of(profile: Profile) -> Table:
    """The averages: what changes, by category."""
    assert profile.steps is not None
    over = "each step" if profile.interval == 1 else f"every {profile.interval} steps"
    table = Table(
        title=f"{profile.model}: what {over} changes (%), steps {profile.steps[0]} to {profile.steps[1]}, "
        f"{profile.world_size} ranks"
    )
    for heading in ("category", "M values", "exponents", "blocks of 512", "shards", "values"):
        table.add_column(heading, justify="left" if heading == "category" else "right")
    for name, rates in _by_category(profile, table):
        num_values = sum(profile.num_values.values()) if name == ALL else profile.num_values[name]
        shares = (
            rates.exponent_change,
            rates.block_change_at(512)[0],
            profile.shard_change[name].get(profile.world_size),
            rates.value_change,
        )
        cells = ("" if share is None else f"{100 * share:.3g}" for share in shares)
        table.add_row(name.replace("_", " "), f"{num_values / 1e6:.3f}", *cells)
    return table


def codecs_table_of(profile: Profile) -> Table:
    """Bits a value that each codec sent for the parts on which it was tried. The least are bold."""
    table = Table(title=f"bits a value that a first gather would send, {profile.dtype}")
    codecs = list(profile.rates[ALL].codec_bits)
    for heading in ("category", *codecs):
        table.add_column(heading, justify="left" if heading == "category" else "right")
    for name, rates in _by_category(profile, table):
        least = min(rates.codec_bits.values(), default=0.0)
        bits = [rates.codec_bits.get(codec) for codec in codecs]
        cells = (
            "" if sent is None else f"[bold]{sent:.2f}[/bold]" if sent == least else f"{sent:.2f}" for sent in bits
        )
        table.add_row(name.replace("_", " "), *cells)
    return table


def _by_category(profile: Profile, table: Table) -> Iterator[tuple[str, Rates]]:
    for name, rates in profile.rates.items():
        if name == ALL:
            table.add_section()
        yield name, rates


def cost_of(profile: Profile) -> str:
    """One line of text: what the looks cost."""
    if profile.check_share is None or profile.check_seconds is None or profile.step_seconds is None:
        return "the cost of looking was not measured"
    derived = ", ".join(
        f"{format_share(share)} at {interval}"
        for interval in DERIVED_INTERVALS
        if interval != profile.interval and (share := profile.derived_check_share(interval)) is not None
    )
    return (
        f"a look took {profile.check_seconds:.3f} s beside steps of {profile.step_seconds:.3f} s: "
        f"{format_share(profile.check_share)} of the iteration at interval {profile.interval} (derived: {derived})"
    )


def _command(options: ProfileOptions) -> list[str]:
    command = [sys.executable, "-m", "fsdp_ciera", "profile", str(options.recipe)]
    command += [argument for override in options.overrides for argument in ("--set", override)]
    command += ["--interval", str(options.interval), "--warmup-steps", str(options.warmup_steps)]
    command += [] if options.output is None else ["--out", str(options.output)]
    return command if options.table is None else [*command, "--table", options.table]


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

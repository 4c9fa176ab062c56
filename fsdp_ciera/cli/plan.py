"""`ciera plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from fsdp_ciera.arguments import Count, named


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What would fsdp_ciera bring a model on a cluster? It needs no GPU and no weights.

    Plans the codecs of a model's parameters on a cluster, and compares bytes and seconds of an optimizer step with FSDP2,
    ZeRO-3 and ZeRO++. A projection: links and codec costs are what you say they are.
    """

    model: Annotated[Positional[str], named(metavar="MODEL")]
    """a model of the paper by name, such as olmoe-1b-7b, or a folder with a config.json"""
    world_size: Count = 16
    """ranks that share the parameters"""
    ranks_per_node: Count = 8
    """ranks of a node"""
    between_nodes: Annotated[str, named(metavar="SPEED")] = "8GB/s 30us"
    """bus bandwidth and latency of an all-gather across nodes"""
    in_node: Annotated[str, named(metavar="SPEED")] = "230GB/s 15us"
    """the same inside a node"""
    lr: float = 1e-5
    """learning rate"""
    budget: Annotated[str, named(metavar="BYTES")] = "8GiB"
    """caches on each rank, or none for no limit"""
    micro_batches: Count = 1
    """forward and backward passes in an optimizer step"""
    codecs: Annotated[tuple[str, ...], named(metavar="CODEC")] = ()
    """codecs to choose from; those of the default policy when left out"""
    paper: bool = False
    """as published: exponent_block, chosen greedily"""
    topology: str = "auto"
    """flat, hierarchical or auto"""
    costs: str = "a100"
    """codec costs: a100, this-machine, or the path of a JSON file"""
    table: str | None = None
    """change rates: a shipped table or the path of one; the model's own when left out"""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """of FSDP2's gradients"""
    json_path: Annotated[str | None, named("json", "PATH")] = None
    """write everything there; - for stdout, without tables"""
    plot: Annotated[Path | None, named(metavar="PATH")] = None
    """draw it there (PNG)"""

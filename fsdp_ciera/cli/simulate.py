"""`ciera simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from fsdp_ciera.arguments import Count, NotNegative, Positive, named


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Project measured or planned training steps to other clusters, with the projection's own error.

    A trace-driven event simulator: recorded steps (or a model's planned ones) on 1 to 16,384 GPUs. It refuses to project (exit
    code 3) unless it predicts measured iterations that it was not calibrated on within 4 %.
    """

    traces: Annotated[Positional[tuple[Path, ...]], named(metavar="TRACE.json")] = ()
    """recorded steps, stock FSDP2's among them; without any and without --model, those of the largest run of --calibrate"""
    model: str | None = None
    """instead of traces: a model of the paper, or a folder with a config.json"""

    # measured runs, output folders of `ciera bench e2e`
    calibrate: Annotated[tuple[Path, ...], named(metavar="FOLDER")] = ()
    """learn the stand's constants from these output folders of `ciera bench e2e`"""
    validate: Annotated[tuple[Path, ...], named(metavar="FOLDER")] = ()
    """compare predictions with these; those with hosts and rate of a calibrated run do not count"""
    unvalidated: bool = False
    """project all the same, and stamp every output"""
    save_calibration: Annotated[Path | None, named(metavar="PATH")] = None
    """write the calibration there (JSON)"""

    # where it shall run
    gpus: tuple[Count, ...] = (8, 16, 64, 256, 1024, 4096, 16384)
    """world sizes"""
    ranks_per_node: Count = 8
    """GPUs of a node"""
    topology: Literal["flat", "hierarchical"] = "flat"
    """of our gathers"""
    between_nodes: Annotated[str, named(metavar="SPEED")] = "8GB/s 30us"
    """bus bandwidth and latency of an all-gather across nodes"""
    in_node: Annotated[str, named(metavar="SPEED")] = "230GB/s 15us"
    """the same inside a node"""
    hop_us: NotNegative = 9.6
    """microseconds of a hop between nodes (NCCL's own model)"""
    in_node_hop_us: NotNegative = 3.4
    """the same inside a node"""
    rate: Annotated[str | None, named(metavar="RATE")] = None
    """instead of links: the calibrated stand at this rate, such as 200mbit, or `none` for no limit; its ranks go on sharing its
    cores"""
    schedule: Literal["auto", "serial", "overlapped"] = "auto"
    """auto: serial with --rate, overlapped with links"""

    # what is not recorded
    speedup: Positive = 1.0
    """of compute and codecs over the recorded machine's"""
    compute_seconds: Positive | None = None
    """with --model: of a layer's forward"""
    flops_per_second: Annotated[Positive, named("flops")] = 125e12
    """with --model: FLOP/s that a GPU really reaches"""
    tokens: Count = 4096
    """with --model: tokens a GPU and step"""
    backward_factor: Positive = 2.0
    """with --model: backward over forward"""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """with --model: of gradients"""
    learning_rate: Annotated[Positive, named("lr")] = 1e-5
    """learning rate, for change rates"""
    table: str | None = None
    """change rates: a shipped table or the path of one; the model's own when left out"""
    costs: str = "a100"
    """codec costs of derived contenders: a100, this-machine, or a JSON file"""
    budget: Annotated[str, named(metavar="BYTES")] = "8GiB"
    """caches on each rank, or none for no limit"""

    # output
    contenders: Annotated[tuple[str, ...], named(metavar="KEY")] = ()
    """only these, and stock FSDP2"""
    json_path: Annotated[str | None, named("json", "PATH")] = None
    """write everything there; - for stdout, without tables"""
    plot: Annotated[Path | None, named(metavar="PATH")] = None
    """draw timelines there (PNG): stock FSDP2 above ours"""
    plot_contender: Annotated[str, named(metavar="KEY")] = "default"
    """whose timeline is drawn below"""
    plot_gpus: Count | None = None
    """at which world size; the smallest with several nodes when left out"""
    plot_projection: Annotated[Path | None, named(metavar="PATH")] = None
    """draw iterations over the number of GPUs there (PNG)"""

    @property
    def world_sizes(self) -> list[int]:
        """The numbers of GPUs, each once, in rising order."""
        return sorted(set(self.gpus))

"""`ciera bench e2e`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes

from fsdp_ciera.arguments import named
from fsdp_ciera.bench.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class E2EOptions:
    """One training job by FSDP2, its rivals and every setting of ours, interleaved.

    Train a small pretrained MoE on several hosts (network namespaces, veth pairs, a bridge; tbf limits what each sends) with
    stock FSDP2, DeepSpeed ZeRO-3, a lossy int8 gather, stateless compression, and ours: in turn, round after round. Writes
    results.json, results.csv, steps.csv, traces and pictures. Needs root; --loopback does not, but has no links to throttle.
    Exits with 1 if bits differ that must not.
    """

    settings: Annotated[RunOptions, OmitArgPrefixes] = field(default_factory=RunOptions)
    """Hosts, links and turns."""
    contenders: Annotated[tuple[str, ...], named(metavar="KEY")] = ()
    """who runs, by key; all when left out, and wrong keys list them"""
    output: Annotated[Path, named("out", "FOLDER")] = Path("runs/bench")
    """where results go"""
    job_folder: Annotated[Path | None, named("job", "FOLDER")] = None
    """where the model is kept; <out>/job when left out"""

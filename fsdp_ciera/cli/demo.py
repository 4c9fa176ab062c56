"""`ciera demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fsdp_ciera.arguments import Count, named


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Fine-tune a pretrained MoE twice, stock FSDP2 beside fsdp_ciera, and compare every bit.

    SmolLM2-135M, upcycled to a Mixtral of 4 experts, learns the Python standard library's source: once under stock FSDP2 and
    once under fsdp_ciera with the same seeds. Exits with 1 if a bit differs.
    """

    output: Annotated[Path, named("out", "FOLDER")] = Path("runs/demo")
    """where results go"""
    ranks: Count = 4
    """gloo ranks on this machine"""
    steps: Count = 14
    """optimizer steps of each run"""
    lr: float = 1e-5
    """learning rate"""
    seq_len: Count = 128
    """tokens a rank and step"""
    codec: str = "exponent_block"
    """codec of the second run; the default is the paper's"""

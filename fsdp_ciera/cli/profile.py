"""`ciera profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from fsdp_ciera.arguments import Count, CountOrZero, Overrides, named


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Fine-tune a model as a TOML recipe says, and measure what each step changes.

    It runs on parallel.ranks processes of this machine or as one rank when started by torchrun, and measures how often
    exponents, blocks, shards and values change. Writes profile.json, a table of change rates for policies, and the figures of
    the paper's section 2.
    """

    recipe: Annotated[Positional[Path], named(metavar="RECIPE.toml")]
    """the recipe"""
    overrides: Overrides = ()
    """override one key of the recipe"""
    interval: Count = 1
    """steps between two looks at the shards"""
    warmup_steps: CountOrZero = 30
    """first steps that are left out of averages and table, as the paper does"""
    output: Annotated[Path | None, named("out", "FOLDER")] = None
    """where results go; <train.output>/profile when left out"""
    table: Annotated[str | None, named(metavar="NAME")] = None
    """name of the table; that of the model's folder when left out"""

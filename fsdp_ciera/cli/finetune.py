"""`ciera finetune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from fsdp_ciera.arguments import Overrides, named


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Fine-tune a model as a TOML recipe says, on parallel.ranks processes of this machine, or as one rank when started by
    torchrun."""

    recipe: Annotated[Positional[str], named(metavar="RECIPE.toml")]
    """the recipe"""
    overrides: Overrides = ()
    """override one key of the recipe, such as train.steps=20 or ciera.policy=none"""

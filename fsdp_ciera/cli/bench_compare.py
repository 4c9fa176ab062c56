"""`ciera bench compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from fsdp_ciera.arguments import named


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Do runs agree? Or: how do ratios move with the link?

    Two results.json of equal settings: do the ratios to stock FSDP2 agree within 10 % (exit 1 if not)? Several of different
    rates: a picture of ratios by rate.
    """

    first: Annotated[Positional[Path], named(metavar="RESULTS.json")]
    """of one run"""
    others: Annotated[Positional[tuple[Path, ...]], named(metavar="RESULTS.json")] = ()
    """of other runs"""
    plot: Annotated[Path | None, named(metavar="PATH")] = None
    """draw ratios by rate there (PNG)"""

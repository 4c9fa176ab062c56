"""The codecs by name. Their order has no meaning; `raw` must stay."""

from __future__ import annotations

from fsdp_ciera.codecs.base import Codec, Unit, UnitCoder
from fsdp_ciera.codecs.entropy import Entropy
from fsdp_ciera.codecs.exponent_block import ExponentBlock
from fsdp_ciera.codecs.exponent_delta import ExponentDelta
from fsdp_ciera.codecs.raw import Raw
from fsdp_ciera.codecs.value_delta import ValueDelta

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Raw, Entropy, ExponentBlock, ExponentDelta, ValueDelta)
}

__all__ = [
    "CODECS",
    "Codec",
    "Entropy",
    "ExponentBlock",
    "ExponentDelta",
    "Raw",
    "Unit",
    "UnitCoder",
    "ValueDelta",
]

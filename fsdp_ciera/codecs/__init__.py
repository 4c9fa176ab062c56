"""The codecs by name. The order has no meaning; `raw` must stay."""

from __future__ import annotations

from fsdp_ciera.codecs.base import RunCodec, StoredSection
from fsdp_ciera.codecs.entropy import Entropy
from fsdp_ciera.codecs.exponent_block import ExponentBlock
from fsdp_ciera.codecs.exponent_delta import ExponentDelta
from fsdp_ciera.codecs.raw import Raw
from fsdp_ciera.codecs.value_delta import ValueDelta

CODECS: dict[str, type[RunCodec]] = {
    codec.name: codec for codec in (Raw, Entropy, ExponentBlock, ExponentDelta, ValueDelta)
}

__all__ = [
    "CODECS",
    "Entropy",
    "ExponentBlock",
    "ExponentDelta",
    "Raw",
    "RunCodec",
    "StoredSection",
    "ValueDelta",
]

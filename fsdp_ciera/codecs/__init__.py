"""The codecs by name. The order has no meaning; `raw` must stay."""

from __future__ import annotations

from fsdp_ciera.codecs.base import RunCodec, StoredSection
from fsdp_ciera.codecs.exponent_block import ExponentBlock
from fsdp_ciera.codecs.raw import Raw

CODECS: dict[str, type[RunCodec]] = {codec.name: codec for codec in (Raw, ExponentBlock)}

__all__ = ["CODECS", "ExponentBlock", "Raw", "RunCodec", "StoredSection"]

"""The payload that a codec is expected to send for a shard, from the rates of the shard's category."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

import torch

from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.policies.rates import Rates

_EXPONENT_BITS = 2.65
"""Assumed entropy of the exponents of trained bf16 weights if a table does not say (DESIGN section 1: 2.6 to 2.7)."""
_NAMING_BITS = 1.5
"""Bits above -log2(share) that naming the position of a change costs: about log2(e) when few values changed."""
_EXPONENT_MOVE_BITS = 1.1
_VALUE_MOVE_BITS = 2.2
"""Bits that the size of a change costs, which is mostly one step up or down. Both from the demo's shards (docs/measured.md)."""


class Payload(NamedTuple):
    """Expected bits per value: in the gather that follows a change of the weights, and in a repeat of that gather."""

    first_bits: float
    repeat_bits: float


def expected_payload(codec: str, dtype: torch.dtype, rates: Rates, block_size: int) -> Payload:
    """The payload that `codec` sends for a shard with these rates, without section tables and headers.

    Rates are those of bf16. fp16 and fp32 have similar exponents but longer mantissas, so all their values count as changed.
    If a rate is not known, everything counts as changed. Formulas: DESIGN section 4; that of `exponent_block` is the paper's
    expected payload (its 3.2) with entropy-coded exponents.
    """
    raw_bits = 8.0 * dtype.itemsize
    if codec == "raw" or dtype not in FORMATS:
        return Payload(raw_bits, raw_bits)
    fmt = FORMATS[dtype]
    rest_bits = raw_bits - fmt.exponent_bits
    exponent_bits = min(fmt.exponent_bits, rates.exponent_entropy_bits or _EXPONENT_BITS)
    known_bits = rates.codec_bits.get(codec) if dtype == torch.bfloat16 else None
    if codec == "entropy":
        bits = rest_bits + exponent_bits if known_bits is None else known_bits
        return Payload(bits, bits)
    if codec == "exponent_block":
        share, _ = rates.block_change_at(block_size)
        fixed_bits = rest_bits + 1 / block_size
        return Payload(fixed_bits + (1.0 if share is None else share) * exponent_bits, fixed_bits)
    if codec == "exponent_delta":
        change_bits = (
            exponent_bits if rates.exponent_change is None else _sparse_bits(rates.exponent_change, _EXPONENT_MOVE_BITS)
        )
        return Payload(rest_bits + min(exponent_bits, change_bits) if known_bits is None else known_bits, rest_bits)
    assert codec == "value_delta", codec
    if known_bits is None and dtype == torch.bfloat16:
        known_bits = rates.value_change_entropy_bits
        if known_bits is None and rates.value_change is not None:
            known_bits = _sparse_bits(rates.value_change, _VALUE_MOVE_BITS)
    spread = rates.rank_spread or 1.0
    return Payload(raw_bits if known_bits is None else min(raw_bits, spread * known_bits), 0.0)


def _sparse_bits(share: float, move_bits: float) -> float:
    """Bits per value that say which values changed and by how much, if `share` of them did."""
    return share * (log2(1 / share) + _NAMING_BITS + move_bits) if share > 0 else 0.0

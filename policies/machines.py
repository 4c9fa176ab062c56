"""Codec costs of machines that are not at hand: projections from published figures, until they are measured.

`a100`: DietGPU's README plots a bf16 codec on an A100-80GB. Read off it (floats: compress / decompress GB/s of uncompressed
bytes): 8 Mi: 115 / 150, 16 Mi: 180 / 257, 64 Mi: 280 / 423. A fixed time and a rate through them: 94 us and 369 GB/s,
75 us and 562 GB/s. Decompressing reads 1.33 and writes 2 bytes a value, so that 562 GB/s of output are 0.94 TB/s of memory
traffic. No kernel is assumed to move more than that, or to start in less time; entropy coding costs what DietGPU's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_ciera.policies.costs import CodecCost, StageCost

_TRAFFIC_BYTES_PER_SECOND = 0.94e12
_ENCODE_SECONDS, _DECODE_SECONDS = 94e-6, 75e-6
_ENCODE_PER_VALUE, _DECODE_PER_VALUE = 2 / 369e9, 2 / 562e9
_SECTOR_BYTES = 32
"""Bytes that a GPU writes at least for one scattered value."""


def _move_seconds(num_bytes: float) -> float:
    return num_bytes / _TRAFFIC_BYTES_PER_SECOND


_A100 = {
    "raw": CodecCost(),
    "entropy": CodecCost(
        cmp=StageCost(fixed=_ENCODE_SECONDS, per_value=_ENCODE_PER_VALUE),
        decmp=StageCost(fixed=_DECODE_SECONDS, per_value=_DECODE_PER_VALUE),
    ),
    # hash: reads values. cmp: reads values, writes a plane. decmp: reads exponents and a plane, writes values.
    "exponent_block": CodecCost(
        hash=StageCost(fixed=_ENCODE_SECONDS, per_value=_move_seconds(2)),
        cmp=StageCost(fixed=_ENCODE_SECONDS, per_value=_move_seconds(3), per_changed=_ENCODE_PER_VALUE),
        decmp=StageCost(fixed=_DECODE_SECONDS, per_value=_move_seconds(4), per_changed=_DECODE_PER_VALUE),
    ),
    # the same with exponents that were sent last instead of hashes; changes are scattered
    "exponent_delta": CodecCost(
        hash=StageCost(fixed=_ENCODE_SECONDS, per_value=_move_seconds(3)),
        cmp=StageCost(fixed=_ENCODE_SECONDS, per_value=_move_seconds(3), per_changed=_ENCODE_PER_VALUE),
        decmp=StageCost(fixed=_DECODE_SECONDS, per_value=_move_seconds(4), per_changed=_move_seconds(_SECTOR_BYTES)),
    ),
    # hash: reads values and those sent last. decmp: reads the cache, writes values, and changes into the cache.
    "value_delta": CodecCost(
        hash=StageCost(fixed=_ENCODE_SECONDS, per_value=_move_seconds(4)),
        cmp=StageCost(fixed=_ENCODE_SECONDS, per_changed=_ENCODE_PER_VALUE + _move_seconds(_SECTOR_BYTES)),
        decmp=StageCost(
            fixed=_DECODE_SECONDS,
            per_value=_move_seconds(4),
            per_changed=_DECODE_PER_VALUE + _move_seconds(_SECTOR_BYTES),
        ),
    ),
}

MACHINES: Mapping[str, Mapping[str, CodecCost]] = MappingProxyType({"a100": MappingProxyType(_A100)})
"""By machine name: the costs of each codec on one GPU."""

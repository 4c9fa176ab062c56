"""What a codec is. A new one is a subclass of `RunCodec` with its name added to `fsdp_ciera.codecs.CODECS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.sections import SectionWriter, StoredSection
from fsdp_ciera.kernels.formats import FORMATS

__all__ = ["FloatRunCodec", "RunCodec", "StoredSection"]


class RunCodec(ABC):
    """Codec and state of one run (a stretch of a group's buffer) on one rank: sender of its own shard, receiver of all others.

    A payload holds, for each run, a *fixed part* whose size all ranks know beforehand, and `num_sections` *sections* of
    any size. Per gather the four methods below are called once each in this order; they are the paper's nodes Hash, Cmp,
    PreDecmp and Decmp. Sender and receiver state move in lockstep: when `compress` has run on every rank and
    `decompress` for every peer, each cache describes exactly what that gather carried. After `forget` on all ranks the
    next gather must be decodable without any earlier one.

    Arguments: `num_values` values of `dtype` a rank, `num_peers` other ranks, `block_size` values a block. A codec keeps
    no reference to tensors passed in. Between gathers it holds its caches and nothing else; within one, scratch of a chunk
    of values and at most about a payload.
    """

    name: ClassVar[str]
    num_sections: ClassVar[int] = 0
    stateless: ClassVar[bool] = False
    """Whether the same values always make the same payload. All other codecs must make empty plain sections of a shard that
    did not change, so that the size of a repeat gather is known beforehand."""
    can_decode_in_place: ClassVar[bool] = False
    """Whether what it remembers of its peers is exactly what it decoded last: then `out` of the next gather may hold that."""

    def __init__(self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> None:
        self.num_values = num_values
        self.dtype = dtype
        self.block_size = block_size
        self.num_peers = num_peers
        self.is_in_place = False
        """Whether `out` in `decompress` holds what was decoded last, once there was a gather, and serves as the cache."""

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` can be sent; runs of other dtypes go raw."""
        return True

    @classmethod
    @abstractmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Bytes that sender and receiver state of a run take on one rank once a gather has run."""

    @property
    @abstractmethod
    def fixed_bytes(self) -> int:
        """Bytes of the fixed part of one rank's payload for this run."""

    @property
    def most_section_bytes(self) -> int:
        """No payload has more bytes of sections for this run; room for so many is set aside."""
        return 0

    def detect(self, values: torch.Tensor) -> None:
        """Hash: finds what changed in the own shard [num_values] since the last gather."""
        return None

    @abstractmethod
    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Cmp: writes the fixed part (uint8 [fixed_bytes]) and adds the `num_sections` sections."""

    @property
    def block_counts(self) -> tuple[int, int]:
        """Blocks that the last `compress` looked at, and how many of them it did not have to send; for statistics."""
        return 0, 0

    def prepare(self) -> None:
        """PreDecmp: what can be readied at the receiver before the payload is there."""
        return None

    @abstractmethod
    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp: restores the shards of consecutive peers, bit for bit, and moves their caches on.

        `first_peer` counts the other ranks from 0; `fixed` is uint8 [peers, fixed_bytes], `sections[i]` peer i's
        sections, `out` [peers, num_values] of `dtype`, its rows strided. Raises `CieraDecodeError` for what cannot be
        decoded, possibly after part of the caches and of `out` was written: then `forget` must follow.
        """

    def forget(self) -> None:
        """Drops all state: the next gather is a full one."""
        return None


class FloatRunCodec(RunCodec):
    """A codec that looks into the bits of bf16, fp16 and fp32; `format` says where they are."""

    def __init__(self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> None:
        super().__init__(num_values, dtype, block_size, num_peers)
        self.format = FORMATS[dtype]

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """bf16, fp16 and fp32."""
        return dtype in FORMATS

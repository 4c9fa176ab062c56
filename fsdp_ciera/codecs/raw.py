"""`raw`: the bytes as they are. No cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.base import RunCodec, StoredSection
from fsdp_ciera.codecs.sections import SectionWriter


class Raw(RunCodec):
    """Sends every value as it is: for runs that are not opted in, and for dtypes that no other codec knows."""

    name: ClassVar[str] = "raw"
    stateless: ClassVar[bool] = True

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """None."""
        return 0

    @property
    def fixed_bytes(self) -> int:
        """The values themselves."""
        return self.num_values * self.dtype.itemsize

    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Copies."""
        fixed.copy_(values.view(torch.uint8))

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Copies; through bytes, since the payload is aligned to nothing."""
        out.view(torch.uint8).copy_(fixed)

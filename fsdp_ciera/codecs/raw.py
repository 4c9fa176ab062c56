"""`raw`: the bytes as they are. No state."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fsdp_ciera.codecs.base import Codec


class Raw(Codec):
    """Sends every value as it is: for runs that are not opted in, and for dtypes that no other codec knows."""

    name: ClassVar[str] = "raw"
    stateless: ClassVar[bool] = True

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """0: the codec has no state."""
        return 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the values themselves."""
        return self.coder.raw_bytes

    def encode(self, values: torch.Tensor, sections: Any, is_full: bool) -> None:
        """Adds no section."""
        return None

    def fill(self, values: torch.Tensor, fixed: Any) -> None:
        """Copies the values."""
        self.coder.fill_raw(values, fixed)

    def decode(self, received: Any, output: torch.Tensor) -> None:
        """Copies the peers' values."""
        self.coder.read_raw(received, output)

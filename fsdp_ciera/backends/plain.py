"""`PlainBackend`: gathers as in stock FSDP2, for devices on which no kernels can run."""

from __future__ import annotations

import torch

from fsdp_ciera.backends.cuda import CudaBackend
from fsdp_ciera.kernels import reference_tiles


class PlainBackend(CudaBackend):
    """A backend without codecs, so that only plain gathers are planned and made. `reason` says why."""

    def __init__(self, device: torch.device, reason: str) -> None:
        super().__init__(device, reference_tiles, "none")
        self.reason = reason

    def supports(self, codec: str, dtype: torch.dtype) -> bool:
        """False for every codec."""
        return False

"""`PlainBackend`: where no kernels can run, gathers are those of stock FSDP2."""

from __future__ import annotations

import torch

from fsdp_ciera.backends.cuda import CudaBackend
from fsdp_ciera.kernels import reference_tiles


class PlainBackend(CudaBackend):
    """Has no codec, so that nothing is planned or sent but plain gathers. `reason` says why."""

    def __init__(self, device: torch.device, reason: str) -> None:
        super().__init__(device, reference_tiles, "none")
        self.reason = reason

    def supports(self, codec: str, dtype: torch.dtype) -> bool:
        """None."""
        return False

"""Backends: kernels, entropy coder and memory for the gathers of one kind of device, and when the host may look at it."""

from __future__ import annotations

import os

import torch

from fsdp_ciera.backends.base import Backend
from fsdp_ciera.backends.cpu import CpuBackend
from fsdp_ciera.backends.cuda import CudaBackend
from fsdp_ciera.backends.plain import PlainBackend
from fsdp_ciera.errors import CieraKernelError
from fsdp_ciera.kernels import cuda, launch
from fsdp_ciera.kernels.dispatch import VARIABLE, chosen_for, tile_kernels_of

__all__ = ["Backend", "PlainBackend", "backend_of"]


def backend_of(device: torch.device) -> Backend:
    """Makes the backend that serves gathers on a device.

    `FSDP_CIERA_KERNELS=reference` runs the codecs of a GPU in plain torch; `cuda` runs the kernels of CUDA on any device.
    Raises `CieraPolicyError` for kernels that are asked for and cannot run.
    """
    if device.type == "cuda" and not os.environ.get(VARIABLE):
        reason = _why_not_loaded(device)
        return CudaBackend(device, cuda) if reason is None else PlainBackend(device, reason)
    if device.type not in ("cpu", "cuda"):
        return PlainBackend(device, f"there are no kernels for {device.type}")
    if device.type == "cpu" and chosen_for(device) != "cuda":
        return CpuBackend(device)
    return CudaBackend(device, tile_kernels_of(device))


def _why_not_loaded(device: torch.device) -> str | None:
    """Loads the kernels now, see [Note: Eager loading] in kernels/launch.py. Returns the reason why they cannot run on the
    device; `None` where they can."""
    reason = launch.why_not_available(device)
    if reason is None:
        try:
            launch.kernel_module(device)
        except CieraKernelError as error:
            return str(error)
    return reason

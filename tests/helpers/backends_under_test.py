"""Which backend gathers run on in a rank of a test: the CPU's, or that of CUDA on CPU tensors.

cpu     kernels of the host build
tiles   the tile kernels in torch (fsdp_ciera.kernels.reference_tiles)
shim    the CUDA source, compiled by g++ (shim_device.py)
"""

from __future__ import annotations

import torch

from fsdp_ciera import session
from fsdp_ciera.backends.base import Backend
from fsdp_ciera.backends.cpu import CpuBackend
from fsdp_ciera.backends.cuda import CudaBackend
from fsdp_ciera.kernels import cuda, reference_tiles
from fsdp_ciera.planning import measure

BACKENDS = ("cpu", "shim")


def make_backend(name: str) -> Backend:
    """The backend of that name, on CPU tensors. The shim takes the place of the launcher in this process."""
    device = torch.device("cpu")
    if name == "cpu":
        return CpuBackend(device)
    if name == "tiles":
        return CudaBackend(device, reference_tiles)
    import shim_device

    assert name == "shim"
    shim_device.install()
    return CudaBackend(device, cuda)


def use_backend(name: str) -> Backend:
    """From now on every session of this process runs on it."""
    backend = make_backend(name)
    if name != "cpu":
        measure.COST_VALUES = 1 << 16  # these are slow
    session.backend_of = lambda device: backend  # type: ignore[assignment]
    return backend

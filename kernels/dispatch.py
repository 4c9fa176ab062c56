"""Which implementation of the kernels serves: chosen here and nowhere else, by the tensors' device and what is there.

    reference   readable torch, on every device
    host        compiled, on CPU (host.py); the default there, where the package was built with a compiler
    cuda        launched from PTX (cuda.py); the default on CUDA, where GPU and driver are new enough

`FSDP_CIERA_KERNELS=reference|host|cuda` forces one. All agree bit for bit.

There are two kinds of kernels. `Kernels` work on one run and give their results to the host: `reference` and `host` have them,
and they serve the codecs on CPU. `TileKernels` (tiles.py) work on all runs of all peers and leave their results on the device:
`cuda` has them, and `reference_tiles`.
"""

from __future__ import annotations

import os
import warnings
from typing import Protocol

import torch

from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.kernels import cuda, host, launch, reference, reference_tiles
from fsdp_ciera.kernels.changes import Among, Changes, Form, Received, Used
from fsdp_ciera.kernels.formats import FloatFormat
from fsdp_ciera.kernels.tiles import TileKernels

VARIABLE = "FSDP_CIERA_KERNELS"


class Kernels(Protocol):
    """What every implementation has. The functions of reference.py say what they do, with worked examples."""

    reads_in_sequence: bool
    """Whether forms that are read one value after the other (classes of values, gaps) are fast."""

    def hash_blocks(self, values: torch.Tensor, fmt: FloatFormat, block_size: int) -> torch.Tensor: ...

    def checksum(self, data: torch.Tensor) -> torch.Tensor: ...

    def split_planes(
        self,
        values: torch.Tensor,
        fmt: FloatFormat,
        exponents: torch.Tensor | None = None,
        low: torch.Tensor | None = None,
        top: torch.Tensor | None = None,
    ) -> None: ...

    def merge_planes(
        self,
        exponents: torch.Tensor,
        low: torch.Tensor,
        top: torch.Tensor | None,
        fmt: FloatFormat,
        out: torch.Tensor,
    ) -> None: ...

    def find_changes(self, fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat | None, form: Form) -> Changes: ...

    def find_exponent_changes(
        self, values: torch.Tensor, last: torch.Tensor, fmt: FloatFormat, everywhere: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor]: ...

    def apply_changes(
        self, values: torch.Tensor, fmt: FloatFormat | None, received: Received, out: torch.Tensor | None = None
    ) -> Used: ...

    def count_bits(self, bits: torch.Tensor, num_values: int) -> int: ...

    def gather_bits(self, bits: torch.Tensor, num_values: int, among: Among) -> torch.Tensor: ...

    def gaps_of_bits(self, bits: torch.Tensor, num_values: int, among: Among | None = None) -> torch.Tensor: ...

    def bits_of_gaps(self, gaps: torch.Tensor, num_values: int) -> torch.Tensor | None: ...


def kernels_of(tensor: torch.Tensor) -> Kernels:
    """The implementation for tensors on this one's device. Raises `CieraPolicyError` for one that is forced and not there.

    Where `cuda` is chosen, which has tile kernels only, the reference serves: it is exact on every device, and waits for it.
    """
    return _IMPLEMENTATIONS[chosen_for(tensor.device)]


def tile_kernels_of(device: torch.device) -> TileKernels:
    """The tile kernels for tensors on a device: `cuda` where it is chosen, otherwise readable torch. Raises as `kernels_of`."""
    return cuda if chosen_for(device) == "cuda" else reference_tiles


def chosen_for(device: torch.device) -> str:
    """The name of the implementation that serves on a device."""
    forced = os.environ.get(VARIABLE)
    if not forced:
        return _REGISTRY.default_for(device)
    if forced not in _IMPLEMENTATIONS:
        raise CieraPolicyError(f"{VARIABLE} is {forced!r}; it may be {' or '.join(map(repr, _IMPLEMENTATIONS))}")
    reason = None
    if forced == "host":
        reason = host.WHY_NOT or (None if device.type == "cpu" else f"the host build works on CPU, not on {device}")
    elif forced == "cuda" and device.type == "cpu":  # it forces what serves on GPUs
        reason = launch.why_not_available(device)
        if reason is not None and torch.cuda.is_available():
            return _REGISTRY.default_for(device)
    if reason:
        raise CieraPolicyError(f"{VARIABLE} is {forced!r}, but {reason}. Unset it to choose by device")
    return forced


_IMPLEMENTATIONS: dict[str, Kernels] = {"reference": reference, "host": host, "cuda": reference}


class _Registry:
    """What serves on each device unless something is forced; found out once, with one warning where it is the slow one."""

    def __init__(self) -> None:
        self._defaults: dict[torch.device, str] = {}

    def default_for(self, device: torch.device) -> str:
        if device not in self._defaults:
            reason = _why_reference(device)
            self._defaults[device] = "reference" if reason else {"cpu": "host", "cuda": "cuda"}[device.type]
            if reason:
                text = f"on {device} the torch reference of the kernels serves, which is 3 to 30 times slower: {reason}"
                warnings.warn(f"fsdp_ciera: {text}", stacklevel=4)
        return self._defaults[device]


def _why_reference(device: torch.device) -> str | None:
    """Why nothing faster serves on a device; `None` where something does."""
    if device.type == "cpu":
        return f"there is no host build: {host.WHY_NOT}. Install g++ and the package again" if host.WHY_NOT else None
    if device.type == "cuda":
        return launch.why_not_available(device)
    return f"there are no other ones for {device.type}"


_REGISTRY = _Registry()

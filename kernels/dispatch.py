"""Which implementation of the kernels serves: chosen here and nowhere else, by the tensors' device and what is there.

    reference   readable torch, on every device
    host        compiled, on CPU (host.py); the default there, where the package was built with a compiler

`FSDP_CIERA_KERNELS=reference|host` forces one. All agree bit for bit.
"""

from __future__ import annotations

import os
import warnings
from typing import Protocol

import torch

from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.kernels import host, reference
from fsdp_ciera.kernels.changes import Among, Changes, Form, Received, Used
from fsdp_ciera.kernels.formats import FloatFormat

VARIABLE = "FSDP_CIERA_KERNELS"


class Kernels(Protocol):
    """What every implementation has. The functions of reference.py say what they do, with worked examples."""

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

    def apply_changes(
        self, values: torch.Tensor, fmt: FloatFormat | None, received: Received, out: torch.Tensor | None = None
    ) -> Used: ...

    def count_bits(self, bits: torch.Tensor, num_values: int) -> int: ...

    def gather_bits(self, bits: torch.Tensor, num_values: int, among: Among) -> torch.Tensor: ...

    def gaps_of_bits(self, bits: torch.Tensor, num_values: int, among: Among | None = None) -> torch.Tensor: ...

    def bits_of_gaps(self, gaps: torch.Tensor, num_values: int) -> torch.Tensor | None: ...


def kernels_of(tensor: torch.Tensor) -> Kernels:
    """The implementation for tensors on this one's device. Raises `CieraPolicyError` for one that is forced and not there."""
    return _IMPLEMENTATIONS[chosen_for(tensor.device.type)]


def chosen_for(device_type: str) -> str:
    """The name of the implementation that serves on `"cpu"` or `"cuda"`."""
    forced = os.environ.get(VARIABLE)
    if forced is None:
        if device_type == "cpu" and not host.WHY_NOT:
            return "host"
        if device_type == "cpu":
            _warn_once(f"the torch reference of the kernels serves, which is several times slower: {host.WHY_NOT}. "
                       "Install a C++ compiler and the package again")  # fmt: skip
        return "reference"
    if forced not in _IMPLEMENTATIONS:
        raise CieraPolicyError(f"{VARIABLE} is {forced!r}; it may be {' or '.join(map(repr, _IMPLEMENTATIONS))}")
    if forced == "host" and host.WHY_NOT:
        raise CieraPolicyError(f"{VARIABLE} is 'host', but there is no host build: {host.WHY_NOT}")
    return forced


_IMPLEMENTATIONS: dict[str, Kernels] = {"reference": reference, "host": host}
_WARNED: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(f"fsdp_ciera: {text}", stacklevel=3)

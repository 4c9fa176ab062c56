"""Large buffers on the host.

[Note: Huge pages] NumPy asks the kernel for huge pages (2 MiB) when an array has 4 MiB or more; torch does not. A fresh 64 MiB
buffer of 4 KiB pages costs 16 thousand page faults, three times what a copy into it costs. So caches and payloads, which
are made anew or come and go with every gather, are NumPy arrays that torch looks at. (benchmarks/codecs.py, row
"memcpy into fresh memory".) Pages that are never touched take no memory, so room for a worst case is free.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Bytes: TypeAlias = npt.NDArray[np.uint8]

_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def empty_bytes(num_bytes: int) -> Bytes:
    """uint8 [num_bytes], uninitialised. See [Note: Huge pages]."""
    return np.empty(num_bytes, np.uint8)


def empty_tensor(num_values: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [num_values], uninitialised. See [Note: Huge pages]."""
    return torch.from_numpy(np.empty(num_values, _INTEGERS[dtype.itemsize])).view(dtype)


def zeros_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros. Cost: none until it is touched. See [Note: Huge pages]."""
    return torch.from_numpy(np.zeros(shape, _INTEGERS[dtype.itemsize])).view(dtype)

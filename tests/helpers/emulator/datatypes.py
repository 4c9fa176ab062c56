"""PTX data types and the NumPy types that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Select = Any  # what picks threads out of a register: slice(None) for all of them, else an array of thread numbers

UNSIGNED: dict[int, np.dtype[Any]] = {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
SIGNED: dict[int, np.dtype[Any]] = {bits: np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class DataType:
    """A type such as u32. Kinds: u, s, b (bits), f (moved around as bits, never computed with), pred."""

    kind: str
    bits: int

    @property
    def num_bytes(self) -> int:
        return self.bits // 8

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.kind == "pred":
            return np.dtype(np.bool_)
        return (SIGNED if self.kind == "s" else UNSIGNED)[self.bits]

    @property
    def is_integer(self) -> bool:
        return self.kind in "usb"

    def __str__(self) -> str:
        return "pred" if self.kind == "pred" else f"{self.kind}{self.bits}"


TYPES = {f"{kind}{bits}": DataType(kind, bits) for kind in "usb" for bits in UNSIGNED}
TYPES |= {"pred": DataType("pred", 1), "f32": DataType("f", 32), "f64": DataType("f", 64)}


def wrap(value: int, bits: int) -> int:
    """A Python integer as an unsigned one of that many bits."""
    return value & ((1 << bits) - 1)

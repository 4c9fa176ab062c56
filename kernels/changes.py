"""What the kernels `find_changes` and `apply_changes` say about which values of a run changed, and by how much.

A *move* is the distance between two bit patterns in the order of the numbers, in zigzag form (0, -1, 1, -2, ... as 0, 1, 2,
3, ...). Moves below an *escape* of at most 255 are symbols; the escape itself stands for all others, whose new value travels
as it is, a *literal*. Values may be told apart in *small* and large ones: a value is small when its last exponent is below a
*boundary*; zeros and denormals have exponent 0. Exponents, one byte each, have their difference mod 256 for a move,
and no literals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BYTE_ESCAPE = 255


@dataclass(frozen=True)
class Form:
    """How changes are written down."""

    escape: int = BYTE_ESCAPE
    everywhere: bool = False
    """A move for every value, 0 where it stayed, and no bitmap."""
    boundary: int = 0
    """0: all values are large."""
    small_escape: int = BYTE_ESCAPE

    def __post_init__(self) -> None:
        assert not (self.everywhere and self.boundary), "values are told apart by size only where some have no move"


@dataclass(frozen=True)
class Changes:
    """The changes of a run of n values. Bitmaps are uint8 [ceil(n / 8)], first value lowest, zeros behind the last one."""

    changed: torch.Tensor | None
    """Which values changed; `None` where every value has a move."""
    small: torch.Tensor | None
    """Which values were small; `None` without a boundary."""
    num_small: int
    small_moves: torch.Tensor
    """uint8, of the changed small values, in order."""
    moves: torch.Tensor
    """uint8, of the changed large values, in order."""
    literals: torch.Tensor
    """Bit patterns: of each `CHUNK_VALUES` values first those of the small ones, then those of the large ones."""


@dataclass(frozen=True)
class Received:
    """The same at the receiver, who knows the last values and so which were small.

    `bits` and `small_bits` are counted among the large and the small values. There must be as many moves as bits that are
    set, and as many literals as escapes; `CieraDecodeError` is for the caller to raise.
    """

    form: Form
    bits: torch.Tensor | None
    small_bits: torch.Tensor | None
    small_moves: torch.Tensor
    moves: torch.Tensor
    literals: torch.Tensor


@dataclass(frozen=True)
class Used:
    """How much of it `apply_changes` took up, and how many values were small: all of it, unless it is damaged."""

    num_small: int
    num_small_moves: int
    num_moves: int
    num_literals: int


@dataclass(frozen=True)
class Among:
    """The small or the large values of a run: where `small`, uint8 [ceil(n / 8)], is set, or with `flip` where it is not."""

    small: torch.Tensor
    flip: bool

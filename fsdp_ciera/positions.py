"""Which values of a run changed, as a section: the gaps between them, one byte each, entropy-coded.

Worked example, changes at 2, 3 and 300 of 400 values: gaps 2, 0, 296, and 296 = 255 + 41, so the symbols 2, 0, 255, 41.
A symbol 255 only moves on by 255. No change at all is an empty section, and every value changed is `Coding.ALL`.
"""

from __future__ import annotations

import torch

from fsdp_ciera.codecs.base import StoredSection
from fsdp_ciera.entropy import Coding, Section, code_section, decode_symbols
from fsdp_ciera.errors import CieraDecodeError

_ESCAPE = 255


def code_positions(positions: torch.Tensor) -> Section:
    """int64 [k], ascending -> a section of gaps. Cost: a few passes over k numbers."""
    gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
    num_escapes = gaps // _ESCAPE
    last = (num_escapes + 1).cumsum(0) - 1  # where each gap's last symbol stands
    symbols = torch.full((int(last[-1]) + 1 if len(last) else 0,), _ESCAPE, dtype=torch.uint8)
    symbols[last] = (gaps - num_escapes * _ESCAPE).to(torch.uint8)
    return code_section(symbols)


def decode_positions(section: StoredSection, num_values: int) -> torch.Tensor:
    """The inverse of `code_positions`: int64 [k]. Raises `CieraDecodeError` for positions outside of `num_values`."""
    symbols = decode_symbols(section.coding, section.data, most_symbols=2 * num_values + 1)
    is_last = symbols != _ESCAPE
    moved = (symbols.to(torch.int64) + is_last).cumsum(0)
    positions = moved[is_last] - 1
    if len(moved) and (int(moved[-1]) > num_values or not bool(is_last[-1])):
        raise CieraDecodeError(f"a list of changed values ends at {int(moved[-1]) - 1} of {num_values} values")
    return positions


def is_all(section: StoredSection) -> bool:
    """Whether the section says that every value travels."""
    return section.coding == Coding.ALL

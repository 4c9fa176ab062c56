"""Positions: a section that says which values of a run changed, in the smallest of several forms.

    gaps      the number of unchanged values before each change, one byte each; a symbol 255 only moves on by 255
    bitmap    one bit a value
    all       every value travels, as it is
    dense     every value has a change, which is 0 where it stayed

Worked example, changes at 2, 3 and 300 of 400 values: gaps 2, 0, 296, and 296 = 255 + 41, so the symbols 2, 0, 255, 41.
Gaps and bitmap travel uncoded or entropy-coded. No change at all is an empty section.
"""

from __future__ import annotations

import numpy as np
import torch

from fsdp_ciera.codecs.sections import Coding, Form, SectionWriter, StoredSection, SymbolReader
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.changes import Among
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import packed_bytes
from fsdp_ciera.kernels.memory import Bytes
from fsdp_ciera.kernels.reference import GAP_ESCAPE

_BITMAP_PLAUSIBLE = 4
"""A bitmap of more than this many times the bytes of the gaps is not tried. One change in 32 values that lie anywhere takes
0.20 bit a value as coded gaps and 0.28 as a coded bitmap, since a byte of it takes at least a bit."""


def write_positions(
    sections: SectionWriter,
    bits: torch.Tensor,
    num_values: int,
    num_changed: int,
    among: Among | None = None,
    num_among: int = 0,
) -> None:
    """Adds the section of the `num_changed` bits that are set in `bits`, uint8 [ceil(num_values / 8)].

    With `among`, positions and `num_changed` count only its `num_among` values. Cost: a pass over the bitmap, and a zstd pass
    over the gaps, the bitmap (an eighth of a byte a value), or both.
    """
    if not num_changed:
        sections.empty()
        return
    kernels = kernels_of(bits)
    bitmap_bytes = packed_bytes(num_values if among is None else num_among, 1)
    forms = []
    num_gap_bytes = num_changed  # at least
    # of more changes a coded bitmap is as small as gaps, within 2 %, and faster
    if kernels.reads_in_sequence and num_changed <= bitmap_bytes:
        gaps = kernels.gaps_of_bits(bits, num_values, among).numpy()
        num_gap_bytes = len(gaps)
        if num_gap_bytes <= bitmap_bytes:
            forms.append(Form(gaps))
    if not forms or bitmap_bytes < _BITMAP_PLAUSIBLE * num_gap_bytes:
        bitmap = bits if among is None else kernels.gather_bits(bits, num_values, among)
        forms.append(Form(bitmap.numpy(), Coding.BITMAP, Coding.BITMAP_ZSTD))
    sections.code_smallest(forms)


def most_position_bytes(num_values: int) -> int:
    """Bytes of the largest section of positions: no form is larger than the plain bitmap."""
    return packed_bytes(num_values, 1)


def read_positions(
    section: StoredSection, num_values: int, num_values_is_most: bool = False
) -> tuple[torch.Tensor, int]:
    """Reads a section of gaps or a bitmap -> bits uint8 [about ceil(num_values / 8)], and how many are set.

    Raises `CieraDecodeError` unless it is such a section of `num_values` values. With `num_values_is_most` there may be fewer
    values: a bitmap may then be shorter.
    """
    if section.coding in (Coding.BITMAP, Coding.BITMAP_ZSTD):
        bits = _read_bitmap(section, packed_bytes(num_values, 1), num_values_is_most)
        size = min(num_values, 8 * len(bits))
        if size % 8 and len(bits) == packed_bytes(num_values, 1) and int(bits[-1]) >> size % 8:
            raise CieraDecodeError(f"a bitmap of changed values marks one behind the last of {num_values}")
        bitmap = torch.from_numpy(bits)
        return bitmap, kernels_of(bitmap).count_bits(bitmap, size)
    most_symbols = num_values + num_values // GAP_ESCAPE + 1
    gaps = torch.from_numpy(SymbolReader(section, most_symbols=most_symbols).read_all())
    kernels = kernels_of(gaps)
    bits_from_gaps = kernels.bits_of_gaps(gaps, num_values)
    if bits_from_gaps is None:
        raise CieraDecodeError(f"{len(gaps)} gaps between changed values lead out of {num_values} values or mark none")
    return bits_from_gaps, len(gaps) - int(np.count_nonzero(gaps.numpy() == GAP_ESCAPE))


def _read_bitmap(section: StoredSection, num_bytes: int, is_most: bool) -> Bytes:
    coding = Coding.PLAIN if section.coding == Coding.BITMAP else Coding.ZSTD
    stored = StoredSection(coding, section.data)
    reader = SymbolReader(stored, most_symbols=num_bytes) if is_most else SymbolReader(stored, num_bytes)
    return reader.read_all()

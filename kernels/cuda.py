"""The kernels on CUDA: launches of native/kernels.cu on torch's current stream.

The functions that dispatch.py asks for are those of reference.py. Nothing waits for the device, but for `find_changes`
(which must know how much it found), `apply_changes` and `count_bits` (which tell it). Those who may not wait use `scan`,
`compact` and `apply`:

    scan       bitmap, and how many values changed up to each CTA, on the device
    (read the last of these counts when waiting is allowed, once for many runs)
    compact    moves and literals into room of that size
    apply      the inverse; damage is told by a flag on the device

What is read one value after the other (classes of values, gaps) is no work for a GPU: the torch reference serves there, and
codecs that ask for `reads_in_sequence` do without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp_ciera.kernels import reference
from fsdp_ciera.kernels.changes import Changes, Form, Received, Used
from fsdp_ciera.kernels.formats import FloatFormat, packed_bytes
from fsdp_ciera.kernels.launch import Argument, kernel_module
from fsdp_ciera.kernels.reference import bits_of_gaps, gaps_of_bits, gather_bits

__all__ = [
    "apply", "apply_changes", "bits_of_gaps", "checksum", "compact", "count_bits", "find_changes", "gaps_of_bits",
    "gather_bits", "hash_blocks", "merge_planes", "put_blocks", "reads_in_sequence", "scan", "split_planes", "take_blocks",
]  # fmt: skip

NUM_THREADS = 256
TILE_VALUES = 8  # kTile
CTA_VALUES = NUM_THREADS * TILE_VALUES
WARPS = NUM_THREADS // 32

reads_in_sequence = False
"""See dispatch.Kernels."""


def _launch(name: str, grid: int | tuple[int, int], tensor: torch.Tensor, *args: Argument | None) -> None:
    values = (0 if arg is None else arg for arg in args)
    kernel_module(tensor.device).launch(name, grid, NUM_THREADS, *values, device=tensor.device)


def _num_ctas(num_values: int) -> int:
    return -(-num_values // CTA_VALUES)


def _name(fmt: FloatFormat | None) -> str:
    return "byte" if fmt is None else fmt.name


def hash_blocks(values: torch.Tensor, fmt: FloatFormat, block_size: int) -> torch.Tensor:
    """See reference.hash_blocks."""
    num_blocks = -(-len(values) // block_size)
    hashes = torch.empty(num_blocks, 2, dtype=torch.int64, device=values.device)
    _launch(f"hash_{fmt.name}", -(-num_blocks // WARPS), values, values, len(values), block_size, hashes)
    return hashes


def checksum(data: torch.Tensor) -> torch.Tensor:
    """See reference.checksum."""
    raw = data.contiguous()
    rows, row_bytes = len(raw), raw[0].numel() * raw.element_size() if len(raw) else 0
    sums = torch.zeros(rows, dtype=torch.int64, device=raw.device)
    num_ctas = min(_num_ctas(row_bytes), 1024)  # the rest in a loop: each CTA ends in atomic additions
    _launch("checksum", (num_ctas, rows), raw, raw, row_bytes, row_bytes, sums)
    _launch("finish_checksums", -(-rows // NUM_THREADS), raw, sums, rows)
    return sums


def split_planes(
    values: torch.Tensor,
    fmt: FloatFormat,
    exponents: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
) -> None:
    """See reference.split_planes."""
    _launch(f"split_{fmt.name}", _num_ctas(len(values)), values, values, len(values), exponents, low, top)


def merge_planes(
    exponents: torch.Tensor, low: torch.Tensor, top: torch.Tensor | None, fmt: FloatFormat, out: torch.Tensor
) -> None:
    """See reference.merge_planes."""
    num_values = len(out)
    _launch(f"merge_{fmt.name}", _num_ctas(num_values), out, exponents, 0, low, top, 0, num_values, out, 0)


# ---- changes, without waiting


@dataclass(frozen=True)
class Scan:
    """What changed in a run of n values. All of it on the device."""

    bits: torch.Tensor
    """uint8 [ceil(n / 8)]."""
    changes_up_to: torch.Tensor
    """int64 [CTAs]: changed values up to the end of each CTA's; the last is their number."""
    literals_up_to: torch.Tensor
    """int64 [CTAs]: the same of literals."""

    def counts(self) -> torch.Tensor:
        """int64 [2]: how many values changed, and how many literals there are."""
        if not len(self.changes_up_to):
            return self.changes_up_to.new_zeros(2)
        return torch.stack([self.changes_up_to[-1], self.literals_up_to[-1]])


def scan(fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat | None, escape: int) -> Scan:
    """Values [n] against `last` [n]. Reads both once."""
    num_values = len(fresh)
    bits = torch.empty(packed_bytes(num_values, 1), dtype=torch.uint8, device=fresh.device)
    counts = torch.empty(2, _num_ctas(num_values), dtype=torch.int64, device=fresh.device)
    _launch(f"scan_{_name(fmt)}", _num_ctas(num_values), fresh, fresh, last, num_values, escape, bits, *counts)
    return Scan(bits, *counts.cumsum(dim=1))


def compact(
    fresh: torch.Tensor,
    last: torch.Tensor,
    fmt: FloatFormat | None,
    escape: int,
    found: Scan,
    moves: torch.Tensor,
    literals: torch.Tensor,
) -> None:
    """Writes moves uint8 and literals, which must have room for what `found` counted; `last` becomes equal to `fresh`."""
    _launch(
        f"compact_{_name(fmt)}", _num_ctas(len(fresh)), fresh, fresh, last, len(fresh), escape, found.bits,
        found.changes_up_to, found.literals_up_to, moves, literals,
    )  # fmt: skip


def apply(
    values: torch.Tensor,
    fmt: FloatFormat | None,
    escape: int,
    bits: torch.Tensor,
    moves: torch.Tensor,
    literals: torch.Tensor,
    out: torch.Tensor | None,
    damage: torch.Tensor,
) -> Scan:
    """Moves values [n] in place and copies all of them to `out` [n], where given. -> how much was taken up, as counts.

    `damage` int32 [1] becomes 1 where bits ask for more moves, or moves for more literals, than there are; such values
    stay as they are, and nothing else is touched.
    """
    num_values, num_ctas = len(values), _num_ctas(len(values))
    counts = torch.zeros(2, num_ctas, dtype=torch.int64, device=values.device)
    _launch("count_changes", num_ctas, values, bits, num_values, counts[0])
    changes_up_to = counts[0].cumsum(dim=0)
    if fmt is not None:
        warps = -(-num_ctas // WARPS)
        _launch("count_escapes", warps, values, moves, len(moves), changes_up_to, num_ctas, escape, counts[1])
    literals_up_to = counts[1].cumsum(dim=0)
    _launch(
        f"apply_{_name(fmt)}", num_ctas, values, values, num_values, escape, bits, changes_up_to, literals_up_to, moves,
        len(moves), literals, len(literals), out, damage,
    )  # fmt: skip
    return Scan(bits, changes_up_to, literals_up_to)


def take_blocks(
    values: torch.Tensor, fmt: FloatFormat, block_size: int, ranks: torch.Tensor, exponents: torch.Tensor
) -> None:
    """Exponents of the blocks with ranks (int64 [num_blocks], -1: not wanted) -> `exponents`, side by side."""
    num_ctas = -(-len(ranks) // WARPS)
    _launch(f"take_blocks_{fmt.name}", num_ctas, values, values, len(values), block_size, ranks, exponents)


def put_blocks(exponents: torch.Tensor, block_size: int, ranks: torch.Tensor, cache: torch.Tensor) -> None:
    """The inverse, into a cache uint8 [num_blocks * block_size]; behind the last exponent there are zeros."""
    args = (exponents, len(exponents), block_size, ranks, len(ranks), cache)
    _launch("put_blocks", -(-len(ranks) // WARPS), cache, *args)


# ---- changes, as dispatch.py asks for them


def find_changes(fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat | None, form: Form) -> Changes:
    """See reference.find_changes. Waits for the device."""
    if form.boundary or form.everywhere:
        return reference.find_changes(fresh, last, fmt, form)
    found = scan(fresh, last, fmt, form.escape)
    num_changed, num_literals = found.counts().tolist()
    moves = torch.empty(num_changed, dtype=torch.uint8, device=fresh.device)
    literals = torch.empty(num_literals, dtype=torch.uint8 if fmt is None else fmt.int_dtype, device=fresh.device)
    compact(fresh, last, fmt, form.escape, found, moves, literals)
    return Changes(found.bits, None, 0, moves[:0], moves, literals)


def apply_changes(
    values: torch.Tensor, fmt: FloatFormat | None, received: Received, out: torch.Tensor | None = None
) -> Used:
    """See reference.apply_changes. Waits for the device."""
    if received.bits is None or received.small_bits is not None:
        return reference.apply_changes(values, fmt, received, out)
    damage = torch.zeros(1, dtype=torch.int32, device=values.device)
    escape, moves, literals = received.form.escape, received.moves, received.literals
    taken = apply(values, fmt, escape, received.bits, moves, literals, out, damage)
    num_moves, num_literals = taken.counts().tolist()
    return Used(0, 0, num_moves, num_literals)


def count_bits(bits: torch.Tensor, num_values: int) -> int:
    """See reference.count_bits. Waits for the device."""
    counts = torch.zeros(_num_ctas(num_values), dtype=torch.int64, device=bits.device)
    _launch("count_changes", len(counts), bits, bits, num_values, counts)
    return int(counts.sum())

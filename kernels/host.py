"""The kernels on CPU, compiled: calls into the host build of native/, one core or several (`torch.get_num_threads()`).

A forked child must not use more than one thread where its parent did: OpenMP hangs then, as in torch itself.

The functions are those of reference.py; what they do and cost is said there. All tensors are on the CPU, and those with
one dimension contiguous.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsdp_ciera.kernels.changes import Among, Changes, Form, Received, Used
from fsdp_ciera.kernels.formats import FloatFormat, packed_bytes
from fsdp_ciera.kernels.memory import empty_tensor, zeros_tensor
from fsdp_ciera.kernels.reference import GAP_ESCAPE

FOLDER = Path(__file__).parent


def source_digest(folder: Path) -> str:
    """Names the sources of a host build: a hash of all files that it is made from."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("native/*.cpp"), *folder.glob("native/*.cuh"), *folder.glob("native/*.hpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find_build(folder: Path = FOLDER) -> tuple[ctypes.CDLL | None, str]:
    """The host build, or `None` and why there is none."""
    paths = [folder / f"_host{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = [path for path in paths if path.exists()]
    if not found:
        return (
            None,
            "it could not be compiled when the package was installed (is g++ there? `pip install -v` shows why)",
        )
    try:
        library = ctypes.CDLL(str(found[0]))
        library.ciera_source.restype = ctypes.c_char_p
        built_from = library.ciera_source().decode()
    except (OSError, AttributeError) as error:
        return None, f"{found[0].name} cannot be loaded: {error}"
    if built_from != source_digest(folder):
        return None, f"{found[0].name} was built from other sources"
    return library, ""


_LIBRARY, WHY_NOT = find_build()
"""The host build, loaded once; `WHY_NOT` says why there is none."""


reads_in_sequence = True
"""See dispatch.Kernels."""

_RETURNS = {"checksum": ctypes.c_uint64, "gaps_of_bits": ctypes.c_int64, "bits_of_gaps": ctypes.c_int64,
            "gather_bits": ctypes.c_int64, "count_bits": ctypes.c_int64, "find_exponents": ctypes.c_int64}  # fmt: skip
_ARGUMENTS = {
    "split": "pnpppt", "merge": "pppnpt", "hash": "pnnpt", "checksum": "pnt", "find": "ppnuuuppppppt",
    "find_exponents": "ppnppt",
    "apply": "pnupnpnuupppppt", "gaps_of_bits": "ppinp", "bits_of_gaps": "pnnp", "gather_bits": "ppinp", "count_bits": "pn",
}  # fmt: skip
_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "u": ctypes.c_uint32, "i": ctypes.c_int, "t": ctypes.c_int}


_NO_BITS = torch.zeros(1, dtype=torch.uint8)
"""Stands for a bitmap of no bytes, whose pointer would be null, which means that there is no bitmap."""


class _Caller:
    """Looks functions up by name: the types of their arguments are told once for each."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}

    def __call__(self, name: str, fmt: str, *arguments: Any) -> Any:
        function = self._functions.get((name, fmt))
        if function is None:
            function = getattr(_LIBRARY, f"ciera_{name}_{fmt}" if fmt else f"ciera_{name}")
            function.restype = _RETURNS.get(name)
            function.argtypes = [_TYPES[letter] for letter in _ARGUMENTS[name]]
            self._functions[name, fmt] = function
        return function(*arguments)


_call = _Caller()


def _pointer(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.shape, tensor.stride(), tensor.device)
    return tensor.data_ptr()


def hash_blocks(values: torch.Tensor, fmt: FloatFormat, block_size: int) -> torch.Tensor:
    """See reference.hash_blocks."""
    hashes = torch.empty(-(-len(values) // block_size), 2, dtype=torch.int64)
    _call("hash", fmt.name, _pointer(values), len(values), block_size, _pointer(hashes), torch.get_num_threads())
    return hashes


def checksum(data: torch.Tensor) -> torch.Tensor:
    """See reference.checksum."""
    raw = data.contiguous()
    row_bytes = raw.element_size() * raw[0].numel() if len(raw) else 0
    first, threads = _pointer(raw) or 0, torch.get_num_threads()
    sums = [_call("checksum", "", first + row * row_bytes, row_bytes, threads) for row in range(len(raw))]
    return torch.from_numpy(np.array(sums, np.uint64).view(np.int64))


def split_planes(
    values: torch.Tensor,
    fmt: FloatFormat,
    exponents: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
) -> None:
    """See reference.split_planes."""
    planes = _pointer(exponents), _pointer(low), _pointer(top)
    _call("split", fmt.name, _pointer(values), len(values), *planes, torch.get_num_threads())


def merge_planes(
    exponents: torch.Tensor, low: torch.Tensor, top: torch.Tensor | None, fmt: FloatFormat, out: torch.Tensor
) -> None:
    """See reference.merge_planes."""
    planes = _pointer(exponents), _pointer(low), _pointer(top)
    _call("merge", fmt.name, *planes, len(out), _pointer(out), torch.get_num_threads())


def find_changes(fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat | None, form: Form) -> Changes:
    """See reference.find_changes. Room for n moves and literals is set aside; what is not used is never touched."""
    num_values, num_bytes = len(fresh), packed_bytes(len(fresh), 1)
    changed = None if form.everywhere else empty_tensor(num_bytes, torch.uint8)
    small = empty_tensor(num_bytes, torch.uint8) if form.boundary else None
    moves = empty_tensor(num_values, torch.uint8)
    small_moves = empty_tensor(num_values if form.boundary else 0, torch.uint8)
    literals = empty_tensor(num_values if fmt is not None else 0, torch.uint8 if fmt is None else fmt.int_dtype)
    counts = np.empty(4, np.int64)
    _call(
        "find", "byte" if fmt is None else fmt.name, _pointer(fresh), _pointer(last), num_values, form.boundary,
        form.small_escape, form.escape, _pointer(changed), _pointer(small), _pointer(small_moves), _pointer(moves),
        _pointer(literals), counts.ctypes.data, torch.get_num_threads(),
    )  # fmt: skip
    num_small, num_small_changed, num_changed, num_literals = counts.tolist()
    return Changes(
        changed, small, num_small, small_moves[:num_small_changed], moves[: num_changed - num_small_changed],
        literals[:num_literals],
    )  # fmt: skip


def find_exponent_changes(
    values: torch.Tensor, last: torch.Tensor, fmt: FloatFormat, everywhere: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """See reference.find_exponent_changes."""
    num_values = len(values)
    changed = None if everywhere else empty_tensor(packed_bytes(num_values, 1), torch.uint8)
    moves = empty_tensor(num_values, torch.uint8)
    pointers = _pointer(values), _pointer(last), num_values, _pointer(changed), _pointer(moves)
    return changed, moves[: int(_call("find_exponents", fmt.name, *pointers, torch.get_num_threads()))]


def apply_changes(
    values: torch.Tensor, fmt: FloatFormat | None, received: Received, out: torch.Tensor | None = None
) -> Used:
    """See reference.apply_changes."""
    form, small, bits = received.form, received.small_bits, received.bits
    num_bytes = [0 if one is None else len(one) for one in (small, bits)]
    small, bits = (one if one is None or len(one) else _NO_BITS for one in (small, bits))
    counts = np.empty(4, np.int64)
    _call(
        "apply", "byte" if fmt is None else fmt.name, _pointer(values), len(values), form.boundary, _pointer(small),
        num_bytes[0], _pointer(bits), num_bytes[1], form.small_escape, form.escape, _pointer(received.small_moves),
        _pointer(received.moves), _pointer(received.literals), _pointer(out), counts.ctypes.data, torch.get_num_threads(),
    )  # fmt: skip
    return Used(*counts.tolist())


def count_bits(bits: torch.Tensor, num_values: int) -> int:
    """See reference.count_bits."""
    assert len(bits) >= packed_bytes(num_values, 1)
    return int(_call("count_bits", "", _pointer(bits), num_values))


def gather_bits(bits: torch.Tensor, num_values: int, among: Among) -> torch.Tensor:
    """See reference.gather_bits. Cost: a pass over both bitmaps and some over the set bits."""
    assert len(bits) == len(among.small) == packed_bytes(num_values, 1)
    gathered = zeros_tensor((packed_bytes(num_values, 1),), torch.uint8)
    pointers = _pointer(bits), _pointer(among.small)
    count = int(_call("gather_bits", "", *pointers, int(among.flip), num_values, _pointer(gathered)))
    return gathered[: packed_bytes(count, 1)]


def gaps_of_bits(bits: torch.Tensor, num_values: int, among: Among | None = None) -> torch.Tensor:
    """See reference.gaps_of_bits."""
    gaps = empty_tensor(count_bits(bits, num_values) + num_values // GAP_ESCAPE + 1, torch.uint8)
    pointers = _pointer(bits), None if among is None else _pointer(among.small)
    flip = among is not None and among.flip
    return gaps[: int(_call("gaps_of_bits", "", *pointers, int(flip), num_values, _pointer(gaps)))]


def bits_of_gaps(gaps: torch.Tensor, num_values: int) -> torch.Tensor | None:
    """See reference.bits_of_gaps."""
    bits = zeros_tensor((packed_bytes(num_values, 1),), torch.uint8)
    count = int(_call("bits_of_gaps", "", _pointer(gaps), len(gaps), num_values, _pointer(bits)))
    return None if count < 0 else bits

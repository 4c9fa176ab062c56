"""Entropy coding of bytes on CUDA: nvCOMP's ANS, in large chunks, on torch's current stream. Optional.

    why_not_available()                      None, or the reason why nvCOMP cannot be used
    ans().compress(data)                     -> chunks at fixed strides, and their sizes, all on the device
    ans().decompress(pointers, sizes, out)   -> a status per chunk, on the device

NOT YET RUN ON A GPU: what is tested is what can be without one, that is the library's host-side answers, the layout of its
structures against its own headers, and every argument as a library would receive it. Treat a first run as an experiment.

nvCOMP is called through its batched C interface, which only queues work on the stream. (Its Python interface reads sizes and
statuses back, and so waits for the device.) Nothing here waits: sizes and statuses are device tensors, for kernels to read and
for the host to look at later. About tensors that are dropped while the work is queued see launch.py, [Note: Stream lifetime].

nvCOMP 6 it must be: 5.3 has other names and values, and neither reads what the other writes. Ranks must agree on `version`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fsdp_ciera.errors import CieraKernelError
from fsdp_ciera.kernels.launch import current_place

CHUNK_BYTES = 256 << 10
"""Uncoded bytes of a chunk. Each chunk carries its own symbol counts and the states of 8 sub-coders, about 2 KiB by nvCOMP's
documentation: a tenth of what the exponents of 64 KiB are coded in, but a fortieth at 256 KiB. The 8 work side by side, so
a shard of 16 MiB keeps 512 going; larger chunks would leave multiprocessors idle on shards of a few MiB."""

INSTALL = "pip install 'nvidia-nvcomp-cu13>=6,<7' (for CUDA 12: nvidia-nvcomp-cu12)"

_OLDEST_VERSION, _NEWEST_VERSION = 6000, 6999  # 1000 major + 100 minor + patch
_CANNOT_DECOMPRESS = 12  # nvcompErrorCannotDecompress
_TYPE_CHAR = 0  # NVCOMP_TYPE_CHAR
_BACKEND_CUDA = 2  # NVCOMP_DECOMPRESS_BACKEND_CUDA: the hardware engine knows no ANS


class CompressOptions(ctypes.Structure):
    """nvcompBatchedANSCompressOpts_t, passed by value. Zeros are nvCOMP's defaults."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("max_sub_chunk_count", ctypes.c_uint8),
        ("states_per_lane", ctypes.c_uint8),
        ("histogram_reduction_log2", ctypes.c_uint8),
        ("reserved", ctypes.c_char * 53),
    )


class DecompressOptions(ctypes.Structure):
    """nvcompBatchedANSDecompressOpts_t, passed by value."""

    _fields_ = (
        ("backend", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("max_sub_chunk_count", ctypes.c_uint8),
        ("states_per_lane", ctypes.c_uint8),
        ("skip_validate", ctypes.c_uint8),
        ("reserved", ctypes.c_char * 53),
    )


class Properties(ctypes.Structure):
    """nvcompProperties_t."""

    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


class Alignments(ctypes.Structure):
    """nvcompAlignmentRequirements_t, in bytes."""

    _fields_ = (("input", ctypes.c_size_t), ("output", ctypes.c_size_t), ("temp", ctypes.c_size_t))


_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvcompGetProperties": (_POINTER,),
    "nvcompBatchedANSCompressGetRequiredAlignments": (CompressOptions, _POINTER),
    "nvcompBatchedANSCompressGetMaxOutputChunkSize": (_SIZE, CompressOptions, _POINTER),
    # chunks, largest chunk, options, -> bytes, bytes of all chunks, stream
    "nvcompBatchedANSCompressGetTempSize": (_SIZE, _SIZE, CompressOptions, _POINTER, _SIZE, _POINTER),
    # chunk pointers and sizes, largest chunk, chunks, temp, its bytes, output pointers and sizes, options, statuses, stream
    "nvcompBatchedANSCompressAsync": (
        *(_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER),
        *(CompressOptions, _POINTER, _POINTER),
    ),
    "nvcompBatchedANSDecompressGetRequiredAlignments": (DecompressOptions, _POINTER),
    "nvcompBatchedANSDecompressGetTempSize": (_SIZE, _SIZE, DecompressOptions, _POINTER, _SIZE, _POINTER),
    # chunk pointers and sizes, room of each output, -> its bytes, chunks, temp, its bytes, output pointers, options, statuses,
    # stream
    "nvcompBatchedANSDecompressAsync": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER),
        *(DecompressOptions, _POINTER, _POINTER),
    ),
}
"""Arguments of the C functions that are called. All return nvcompStatus_t, an int, 0 on success."""


class Coded(NamedTuple):
    """Coded chunks on the device: chunk i begins at byte i x chunk_stride_bytes of `scratch`. Valid in stream order."""

    scratch: torch.Tensor
    """uint8 [num_chunks x chunk_stride_bytes]"""
    chunk_stride_bytes: int
    chunk_bytes: torch.Tensor
    """int64 [num_chunks]: coded bytes of each chunk"""
    statuses: torch.Tensor
    """int32 [num_chunks]: 0 where the chunk was coded"""


class Ans:
    """ANS of one loaded nvCOMP library. Threads may share it.

    library: a `ctypes.CDLL` of nvCOMP 6, or what has the functions of `SIGNATURES`. Raises `CieraKernelError` for another
    version. Cost: a few calls on the host; needs no GPU.
    """

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Callable[..., int]] = {}
        self._library = library
        properties = Properties()
        self._call("nvcompGetProperties", ctypes.addressof(properties))
        self.version: int = properties.version
        """1000 major + 100 minor + patch. Ranks must agree on it."""
        if not _OLDEST_VERSION <= self.version <= _NEWEST_VERSION:
            found = f"{self.version // 1000}.{self.version % 1000 // 100}"
            raise CieraKernelError(f"coding on CUDA needs nvCOMP 6, found {found}: {INSTALL}")
        self._compress_options = CompressOptions(data_type=_TYPE_CHAR)
        self._decompress_options = DecompressOptions(backend=_BACKEND_CUDA, data_type=_TYPE_CHAR)
        self.compress_alignments = self._alignments("Compress", self._compress_options)
        """Bytes that addresses of input, output and temporary memory must be multiples of."""
        self.decompress_alignments = self._alignments("Decompress", self._decompress_options)
        """The same. A payload must place coded chunks at multiples of its `input`."""
        most = _SIZE()
        self._call(
            "nvcompBatchedANSCompressGetMaxOutputChunkSize", CHUNK_BYTES, self._compress_options, ctypes.addressof(most)
        )
        alignment = max(self.compress_alignments.output, self.decompress_alignments.input)
        self.chunk_stride_bytes: int = -(-most.value // alignment) * alignment
        """Room for a chunk however badly it codes (1.39 x CHUNK_BYTES in nvCOMP 6.0), a multiple of the alignments."""

    def compress(self, data: torch.Tensor) -> Coded:
        """Queues the coding of `data`, uint8 [num_bytes], contiguous, aligned as `compress_alignments.input` says.

        Its chunks are CHUNK_BYTES each, the last one what is left. Raises `CieraKernelError` when nvCOMP refuses the call;
        what goes wrong on the device shows in `statuses`. Cost: device memory for the worst case, 1.4 x num_bytes.
        """
        _check_bytes("compress", data, self.compress_alignments.input)
        num_chunks = num_chunks_of(data.numel())
        scratch = data.new_empty(num_chunks * self.chunk_stride_bytes)
        chunk_bytes = data.new_empty(num_chunks, dtype=torch.int64)
        statuses = data.new_empty(num_chunks, dtype=torch.int32)
        if num_chunks:
            stream = current_place(data.device).stream
            temp = data.new_empty(self._temp_bytes("Compress", num_chunks, self._compress_options, stream))
            inputs = _pointers(data, num_chunks, CHUNK_BYTES)
            sizes = _chunk_sizes(data)
            outputs = _pointers(scratch, num_chunks, self.chunk_stride_bytes)
            self._call(
                "nvcompBatchedANSCompressAsync",
                *(inputs.data_ptr(), sizes.data_ptr(), CHUNK_BYTES, num_chunks),
                *(temp.data_ptr(), temp.numel(), outputs.data_ptr(), chunk_bytes.data_ptr()),
                *(self._compress_options, statuses.data_ptr(), stream),
            )
        return Coded(scratch, self.chunk_stride_bytes, chunk_bytes, statuses)

    def decompress(self, chunk_pointers: torch.Tensor, chunk_bytes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Queues the decoding of chunks into `out`, uint8 [num_bytes], contiguous: as many bytes as were coded.

        chunk_pointers, chunk_bytes: int64 [num_chunks] on the device of `out`, addresses of the coded chunks (multiples of
        `decompress_alignments.input`) and their coded bytes. -> int32 [num_chunks], 0 where a chunk was whole and gave all its
        bytes; `out` means nothing where it is not. Raises `CieraKernelError` when nvCOMP refuses the call.
        """
        _check_bytes("decompress into", out, self.decompress_alignments.output)
        num_chunks = num_chunks_of(out.numel())
        for tensor in (chunk_pointers, chunk_bytes):
            assert tensor.shape == (num_chunks,) and tensor.dtype == torch.int64 and tensor.is_contiguous(), (
                f"{out.numel()} bytes are {num_chunks} chunks, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        statuses = out.new_empty(num_chunks, dtype=torch.int32)
        if not num_chunks:
            return statuses
        stream = current_place(out.device).stream
        temp = out.new_empty(self._temp_bytes("Decompress", num_chunks, self._decompress_options, stream))
        sizes = _chunk_sizes(out)
        decoded_bytes = torch.empty_like(sizes)
        outputs = _pointers(out, num_chunks, CHUNK_BYTES)
        self._call(
            "nvcompBatchedANSDecompressAsync",
            *(chunk_pointers.data_ptr(), chunk_bytes.data_ptr(), sizes.data_ptr(), decoded_bytes.data_ptr()),
            *(num_chunks, temp.data_ptr(), temp.numel(), outputs.data_ptr()),
            *(self._decompress_options, statuses.data_ptr(), stream),
        )
        return statuses.masked_fill_((statuses == 0) & (decoded_bytes != sizes), _CANNOT_DECOMPRESS)

    def _alignments(self, direction: str, options: ctypes.Structure) -> Alignments:
        alignments = Alignments()
        self._call(f"nvcompBatchedANS{direction}GetRequiredAlignments", options, ctypes.addressof(alignments))
        return alignments

    def _temp_bytes(self, direction: str, num_chunks: int, options: ctypes.Structure, stream: int) -> int:
        """Temporary device memory for that many chunks; the library answers on the host. nvCOMP 6.0 needs none."""
        num_bytes = _SIZE()
        self._call(
            f"nvcompBatchedANS{direction}GetTempSize",
            *(num_chunks, CHUNK_BYTES, options, ctypes.addressof(num_bytes), num_chunks * CHUNK_BYTES, stream),
        )
        return num_bytes.value

    def _call(self, name: str, *args: int | ctypes.Structure) -> None:
        function = self._functions.get(name)
        if function is None:
            function = getattr(self._library, name)
            function.argtypes = SIGNATURES[name]  # type: ignore[union-attr]
            self._functions[name] = function
        status = function(*args)
        if status:
            raise CieraKernelError(f"{name} returned nvcompStatus_t {status}")


@functools.cache
def ans() -> Ans:
    """The coder of the installed nvCOMP. Raises `CieraKernelError` with the reason and the remedy. Cost: loading it, once."""
    try:
        library = importlib.import_module("nvidia.libnvcomp").load_library()
    except ImportError as error:
        raise CieraKernelError(f"coding on CUDA needs nvCOMP, which is not installed ({error}): {INSTALL}") from error
    if library is None:
        raise CieraKernelError(f"nvCOMP is installed but its library does not load: {INSTALL}")
    return Ans(library)


def why_not_available() -> str | None:
    """The reason why `ans` fails, or `None`. It does not look for a GPU."""
    try:
        ans()
    except CieraKernelError as error:
        return str(error)
    return None


def num_chunks_of(num_bytes: int) -> int:
    """Chunks that so many uncoded bytes are coded in."""
    return -(-num_bytes // CHUNK_BYTES)


def _check_bytes(verb: str, tensor: torch.Tensor, alignment: int) -> None:
    assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous(), f"cannot {verb} {tensor.dtype}"
    address = tensor.data_ptr()
    assert address % alignment == 0, f"cannot {verb} memory at {address:#x}: not a multiple of {alignment}"


def _pointers(tensor: torch.Tensor, num_chunks: int, stride_bytes: int) -> torch.Tensor:
    """int64 [num_chunks] on the device: addresses of the chunks. Made by a kernel: a copy from the host would wait."""
    start = tensor.data_ptr()
    return torch.arange(start, start + num_chunks * stride_bytes, stride_bytes, dtype=torch.int64, device=tensor.device)


def _chunk_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [num_chunks] on the device: uncoded bytes of the chunks."""
    num_chunks = num_chunks_of(tensor.numel())
    sizes = tensor.new_full((num_chunks,), CHUNK_BYTES, dtype=torch.int64)
    sizes[-1:].fill_(tensor.numel() - (num_chunks - 1) * CHUNK_BYTES)
    return sizes

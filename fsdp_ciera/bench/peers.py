"""Rivals in FSDP2's own place: custom all-gathers that are not ours, for `FSDPModule.set_custom_all_gather`.

Int8AllGather        lossy: int8 with a scale per block, in the manner of ZeRO++ qwZ
StatelessAllGather   lossless: each shard compressed on its own (zstd, ZipNN), nothing remembered
use                  sets such an all-gather on every FSDP module
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import zstandard
from torch import nn

from fsdp_ciera._compat import (
    AllGather,
    FSDPModule,
    FSDPParamGroup,
    all_gather_flat,
    param_groups,
    param_names_and_sizes,
)
from fsdp_ciera.errors import MissingPeerError, PeerError
from fsdp_ciera.kernels.memory import Bytes, empty_bytes

DEFAULT_BLOCK_SIZE = 4096
"""Values for each scale. DeepSpeed cuts a shard into the fewest equal blocks of at most 8000 values whose length is a multiple
of 8 (`CUDAQuantizer.target_group_size`, beside which it says that 4k is best): 4096 for shards of a power of two of values."""
_CHUNK_VALUES = 1 << 18  # 1 MiB of fp32: what is worked on stays in the processor's cache
_LARGEST_CODE = 127
_SIZE_BYTES = 8


class PeerAllGather(AllGather):
    """Base of the rivals: counts, and the output's memory. CPU tensors only; a call blocks and returns `None`."""

    is_lossless = True

    def __init__(self) -> None:
        self.param_group: FSDPParamGroup | None = None
        """FSDP2's parameter group for which it gathers; `None` until `use` sets it."""
        self.sent_bytes = 0
        """Bytes that this rank has sent: (world_size - 1) x its contributions, with sizes and padding."""
        self.codec_seconds = 0.0
        """Seconds spent in encoding and decoding so far."""
        self.num_gathers = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a new output buffer for each gather."""
        if device.type != "cpu":
            raise PeerError(f"{type(self).__name__} gathers on {device.type!r}, but only 'cpu' is supported")
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fills `output_tensor` [world_size * n] from every rank's `input_tensor` [n]."""
        self.num_gathers += 1
        with torch.inference_mode(False), torch.no_grad():
            self._gather(output_tensor.view(group.size(), -1), input_tensor, group)
        return None

    def _gather(self, output: torch.Tensor, local: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        raise NotImplementedError

    def _exchange(self, output: torch.Tensor, local: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        """Gathers every rank's `local` [n] into `output` [world_size, n] and counts the bytes sent."""
        if local.numel():
            all_gather_flat(output.view(-1), local, process_group, async_op=False)
        self.sent_bytes += (process_group.size() - 1) * local.numel() * local.element_size()

    @contextmanager
    def _coding(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.codec_seconds += time.perf_counter() - start


def _rows(world_size: int, row_bytes: int) -> torch.Tensor:
    return torch.from_numpy(empty_bytes(world_size * row_bytes)).view(world_size, row_bytes)


class Int8AllGather(PeerAllGather):
    """LOSSY: half the bytes of bf16, by int8 values with an fp32 scale per block, in the manner of ZeRO++ qwZ.

    Symmetric, and no state: a block's scale is its largest magnitude / 127, a value becomes round(value / scale), and every
    rank computes with code x scale. A rank does so for its own slot too, as in qwZ; otherwise ranks would compute with
    different weights. So |value - result| <= scale / 2, and half a unit in the last place of the result's own dtype on top.
    One all-gather of n + 4 x (number of blocks) bytes a rank (rounded up to 4); the gather takes values of bf16, fp16 and
    fp32, and buffers of any other dtype (FSDP2's uint8 for groups of mixed dtypes) travel as they are.

    A block of zeros stays zeros (-0 becomes 0). A block with an infinity or a NaN becomes NaN throughout.

    It differs from DeepSpeed 0.19.8's kernel where that would only cost accuracy: the kernel converts to fp16 first and
    divides by largest / 128, so that the largest positive value is clipped. Blocks begin anew at every parameter; otherwise
    a layer norm's values of 1 would coarsen the weights beside them (DeepSpeed keeps small parameters out of the gather
    instead).
    """

    is_lossless = False

    def __init__(self, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if block_size < 1:
            raise PeerError(f"block_size {block_size} is not allowed: at least 1 value")
        super().__init__()
        self.block_size = block_size

    def _gather(self, output: torch.Tensor, local: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        if local.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            self._exchange(output, local, process_group)
            return
        num_values, stretches = local.numel(), self._stretches(local)
        code_bytes = -(-num_values // 4) * 4  # so that the scales are aligned
        row_bytes = code_bytes + 4 * sum(-(-stretch // self.block_size) for stretch in stretches)
        with self._coding():
            row = torch.zeros(row_bytes, dtype=torch.uint8)
            codes, scales = _parts(row, num_values, code_bytes)
            for part, block_codes, block_scales in self._by_block(stretches, local, codes, scales):
                _quantize(part, block_codes, block_scales)
        rows = _rows(process_group.size(), row_bytes)
        self._exchange(rows, row, process_group)
        with self._coding():
            for slot, row in zip(output, rows, strict=True):
                codes, scales = _parts(row, num_values, code_bytes)
                for part, block_codes, block_scales in self._by_block(stretches, slot, codes, scales):
                    part.copy_(block_codes * block_scales[:, None])

    def _stretches(self, local: torch.Tensor) -> list[int]:
        """Returns the number of values of each parameter in the buffer.

        Parameters that make their own gather inputs count as one stretch, the whole buffer.
        """
        if self.param_group is not None:
            _, _, sizes = param_names_and_sizes(self.param_group, local.dtype)
            if sum(sizes) == local.numel():
                return sizes
        return [local.numel()]

    def _by_block(
        self, stretches: Sequence[int], values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields views of some blocks at a time: values [b, m], codes [b, m], scales [b].

        The last block of a stretch may be shorter than the others.
        """
        first = first_block = 0
        most_blocks = max(1, _CHUNK_VALUES // self.block_size)
        for stretch in stretches:
            end = first + stretch
            while first < end:
                num_blocks = min(most_blocks, (end - first) // self.block_size)
                length = num_blocks * self.block_size or end - first
                num_blocks = num_blocks or 1
                yield (
                    values[first : first + length].view(num_blocks, -1),
                    codes[first : first + length].view(num_blocks, -1),
                    scales[first_block : first_block + num_blocks],
                )
                first += length
                first_block += num_blocks


def _parts(row: torch.Tensor, num_values: int, code_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return row[:num_values].view(torch.int8), row[code_bytes:].view(torch.float32)


def _quantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantizes `values` [b, m] into int8 `codes` [b, m] and fp32 `scales` [b]."""
    exact = values.float()
    largest = exact.abs().amax(1)
    finite = largest.isfinite()
    scale = largest / _LARGEST_CODE
    # Codes must fit: among denormals the quotient may be rounded far down, and next to the largest fp32 it must not be up.
    fits = scale * _LARGEST_CODE
    infinity = torch.tensor(torch.inf)
    scale = torch.where(fits < largest, torch.nextafter(scale, infinity), scale)
    scale = torch.where(fits.isinf() & finite, torch.nextafter(scale, -infinity), scale)
    if not finite.all():
        exact = torch.where(finite[:, None], exact, 0.0)
    divisor = torch.where(finite & (scale > 0), scale, 1.0)
    codes.copy_(exact.div_(divisor[:, None]).round_())
    scales.copy_(torch.where(finite, scale, torch.nan))


class Coder(NamedTuple):
    """A lossless compressor of bytes without state."""

    encode: Callable[[Bytes], Any]
    """Turns bytes [n] into a bytes-like frame."""
    decode: Callable[[Bytes, int], Any]
    """Turns a frame and n into the bytes-like original."""


class StatelessAllGather(PeerAllGather):
    """Lossless: every gather compresses the shard anew, knows nothing of the gather before, and keeps nothing.

    `compress` names the coder: `"zstd"` (level 1 on the shard's bytes as they lie), `"zstd_planes"` (the same after the
    values' first bytes, second bytes, ... were laid together) or `"zipnn"` (the PyPI package, one thread, in the mode of the
    buffer's dtype). Two collectives: 8 bytes a rank for the sizes, then the frames, padded to the largest. When a rank's
    frame is no smaller than its shard, all shards travel as they are.
    """

    def __init__(self, compress: str = "zstd") -> None:
        if compress not in CODERS:
            raise PeerError(f"compress={compress!r} is not allowed: one of {', '.join(CODERS)}")
        super().__init__()
        self.compress = compress
        CODERS[compress](torch.bfloat16)  # raises now if the package is missing

    def _gather(self, output: torch.Tensor, local: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        raw_bytes = local.numel() * local.element_size()
        coder = CODERS[self.compress](local.dtype)
        frame: Any = b""
        size = raw_bytes
        if coder is not None and raw_bytes:
            with self._coding():
                frame = coder.encode(local.view(torch.uint8).numpy())
            size = min(size, len(frame))
        all_sizes = torch.empty(process_group.size(), 1, dtype=torch.int64)
        self._exchange(all_sizes, torch.tensor([size]), process_group)
        sizes = all_sizes.view(-1).tolist()
        if max(sizes) >= raw_bytes or coder is None:
            self._exchange(output, local, process_group)
            return
        row = torch.zeros(max(sizes), dtype=torch.uint8)
        row.numpy()[:size] = np.frombuffer(frame, np.uint8)
        rows = _rows(process_group.size(), max(sizes))
        self._exchange(rows, row, process_group)
        with self._coding():
            for rank, slot in enumerate(output):
                if rank == process_group.rank():
                    if slot.data_ptr() != local.data_ptr():  # FSDP2 hands in that very slot
                        slot.copy_(local)
                    continue
                decoded = coder.decode(rows[rank, : sizes[rank]].numpy(), raw_bytes)
                slot.view(torch.uint8).numpy()[:] = np.frombuffer(decoded, np.uint8)


def _zstd(dtype: torch.dtype) -> Coder:
    def decode(frame: Bytes, num_bytes: int) -> bytes:
        return zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=num_bytes)

    return Coder(lambda raw: zstandard.ZstdCompressor(level=1).compress(raw.data), decode)


def _zstd_planes(dtype: torch.dtype) -> Coder:
    zstd, item_bytes = _zstd(dtype), dtype.itemsize

    def encode(raw: Bytes) -> Any:
        return zstd.encode(np.ascontiguousarray(raw.reshape(-1, item_bytes).T).reshape(-1))

    def decode(frame: Bytes, num_bytes: int) -> Any:
        planes = np.frombuffer(zstd.decode(frame, num_bytes), np.uint8).reshape(item_bytes, -1)
        return np.ascontiguousarray(planes.T).reshape(-1)

    return Coder(encode, decode)


def _zipnn(dtype: torch.dtype) -> Coder | None:
    """Returns ZipNN's coder, or `None` for a dtype for which it has no mode."""
    try:
        from zipnn import ZipNN
    except ImportError as error:
        raise MissingPeerError("the package zipnn is not installed: pip install zipnn==0.5.4") from error
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    if dtype not in names:
        return None
    coder = ZipNN(input_format="byte", bytearray_dtype=names[dtype], threads=1)
    # It reorders what it is given in place, hence the copies.
    return Coder(lambda raw: coder.compress(bytearray(raw)), lambda frame, _: coder.decompress(bytearray(frame)))


CODERS: dict[str, Callable[[torch.dtype], Coder | None]] = {
    "zstd": _zstd,
    "zstd_planes": _zstd_planes,
    "zipnn": _zipnn,
}

Peer = TypeVar("Peer", bound=PeerAllGather)


def use(model: nn.Module, make: Callable[[], Peer]) -> list[Peer]:
    """Sets a new all-gather of `make()` on every FSDP module of `model` that has parameters.

    Returns the all-gathers in the order of `model.modules()`. FSDP2 itself raises for a module with several parameter groups.
    """
    peers: list[Peer] = []
    seen_groups: list[FSDPParamGroup] = []  # fully_shard([a, b]) makes one parameter group for two modules
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        new_groups = [
            param_group for param_group in param_groups(module) if not any(param_group is seen for seen in seen_groups)
        ]
        if not new_groups:
            continue
        peer = make()
        module.set_custom_all_gather(peer)
        peer.param_group = new_groups[0]
        seen_groups += new_groups
        peers.append(peer)
    return peers

"""Codecs on CUDA. What the paper calls Hash, Cmp and Decmp are launches here, and none of them waits for the device.

    count       Hash: what changed in the own shard -> counts, on the device. They are exchanged, and the host reads those of
                all ranks once for all groups (fsdp_ciera.gather.device_stream); from them it knows every size of every payload
    compress    Cmp: the parts of the payload, side by side, each from a multiple of 16 bytes on
    decompress  Decmp: a peer's parts -> its shard, bit for bit

The same caches as on CPU (fsdp_ciera.codecs) and other payloads: changes are named by bitmaps, sizes travel ahead, and parts
are entropy-coded elsewhere (device_coder.py). Described in docs/wire-format.md. A first gather without caches goes
raw and is kept (`seed`).

[Note: Damage] What a payload says is never trusted with memory: kernels check positions against the sizes that travelled
ahead, leave alone what does not fit, and set a flag on the device. Test: test_device_gather.py, a damaged payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.planes import merge, split_remainder
from fsdp_ciera.kernels import cuda
from fsdp_ciera.kernels.changes import BYTE_ESCAPE
from fsdp_ciera.kernels.formats import FORMATS, packed_bytes
from fsdp_ciera.kernels.reference import pack_bits, unpack_bits


class DeviceCodec(ABC):
    """Codec and state of one run on one rank, as `fsdp_ciera.codecs.RunCodec`; tensors are [num_values] of `dtype` on a GPU."""

    name: ClassVar[str]
    num_counts: ClassVar[int] = 0
    coded_parts: ClassVar[tuple[int, ...]] = ()
    """Numbers of the parts that are worth entropy-coding."""

    def __init__(
        self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int, device: torch.device
    ) -> None:
        self.num_values = num_values
        self.dtype = dtype
        self.block_size = block_size
        self.num_peers = num_peers
        self.device = device

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """bf16, fp16 and fp32."""
        return dtype in FORMATS

    def count(self, values: torch.Tensor) -> torch.Tensor:
        """Hash -> int64 [num_counts]: what the next payload holds. `compress` must follow, with the same values."""
        return torch.zeros(0, dtype=torch.int64, device=self.device)

    @abstractmethod
    def part_bytes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each part of a payload with these counts; where nothing changed they are all 0."""

    @abstractmethod
    def compress(self, values: torch.Tensor, counts: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Cmp: fills the parts, uint8 each. With counts of 0 no `count` need have come before."""

    @abstractmethod
    def decompress(
        self, peer: int, counts: Sequence[int], parts: Sequence[torch.Tensor], out: torch.Tensor, damage: torch.Tensor
    ) -> None:
        """Decmp of one of the other ranks, counted from 0. `damage` int32 [1]: see [Note: Damage]."""

    def seed(self, own: torch.Tensor, peers: Sequence[torch.Tensor]) -> None:
        """Starts from shards that travelled raw: the own one, and those of the other ranks."""
        return None

    def forget(self) -> None:
        """Drops all state."""
        return None


class DeviceRaw(DeviceCodec):
    """Values as they are."""

    name: ClassVar[str] = "raw"

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """All dtypes."""
        return True

    def part_bytes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The values."""
        return (self.num_values * self.dtype.itemsize,)

    def compress(self, values: torch.Tensor, counts: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Cmp."""
        parts[0].copy_(values.view(torch.uint8))

    def decompress(
        self, peer: int, counts: Sequence[int], parts: Sequence[torch.Tensor], out: torch.Tensor, damage: torch.Tensor
    ) -> None:
        """Decmp."""
        out.view(torch.uint8).copy_(parts[0])


class DeviceValueDelta(DeviceCodec):
    """`value_delta`: bitmap of changed values, a move of a byte for each, and literals. A repeat gather sends nothing."""

    name: ClassVar[str] = "value_delta"
    num_counts: ClassVar[int] = 2  # changed values, literals
    coded_parts: ClassVar[tuple[int, ...]] = (0, 1)

    def __init__(
        self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int, device: torch.device
    ) -> None:
        super().__init__(num_values, dtype, block_size, num_peers, device)
        self.format = FORMATS[dtype]
        self._own: torch.Tensor | None = None  # [num_values]
        self._value_cache: torch.Tensor | None = None  # [num_peers, num_values]
        self._scan: cuda.Scan | None = None  # between count and compress

    def count(self, values: torch.Tensor) -> torch.Tensor:
        """Hash."""
        assert self._own is not None
        self._scan = cuda.scan(values, self._own, self.format, BYTE_ESCAPE)
        return self._scan.counts()

    def part_bytes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Bitmap, moves, literals."""
        num_changed, num_literals = counts
        bitmap_bytes = packed_bytes(self.num_values, 1) if num_changed else 0
        return bitmap_bytes, num_changed, num_literals * self.dtype.itemsize

    def compress(self, values: torch.Tensor, counts: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Cmp. Moves the own values on."""
        scan, self._scan = self._scan, None
        if not counts[0]:
            return
        assert scan is not None and self._own is not None
        bits, moves, literals = parts
        bits.copy_(scan.bits)
        cuda.compact(values, self._own, self.format, BYTE_ESCAPE, scan, moves, literals)

    def decompress(
        self, peer: int, counts: Sequence[int], parts: Sequence[torch.Tensor], out: torch.Tensor, damage: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._value_cache is not None
        cached = self._value_cache[peer]
        num_changed, num_literals = counts
        if not num_changed:
            out.view(self.format.int_dtype).copy_(cached.view(self.format.int_dtype))
            return
        bits, moves, literals = parts
        words = literals.view(self.format.int_dtype)
        taken = cuda.apply(cached, self.format, BYTE_ESCAPE, bits, moves, words, out, damage).counts()
        damage |= ((taken[0] != num_changed) | (taken[1] != num_literals)).to(torch.int32)

    def seed(self, own: torch.Tensor, peers: Sequence[torch.Tensor]) -> None:
        """Keeps all shards."""
        self._own = own.clone()
        self._value_cache = torch.stack(list(peers)) if peers else own.new_empty(0, self.num_values)

    def forget(self) -> None:
        """Empties both caches."""
        self._own = self._value_cache = self._scan = None


class DeviceExponentBlock(DeviceCodec):
    """`exponent_block`, the paper's codec: block bitmap, sign+mantissa, and the exponents of changed blocks, a byte each."""

    name: ClassVar[str] = "exponent_block"
    num_counts: ClassVar[int] = 2  # changed blocks, and whether the last block is one of them
    coded_parts: ClassVar[tuple[int, ...]] = (2,)

    def __init__(
        self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int, device: torch.device
    ) -> None:
        super().__init__(num_values, dtype, block_size, num_peers, device)
        self.format = FORMATS[dtype]
        self.num_blocks = -(-num_values // block_size)
        self._hash_cache: torch.Tensor | None = None  # int64 [num_blocks, 2]
        self._exp_cache: torch.Tensor | None = None  # uint8 [num_peers, num_blocks * block_size]
        self._found: tuple[torch.Tensor, torch.Tensor] | None = (
            None  # hashes and changed blocks: of count, for compress
        )

    def count(self, values: torch.Tensor) -> torch.Tensor:
        """Hash (paper 3.1)."""
        assert self._hash_cache is not None
        hashes = cuda.hash_blocks(values, self.format, self.block_size)
        changed = (hashes != self._hash_cache).any(dim=1)
        self._found = hashes, changed
        return torch.stack([changed.sum(), changed[-1].to(torch.int64)])

    def part_bytes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Block bitmap, sign+mantissa, exponents. Without a changed block no bitmap."""
        bitmap_bytes = packed_bytes(self.num_blocks, 1) if counts[0] else 0
        return bitmap_bytes, self.format.remainder_bytes(self.num_values), self._num_exponents(counts)

    def compress(self, values: torch.Tensor, counts: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Cmp. Moves the hashes on."""
        found, self._found = self._found, None
        bitmap, plane, exponents = parts
        split_remainder(values, self.format, plane)
        if not counts[0]:
            return
        assert found is not None
        self._hash_cache, changed = found
        bitmap.copy_(pack_bits(changed.view(torch.uint8), 1))
        cuda.take_blocks(values, self.format, self.block_size, _ranks(changed), exponents)

    def decompress(
        self, peer: int, counts: Sequence[int], parts: Sequence[torch.Tensor], out: torch.Tensor, damage: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._exp_cache is not None
        bitmap, plane, exponents = parts
        cached = self._exp_cache[peer]
        if counts[0]:
            changed = unpack_bits(bitmap, self.num_blocks, 1).view(torch.bool)
            cuda.put_blocks(exponents, self.block_size, _ranks(changed), cached)
            is_wrong = (changed.sum() != counts[0]) | (changed[-1].to(torch.int64) != counts[1])
            damage |= is_wrong.to(torch.int32)
        whole = slice(0, self.num_values)
        merge(cached[whole], plane, self.format, self.num_values, whole, out)

    def seed(self, own: torch.Tensor, peers: Sequence[torch.Tensor]) -> None:
        """Hashes the own shard, and keeps the exponents of the others."""
        self._hash_cache = cuda.hash_blocks(own, self.format, self.block_size)
        size = self.num_blocks * self.block_size
        self._exp_cache = torch.zeros(len(peers), size, dtype=torch.uint8, device=self.device)
        for values, cached in zip(peers, self._exp_cache, strict=True):
            cuda.split_planes(values, self.format, cached[: self.num_values])

    def forget(self) -> None:
        """Empties HashCache and ExpCache."""
        self._hash_cache = self._exp_cache = self._found = None

    def _num_exponents(self, counts: Sequence[int]) -> int:
        num_changed, last_changed = counts
        return num_changed * self.block_size - last_changed * (self.num_blocks * self.block_size - self.num_values)


def _ranks(changed: torch.Tensor) -> torch.Tensor:
    """bool [num_blocks] -> int64 [num_blocks]: a changed block's number among the changed ones, -1 for others."""
    return torch.where(changed, changed.cumsum(dim=0) - 1, -1)


DEVICE_CODECS: dict[str, type[DeviceCodec]] = {
    codec.name: codec for codec in (DeviceRaw, DeviceValueDelta, DeviceExponentBlock)
}

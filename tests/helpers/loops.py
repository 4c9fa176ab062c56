"""Gathers of several ranks in this process, for tests of codecs and payloads (fsdp_ciera.gather.loopback)."""

from __future__ import annotations

import torch

from fsdp_ciera.backends.base import Backend
from fsdp_ciera.backends.cpu import CpuBackend, HostEncoded
from fsdp_ciera.backends.cuda import CudaBackend
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.codecs.sections import StoredSection
from fsdp_ciera.gather.layout import Layout
from fsdp_ciera.gather.loopback import Loopback
from fsdp_ciera.kernels import reference_tiles
from fsdp_ciera.kernels.heads import HEAD_BYTES

CPU = CpuBackend(torch.device("cpu"))
TILES = CudaBackend(torch.device("cpu"), reference_tiles)
"""The backend of CUDA, with its kernels in torch."""
BACKENDS = {"cpu": CPU, "tiles": TILES}


def make_loop(
    layout: Layout,
    world_size: int,
    block_size: int = 64,
    *,
    in_place: bool = False,
    backend: Backend = CPU,
    may_go_raw: bool = False,
) -> Loopback:
    """Payloads larger than the shards are sent all the same, unless `may_go_raw`: small shards would test nothing else."""
    loop = Loopback(layout, backend, block_size, world_size, in_place)
    if not may_go_raw:
        for channel in loop.channels:
            channel.raw_payload_bytes = 1 << 24
            channel.room_bytes = 1 << 16
    return loop


def codecs_of(backend: Backend) -> list[str]:
    """Those that run on it."""
    return [name for name in sorted(CODECS) if backend.supports(name, torch.bfloat16)]


def gather(loop: Loopback, shards: torch.Tensor) -> list[int]:
    """One gather of shards [world_size, num_values]; checks every rank's output. -> bytes of each rank's payload."""
    sizes = [loop.announce(rank, shard) for rank, shard in enumerate(shards)]
    outputs = [torch.zeros_like(shards) for _ in shards]
    for channel, output in zip(loop.channels, outputs, strict=True):
        if channel.held is not None:
            output.view(torch.uint8).copy_(channel.held.view(torch.uint8))
    loop.gather(list(shards), outputs)
    for output in outputs:
        assert torch.equal(output.view(torch.uint8), shards.view(torch.uint8))
    for channel in loop.channels:
        assert not channel.damage.any()
    return sizes


def sections_of(loop: Loopback, rank: int, values: torch.Tensor) -> tuple[int, list[StoredSection]]:
    """What a rank would send of its shard -> bytes of the payload, and its sections."""
    num_bytes = loop.announce(rank, values)
    announced = loop.channels[rank].announced
    assert announced is not None and isinstance(announced.encoded, HostEncoded)
    sections, start = [], 0
    for coding, section_bytes in announced.encoded.entries:
        sections.append(StoredSection(coding, announced.encoded.data[start : start + section_bytes]))
        start += section_bytes
    return num_bytes, sections


def data_bytes(loop: Loopback, num_bytes: int) -> int:
    """Of a payload: without head and table."""
    return max(0, num_bytes - HEAD_BYTES - 8 * loop.channels[0].payload_plan.num_sections)

"""`LockstepState`: everything one rank remembers about one stream of gathers, and encode and decode on top of it.

A stream is what the same parameter group sends over the same process group with the same dtype and length; with
`reshard_after_forward=<int>` forward and backward are two streams.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from fsdp_ciera.codecs import CODECS, RunCodec, StoredSection
from fsdp_ciera.codecs.sections import SectionWriter
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.gather.layout import Layout
from fsdp_ciera.gather.payload import TABLE_ENTRY_BYTES, base_of, read_sections, table_start, write_table
from fsdp_ciera.kernels.memory import Bytes, empty_bytes

_MARK_ROOM_BYTES = 64  # what the exchange may put behind a payload without a copy of it


@dataclass(frozen=True)
class Encoded:
    """What a rank sends.

    [Note: One buffer] Fixed parts, table and sections are written once, where they travel from: a buffer with room for the
    largest payload of the layout, so that padding fits behind. Room that was not needed was never touched and takes no
    memory, but for the rest of a huge page; so small payloads are copied out of it.
    """

    room: torch.Tensor
    """uint8 [at least num_bytes]; the payload stands at its beginning."""
    num_bytes: int
    """Length of the payload."""
    run_bytes: tuple[int, ...]
    """Fixed part, table entries and sections of each run, in bytes."""
    num_blocks: int = 0
    num_blocks_reused: int = 0

    @classmethod
    def raw(cls, local: torch.Tensor, layout: Layout) -> Encoded:
        """A layout without codecs sends the shard itself."""
        run_bytes = tuple(run.num_values * layout.dtype.itemsize for run in layout.runs)
        return cls(local.view(torch.uint8), sum(run_bytes), run_bytes)

    def payload(self, padded_bytes: int) -> torch.Tensor:
        """-> uint8 [padded_bytes], zeros behind the payload's `num_bytes`. May be a view that the next call overwrites."""
        payload = self.room[:padded_bytes]
        if len(payload) < padded_bytes:
            payload = torch.from_numpy(empty_bytes(padded_bytes))
            payload[: self.num_bytes] = self.room[: self.num_bytes]
        payload[self.num_bytes :] = 0
        return payload


class LockstepState:
    """Sender and receiver state of one stream of gathers.

    `sequence` counts the gathers that were completed, on all ranks alike. `base` names the gather that the caches describe
    (`fsdp_ciera.gather.payload.base_of`), or is 0 when there is none and the next gather must be a full one.

    [Note: The output is the cache] With `in_place`, codecs that can remember peers by the output that they decoded last: `held`
    keeps it, the next gather should be given the same memory (`CieraAllGather.allocate`), and then only what changed is
    written. FSDP2 copies out of the output and writes nothing but the own slot; an output elsewhere gets a copy first. What it
    costs is the memory of a whole output between gathers, own slot and all. Test: test_codecs.py, decode in place.
    """

    def __init__(self, layout: Layout, block_size: int, world_size: int, rank: int, *, in_place: bool = False) -> None:
        self.layout = layout
        self.world_size = world_size
        self.rank = rank
        self.codecs: tuple[RunCodec, ...] = tuple(
            CODECS[run.codec](run.num_values, layout.dtype, block_size, world_size - 1) for run in layout.runs
        )
        for codec in self.codecs:
            codec.is_in_place = in_place and codec.can_decode_in_place
        self._in_place_runs = [run for run, codec in zip(layout.runs, self.codecs, strict=True) if codec.is_in_place]
        self.held: torch.Tensor | None = None
        """The last output [world_size, num_values], where a codec decodes in place."""
        self._cache_bytes = sum(
            CODECS[run.codec].cache_bytes(run.num_values, layout.dtype, block_size, world_size - 1)
            for run in layout.runs
        )
        self._fixed_bytes = sum(codec.fixed_bytes for codec in self.codecs)
        self._num_sections = sum(codec.num_sections for codec in self.codecs)
        self.sequence = 0
        self.base = 0
        self.checksums: tuple[int, ...] | None = None
        """Every rank's checksum in the last gather: equal again means that no weight changed."""
        self.stage_seconds: dict[str, float] = dict.fromkeys(
            ("Hash", "Cmp", "AllGather", "PreDecmp", "Decmp", "InNode"), 0.0
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of caches held now."""
        return self._cache_bytes if self.base else 0

    @property
    def held_output_bytes(self) -> int:
        """What `held` takes beyond the peers' values that count as caches: the own slot, and runs of other codecs."""
        if self.held is None:
            return 0
        counted = (self.world_size - 1) * sum(run.num_values for run in self._in_place_runs)
        return (self.held.numel() - counted) * self.held.element_size()

    def forget(self) -> None:
        """Drops all caches: the next gather is a full one on all ranks."""
        self.base = 0
        self.checksums = None
        self.held = None
        for codec in self.codecs:
            codec.forget()

    def commit(self, sequence: int, checksums: tuple[int, ...]) -> None:
        """Gather `sequence` is complete: the caches describe it."""
        self.sequence = sequence
        self.base = base_of(sequence, checksums)
        self.checksums = checksums

    def encode(self, local: torch.Tensor) -> Encoded:
        """Hash and Cmp of the own shard [num_values]. Moves the sender state on. Memory: about the payload."""
        _, start = table_start(self._fixed_bytes, self._num_sections)
        room = empty_bytes(start + sum(codec.most_section_bytes for codec in self.codecs) + _MARK_ROOM_BYTES)
        with self.stage("Hash"):
            for run, codec in zip(self.layout.runs, self.codecs, strict=True):
                codec.detect(local[run.start : run.stop])
        sections = SectionWriter(room[start:])
        run_bytes: list[int] = []
        with self.stage("Cmp"):
            position = 0
            for run, codec in zip(self.layout.runs, self.codecs, strict=True):
                written, num_entries = sections.num_bytes, len(sections.entries)
                part = torch.from_numpy(room[position : position + codec.fixed_bytes])
                codec.compress(local[run.start : run.stop], part, sections)
                assert len(sections.entries) == num_entries + codec.num_sections, codec.name
                table_bytes = codec.num_sections * TABLE_ENTRY_BYTES
                run_bytes.append(codec.fixed_bytes + table_bytes + sections.num_bytes - written)
                position += codec.fixed_bytes
        num_bytes = write_table(room, self._fixed_bytes, sections.entries)
        counts = [codec.block_counts for codec in self.codecs]
        return Encoded(
            torch.from_numpy(_fitting(room, num_bytes)),
            num_bytes,
            tuple(run_bytes) if num_bytes else (0,) * len(run_bytes),
            num_blocks=sum(looked_at for looked_at, _ in counts),
            num_blocks_reused=sum(reused for _, reused in counts),
        )

    def prepare(self) -> None:
        """PreDecmp."""
        with self.stage("PreDecmp"):
            for codec in self.codecs:
                codec.prepare()

    def decode(self, payloads: torch.Tensor, num_bytes: Sequence[int], output: torch.Tensor) -> None:
        """Decmp: payloads uint8 [world_size, padded] of `num_bytes` each -> the other ranks' slots of `output`.

        `output` is [world_size, num_values]; the own slot is left alone. Raises `CieraDecodeError` naming the rank whose
        payload is damaged.
        """
        with self.stage("Decmp"):
            self._move_in(output)
            for ranks in (range(self.rank), range(self.rank + 1, self.world_size)):
                if not ranks:
                    continue
                first_peer = ranks.start if ranks.start < self.rank else ranks.start - 1
                try:
                    tables = [
                        read_sections(payloads[r, : num_bytes[r]], self._fixed_bytes, self._num_sections) for r in ranks
                    ]
                    self._decode_ranks(first_peer, payloads[ranks.start : ranks.stop], tables,
                                       output[ranks.start : ranks.stop])  # fmt: skip
                except CieraDecodeError as error:
                    raise CieraDecodeError(
                        f"in the payloads of ranks {ranks.start} to {ranks.stop - 1}: {error}"
                    ) from None

    def _move_in(self, output: torch.Tensor) -> None:
        """Makes `output` hold what was decoded last. See [Note: The output is the cache]."""
        if not self._in_place_runs:
            return
        if self.held is not None and self.held.data_ptr() != output.data_ptr():
            for run in self._in_place_runs:
                for ranks in (slice(0, self.rank), slice(self.rank + 1, None)):
                    output[ranks, run.start : run.stop].copy_(self.held[ranks, run.start : run.stop])
        self.held = output

    def _decode_ranks(
        self,
        first_peer: int,
        payloads: torch.Tensor,
        tables: Sequence[Sequence[StoredSection]],
        output: torch.Tensor,
    ) -> None:
        position = first_section = 0
        for run, codec in zip(self.layout.runs, self.codecs, strict=True):
            last_section = first_section + codec.num_sections
            codec.decompress(
                first_peer,
                payloads[:, position : position + codec.fixed_bytes],
                [table[first_section:last_section] for table in tables],
                output[:, run.start : run.stop],
            )
            position += codec.fixed_bytes
            first_section = last_section

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one of the paper's nodes and names it in a profile."""
        start = time.perf_counter()
        with record_function(f"Ciera::{name}"):
            yield
        self.stage_seconds[name] += time.perf_counter() - start


def _fitting(room: Bytes, num_bytes: int) -> Bytes:
    """`room` itself, or a copy of its first `num_bytes` bytes where they are few. See [Note: One buffer]."""
    return room if 4 * num_bytes > len(room) else room[:num_bytes].copy()

"""Data races by happens-before: barriers order accesses, nothing else does, whatever schedule happened to run.

Every cell of memory (as many bytes as the smallest access so far) keeps its last plain write, and summaries of the plain
reads and of the atomics since. Such a record is one 64-bit word: who (a thread's number in the launch), when by its CTA's
clock (bar.sync) and by its warp's clock (bar.warp.sync), and whether it stands for one thread, several of one warp, of
one CTA, or of several CTAs. Where it stands for several threads of a warp, 32 more bits say which lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .datatypes import Array
from .errors import EmulatorError, LaunchError

THREAD, WARP, CTA, GRID = 1, 2, 3, 4  # what a record stands for; a record of 0 stands for nobody
KIND_BITS, CLOCK_BITS = 3, 17
EPOCH_SHIFT, ID_SHIFT = np.uint64(KIND_BITS + CLOCK_BITS), np.uint64(KIND_BITS + 2 * CLOCK_BITS)
KIND_MASK, CLOCK_MASK = np.uint64((1 << KIND_BITS) - 1), np.uint64((1 << CLOCK_BITS) - 1)
TIME_SHIFT = np.uint64(KIND_BITS)
MAX_THREADS = 1 << (64 - KIND_BITS - 2 * CLOCK_BITS)
LANES = np.arange(32, dtype=np.uint32)


def encode(ids: Array, epochs: Array, times: Array, kinds: Array | np.uint64) -> Array:
    u64 = np.uint64
    words: Array = ids.astype(u64) << ID_SHIFT | epochs.astype(u64) << EPOCH_SHIFT | times.astype(u64) << TIME_SHIFT
    words |= np.asarray(kinds, u64)
    return words


class Clocks:
    """Clocks of the resident CTAs and warps, and what every thread knows of the other lanes of its warp."""

    def __init__(self, ids: Array, cta: Array, warp: Array, lane: Array, block_size: int) -> None:
        if len(ids) and int(ids.max()) >= MAX_THREADS:
            raise LaunchError(f"race checks count up to {MAX_THREADS} threads in a launch")
        self.ids, self.cta, self.warp, self.lane = ids, cta, warp, lane
        self.block_size, self.warps_per_cta = block_size, -(-block_size // 32)
        num_warps = int(warp.max()) + 1
        self.epoch = np.zeros(int(cta.max()) + 1, np.int64)
        self.time = np.zeros(num_warps, np.int64)
        self.known = np.full(
            (num_warps, 32, 32), -1, np.int32
        )  # [warp, lane, other lane]: that lane's time it has seen
        self.records = encode(ids, self.epoch[cta], self.time[warp], np.uint64(THREAD))

    def _renew(self, changed: Array) -> None:
        epochs, times = self.epoch[self.cta[changed]], self.time[self.warp[changed]]
        if max(int(epochs.max()), int(times.max())) > int(CLOCK_MASK):
            raise EmulatorError(f"race checks count up to {int(CLOCK_MASK)} barriers of a CTA in a launch")
        self.records[changed] = encode(self.ids[changed], epochs, times, np.uint64(THREAD))

    def cta_barrier(self, ctas: Array) -> None:
        self.epoch[ctas] += 1
        self._renew(np.flatnonzero(np.isin(self.cta, ctas)))

    def warp_barrier(self, threads: Array, masks: Array) -> None:
        """All of these threads meet those that their mask names."""
        warps = np.unique(self.warp[threads])
        met = np.zeros((len(self.time), 32), np.uint32)
        met[self.warp[threads], self.lane[threads]] = masks
        for mask in np.unique(masks):
            named = (mask >> LANES & np.uint32(1)).astype(np.bool_)
            of_mask = met[warps] == mask
            group = warps[of_mask.any(1)]
            arrived = (met[group] == mask) & named
            seen = np.where(arrived[:, :, None], self.known[group], -1).max(1)  # [warp of the group, other lane]
            seen = np.where(arrived, self.time[group][:, None], seen)
            self.known[group] = np.where(arrived[:, :, None], seen[:, None, :], self.known[group])
        self.time[warps] += 1
        self._renew(np.flatnonzero(np.isin(self.warp, warps)))

    def unordered(self, records: Array, lanes: Array | None, threads: Array) -> npt.NDArray[np.bool_]:
        """Whether somebody in the record is not ordered before the thread now. One record a thread."""
        result = np.zeros(len(records), np.bool_)
        present = np.flatnonzero((records != 0) & (records != self.records[threads]))
        if len(present) == 0:
            return result
        records, threads = records[present], threads[present]
        kinds = records & KIND_MASK
        ids = (records >> ID_SHIFT).astype(np.int64)
        mine = self.ids[threads]
        same_cta = (ids // self.block_size == mine // self.block_size) & (kinds != GRID)
        ordered = (kinds == THREAD) & (ids == mine)
        epochs = (records >> EPOCH_SHIFT & CLOCK_MASK).astype(np.int64)
        ordered |= same_cta & (epochs < self.epoch[self.cta[threads]])
        in_cta = ids % self.block_size
        maybe = np.flatnonzero(
            ~ordered & same_cta & (kinds <= WARP) & (in_cta // 32 == mine % self.block_size // 32)
        )  # same warp, no bar.sync in between
        if len(maybe):
            times = (records[maybe] >> TIME_SHIFT & CLOCK_MASK).astype(np.int64)
            observer = threads[maybe]
            who = np.uint32(1) << (in_cta[maybe] % 32).astype(np.uint32)
            if lanes is not None:
                who = np.where(kinds[maybe] == WARP, lanes[present][maybe], who)
            unknown = self.known[self.warp[observer], self.lane[observer]] < times[:, None]  # [access, other lane]
            unknown &= (who[:, None] >> LANES & np.uint32(1)).astype(np.bool_)
            ordered[maybe] = ~unknown.any(1)
        result[present] = ~ordered
        return result


@dataclass
class Conflict:
    """One access that races: its place among the accesses checked, and a sentence on the other side."""

    access: int
    message: str


class Summary:
    """Who has read a cell (or used it atomically) since it was written."""

    def __init__(self, num_cells: int) -> None:
        self.records = np.zeros(num_cells, np.uint64)
        self.lanes = np.zeros(num_cells, np.uint32)

    def repeat(self, times: int) -> None:
        self.records, self.lanes = self.records.repeat(times), self.lanes.repeat(times)

    def clear(self, cells: Array) -> None:
        self.records[cells] = 0

    def add(self, clocks: Clocks, cells: Array, threads: Array) -> None:
        mine = clocks.records[threads]
        old = self.records[cells]
        todo = old != mine
        if not todo.any():
            return
        taken = np.flatnonzero(todo & (old != 0))
        slow: Array = np.zeros(0, np.int64)
        if len(taken):
            records, kinds = old[taken], old[taken] & KIND_MASK
            ids = (records >> ID_SHIFT).astype(np.int64)
            same_cta = ids // clocks.block_size == clocks.ids[threads[taken]] // clocks.block_size
            same_epoch = (records ^ mine[taken]) >> EPOCH_SHIFT & CLOCK_MASK == 0
            covered = (kinds == GRID) | ((kinds == CTA) & same_cta & same_epoch)
            together = ~covered & clocks.unordered(records, self.lanes[cells[taken]], threads[taken])
            slow = taken[together]
            todo[taken[covered | together]] = False
        fast = np.flatnonzero(todo)
        self.records[cells[fast]] = mine[fast]
        self.lanes[cells[fast]] = np.uint32(1) << clocks.lane[threads[fast]].astype(np.uint32)
        overwritten = fast[self.records[cells[fast]] != mine[fast]]  # several threads of this very instruction
        if len(slow) or len(overwritten):
            self._merge(clocks, *self._with_present(clocks, cells, threads, np.concatenate([slow, overwritten])))

    def _with_present(self, clocks: Clocks, cells: Array, threads: Array, chosen: Array) -> tuple[Array, Array, Array]:
        """(cells, records, lanes) of the chosen accesses, followed by what their cells hold."""
        cells, threads = cells[chosen], threads[chosen]
        present = np.unique(cells)
        present = present[self.records[present] != 0]
        lanes = np.uint32(1) << clocks.lane[threads].astype(np.uint32)
        return (
            np.concatenate([cells, present]),
            np.concatenate([clocks.records[threads], self.records[present]]),
            np.concatenate([lanes, self.lanes[present]]),
        )

    def _merge(self, clocks: Clocks, cells: Array, records: Array, lanes: Array) -> None:
        """One record per cell that stands for all of its records here."""
        order = np.argsort(cells, kind="stable")
        cells, records, lanes = cells[order], records[order], lanes[order]
        starts = np.flatnonzero(np.concatenate([[True], cells[1:] != cells[:-1]]))
        ids = (records >> ID_SHIFT).astype(np.int64)
        cta = ids // clocks.block_size
        warp = cta * clocks.warps_per_cta + ids % clocks.block_size // 32
        kind = np.maximum.reduceat((records & KIND_MASK).astype(np.int64), starts)
        for numbers, level in ((ids, WARP), (warp, CTA), (cta, GRID)):
            differ = np.minimum.reduceat(numbers, starts) != np.maximum.reduceat(numbers, starts)
            kind = np.where(differ, np.maximum(kind, level), kind)
        epochs = np.maximum.reduceat(records >> EPOCH_SHIFT & CLOCK_MASK, starts)
        times = np.maximum.reduceat(records >> TIME_SHIFT & CLOCK_MASK, starts)
        self.records[cells[starts]] = encode(ids[starts], epochs, times, kind)
        self.lanes[cells[starts]] = np.bitwise_or.reduceat(lanes, starts)


class RaceShadow:
    """The accesses to one region during one launch."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.cell_bytes = 16
        self.writes = np.zeros(num_bytes // 16, np.uint64)
        self.reads = Summary(num_bytes // 16)
        self.atomics: Summary | None = None

    def _cells(self, positions: Array, size: int, threads: Array) -> tuple[Array, Array, int]:
        """(cells, threads, cells per access), refining the cells first if an access is smaller than they are."""
        if size < self.cell_bytes:
            times = self.cell_bytes // size
            self.writes = self.writes.repeat(times)
            for summary in (self.reads, self.atomics):
                if summary is not None:
                    summary.repeat(times)
            self.cell_bytes = size
        each = size // self.cell_bytes
        cells = positions // self.cell_bytes
        if each == 1:
            return cells, threads, 1
        return (cells[:, None] + np.arange(each)).reshape(-1), threads.repeat(each), each

    def _conflict(self, clocks: Clocks, records: Array, lanes: Array | None, threads: Array) -> tuple[int, str] | None:
        if not records.any():
            return None
        bad = np.flatnonzero(clocks.unordered(records, lanes, threads))
        if len(bad) == 0:
            return None
        first = int(bad[0])
        record = int(records[first])
        cta, thread = divmod(record >> int(ID_SHIFT), clocks.block_size)
        several = "" if record & int(KIND_MASK) == THREAD else " and others"
        return first, f"CTA {cta}, thread {thread}{several}"

    def check(self, kind: str, clocks: Clocks, positions: Array, size: int, threads: Array) -> Conflict | None:
        """Checks accesses of one instruction, one a thread, and records them. Kinds: read, write, atomic."""
        cells, threads, each = self._cells(positions, size, threads)
        earlier: list[tuple[str, Array, Array | None]] = [("write", self.writes[cells], None)]
        if kind != "read":
            earlier.append(("read", self.reads.records[cells], self.reads.lanes[cells]))
        if kind != "atomic" and self.atomics is not None:
            earlier.append(("atomic", self.atomics.records[cells], self.atomics.lanes[cells]))
        for name, records, lanes in earlier:
            if found := self._conflict(clocks, records, lanes, threads):
                return Conflict(found[0] // each, f"race: {kind} after an unordered {name} by {found[1]},")
        if kind == "read":
            self.reads.add(clocks, cells, threads)
        elif kind == "atomic":
            if self.atomics is None:
                self.atomics = Summary(len(self.writes))
            self.atomics.add(clocks, cells, threads)
        else:
            mine = clocks.records[threads]
            self.writes[cells] = mine
            lost = np.flatnonzero(self.writes[cells] != mine)
            if len(lost):
                return Conflict(int(lost[0]) // each, "race: two threads write in one instruction,")
            self.reads.clear(cells)  # ordered before this write, which stands for them from now on
            if self.atomics is not None:
                self.atomics.clear(cells)
        return None

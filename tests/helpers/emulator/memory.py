"""Memory as regions with exact bounds, and what is known about every byte: initialised, written, read as read-only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .datatypes import UNSIGNED, Array
from .errors import EmulatorError, OutOfBounds, UninitialisedRead
from .races import RaceShadow

# Addresses start above everything that user space can have, so that host addresses can be mapped beside these.
DEVICE_BASE = 1 << 52
SHARED_WINDOW = 1 << 53  # generic addresses of shared memory; ld.shared itself takes offsets from 0
LOCAL_WINDOW = 1 << 54
ALIGNMENT = 256
DEVICE_GAP = 1 << 20  # red zone behind an allocation; addresses cost nothing
POISON = 0xCD

INITIALISED, WRITTEN, READ_ONLY_READ, FORBIDDEN = 1, 2, 4, 8


def repeated(flag: int, num_bytes: int) -> int:
    """The flag in every byte of a word."""
    return int.from_bytes(bytes([flag]) * num_bytes, "little")


class Region:
    """Consecutive bytes from an address on. Positions count from the address rounded down to 16."""

    def __init__(
        self,
        start: int,
        num_bytes: int,
        state: int,
        host: npt.NDArray[np.uint8] | None = None,
        read_only: bool = False,
    ) -> None:
        self.start, self.num_bytes, self.read_only = start, num_bytes, read_only
        self.lead = start % 16
        padded = (self.lead + num_bytes + 15) // 16 * 16
        self.host = host
        self.data: npt.NDArray[np.uint8] = np.full(padded, POISON, np.uint8) if host is None else host
        self.state: npt.NDArray[np.uint8] = np.full(padded, state, np.uint8)
        self.shadow: RaceShadow | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    def read(self, positions: Array, num_bytes: int) -> Array:
        """Unsigned words of that size."""
        if self.host is None:
            words: Array = self.data.view(UNSIGNED[8 * num_bytes])[positions // num_bytes]
        else:
            words = self._host_words(num_bytes)[positions - self.lead]
        return words

    def write(self, positions: Array, values: Array) -> None:
        num_bytes = values.dtype.itemsize
        if self.host is None:
            self.data.view(values.dtype)[positions // num_bytes] = values
        else:
            self._host_words(num_bytes)[positions - self.lead] = values

    def _host_words(self, num_bytes: int) -> Array:
        """One word at every byte of the host array, which may begin and end anywhere."""
        count = self.num_bytes - num_bytes + 1
        return np.ndarray((count,), UNSIGNED[8 * num_bytes], self.data, strides=(1,))

    def states(self, positions: Array, num_bytes: int) -> Array:
        """The bytes' flags, as words of that size."""
        words: Array = self.state.view(UNSIGNED[8 * num_bytes])[positions // num_bytes]
        return words

    def set_states(self, positions: Array, num_bytes: int, states: Array | int) -> None:
        self.state.view(UNSIGNED[8 * num_bytes])[positions // num_bytes] = states

    def begin_launch(self) -> None:
        self.state &= INITIALISED | FORBIDDEN
        self.shadow = None

    def race_shadow(self) -> RaceShadow:
        if self.shadow is None:
            self.shadow = RaceShadow(len(self.state))
        return self.shadow


class Memory:
    """Global and constant memory: allocations of the machine and mapped host buffers."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.starts: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.next_address = DEVICE_BASE

    def allocate(self, num_bytes: int, initial: bytes | None = None, read_only: bool = False) -> int:
        if num_bytes < 0:
            raise EmulatorError(f"allocation of {num_bytes} bytes")
        state = 0 if initial is None else INITIALISED
        region = Region(self.next_address, num_bytes, state, read_only=read_only)
        if initial is not None:
            region.data[:num_bytes] = np.frombuffer(initial, np.uint8)
        self.next_address = -(-(region.end + DEVICE_GAP) // ALIGNMENT) * ALIGNMENT
        self._add(region)
        return region.start

    def map_host(self, view: npt.NDArray[np.uint8], address: int) -> None:
        if view.dtype != np.uint8 or view.ndim != 1 or not view.flags.c_contiguous:
            raise EmulatorError("a host buffer is mapped as a flat contiguous uint8 array")
        region = Region(address, len(view), INITIALISED, host=view)
        if not 0 < address <= region.end <= DEVICE_BASE:
            raise EmulatorError(f"host address 0x{address:x}")
        for other in self.regions:
            if region.start < other.end and other.start < region.end:
                raise EmulatorError(f"0x{address:x} + {len(view)} overlaps what is mapped at 0x{other.start:x}")
        self._add(region)

    def release(self, address: int) -> None:
        """Later accesses there are out of bounds."""
        self._set([r for r in self.regions if r is not self.region_at(address)])

    def region_at(self, address: int) -> Region:
        for region in self.regions:
            if region.start == address:
                return region
        raise EmulatorError(f"nothing begins at 0x{address:x}")

    def _add(self, region: Region) -> None:
        self._set(sorted([*self.regions, region], key=lambda r: (r.start, r.num_bytes)))

    def _set(self, regions: list[Region]) -> None:
        self.regions = regions
        self.starts = np.array([r.start for r in regions], np.uint64)

    def begin_launch(self) -> None:
        for region in self.regions:
            region.begin_launch()

    def span(self, address: int, num_bytes: int) -> tuple[Region, slice]:
        """The region of these bytes, and where they are in its state."""
        index = bisect_right(self.starts.tolist(), address) - 1
        region = self.regions[index] if index >= 0 else None
        if region is None or address < region.start or address + num_bytes > region.end:
            raise OutOfBounds(f"{num_bytes} bytes are not inside one buffer", address=address)
        first = address - region.start + region.lead
        return region, slice(first, first + num_bytes)

    def initialised(self, address: int, num_bytes: int) -> npt.NDArray[np.bool_]:
        region, where = self.span(address, num_bytes)
        return (region.state[where] & INITIALISED).astype(np.bool_)

    def load(self, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A copy; raises at the first byte that nobody wrote."""
        region, where = self.span(address, num_bytes)
        missing = np.flatnonzero(region.state[where] & INITIALISED == 0)
        if len(missing):
            text = f"{len(missing)} of {num_bytes} bytes from 0x{address:x} on were never written; the first is number"
            raise UninitialisedRead(f"download: {text} {missing[0]}", address=address + int(missing[0]))
        return region.data[address - region.start :][:num_bytes].copy()

    def find(self, addresses: Array, size: int) -> Iterator[tuple[Region | None, Array | None]]:
        """Regions that hold these accesses and which of them each holds (None: all); no region if out of bounds."""
        low, high = int(addresses.min()), int(addresses.max())
        index = int(np.searchsorted(self.starts, np.uint64(low), "right")) - 1
        if index >= 0 and high + size <= self.regions[index].end:
            yield self.regions[index], None
            return
        indices = np.searchsorted(self.starts, addresses, "right") - 1
        for index in np.unique(indices):
            chosen = indices == index
            region = self.regions[index] if index >= 0 else None
            if region is None:
                yield None, np.flatnonzero(chosen)
                continue
            outside = chosen & (addresses > np.uint64(max(0, region.end - size)))
            if outside.any():
                yield None, np.flatnonzero(outside)
            yield region, np.flatnonzero(chosen & ~outside)

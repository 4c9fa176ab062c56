"""What ran: instructions, both outcomes of every branch, 32-byte sectors per request, shared-memory bank conflicts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .datatypes import Array
from .parse import Instruction, Kernel

SECTOR_BYTES, BANKS, BANK_BYTES = 32, 32, 4
Counts = npt.NDArray[np.int64]


class KernelCoverage:
    """Counts over all launches of one kernel on one machine; arrays have one entry per instruction."""

    def __init__(self, kernel: Kernel) -> None:
        self.instructions = kernel.instructions
        number = len(kernel.instructions)
        self.executions: Counts = np.zeros(number, np.int64)  # threads that executed it (a false guard is no execution)
        self.taken: Counts = np.zeros(number, np.int64)
        self.not_taken: Counts = np.zeros(number, np.int64)
        self.requests: Counts = np.zeros(number, np.int64)  # warps that accessed memory there, each time
        self.sectors: Counts = np.zeros(number, np.int64)  # of global memory, in all of its requests
        self.bytes: Counts = np.zeros(number, np.int64)
        self.extra_cycles: Counts = np.zeros(number, np.int64)  # of shared memory, from bank conflicts

    @property
    def total(self) -> int:
        return len(self.instructions)

    @property
    def executed(self) -> int:
        return int(np.count_nonzero(self.executions))

    @property
    def missed(self) -> list[Instruction]:
        return [i for i, n in zip(self.instructions, self.executions, strict=True) if not n]

    @property
    def one_sided(self) -> list[Instruction]:
        """Conditional branches that always, or never, went the same way, or did not run."""
        branches = zip(self.instructions, self.taken, self.not_taken, strict=True)
        return [i for i, yes, no in branches if i.opcode == "bra" and i.guard is not None and not (yes and no)]

    def efficiency(self, index: int) -> float:
        """Bytes asked for, over the bytes of the sectors that hold them; above 1 where threads share bytes."""
        return float(self.bytes[index] / max(1, self.sectors[index] * SECTOR_BYTES))

    def count_sectors(self, index: int, warps: Array, positions: Array, size: int) -> None:
        """An aligned access of up to 16 bytes lies in one sector."""
        self._count_requests(index, warps, size)
        keys = (warps << 40) + positions // SECTOR_BYTES
        self.sectors[index] += count_distinct(keys)

    def count_bank_conflicts(self, index: int, warps: Array, offsets: Array, size: int) -> None:
        self._count_requests(index, warps, size)
        if size > BANK_BYTES:
            return
        keys = np.unique((warps << 32) + offsets // BANK_BYTES)
        per_bank = np.bincount((keys >> 32) * BANKS + keys % BANKS).astype(np.int64)
        worst = np.pad(per_bank, (0, -len(per_bank) % BANKS)).reshape(-1, BANKS).max(1)
        self.extra_cycles[index] += int((worst - (worst > 0)).sum())

    def _count_requests(self, index: int, warps: Array, size: int) -> None:
        self.requests[index] += count_distinct(warps)
        self.bytes[index] += len(warps) * size

    def report(self) -> str:
        lines = [f"{self.executed} of {self.total} instructions executed"]
        lines += [f"  never executed: line {i.line}: {i.text}" for i in self.missed]
        for i in self.one_sided:
            lines.append(f"  one-sided branch: line {i.line}: {i.text}")
        for index in np.flatnonzero(self.requests).tolist():
            i, requests = self.instructions[index], self.requests[index]
            if self.sectors[index]:
                text = (
                    f"{self.sectors[index] / requests:.2f} sectors a request, efficiency {self.efficiency(index):.2f}"
                )
            else:
                text = f"{self.extra_cycles[index] / requests:.2f} extra cycles a request"
            lines.append(f"  {text}: line {i.line}: {i.text}")
        return "\n".join(lines)


def count_distinct(keys: Array) -> int:
    steps = np.diff(keys)
    if (steps < 0).any():
        steps = np.diff(np.sort(keys))
    return 1 + int(np.count_nonzero(steps))

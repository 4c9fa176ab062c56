"""The threads that are resident at once: registers, and the schedule with its barriers.

Threads at one program counter execute together, whatever warp or CTA they belong to. Without a seed the lowest program
counter goes first, so that branches meet again; with one, who goes on and for how long is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from .code import CtaBarrier, KernelCode
from .coverage import KernelCoverage
from .datatypes import UNSIGNED, Array, Select
from .errors import Deadlock, DivergentBarrier, Fault, InvalidMask, StepLimit
from .memory import FORBIDDEN, Memory, Region
from .parse import Instruction
from .races import Clocks
from .warp import WarpOperation, mask_bits

ALL = slice(None)
REGISTER_POISON = 0xDEADBEEFDEADBEEF  # what a register holds before it is written
LONGEST_TURN = 12  # instructions that one group executes at most before the next draw


@dataclass(frozen=True)
class Shape:
    """Grid and block of a launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def num_ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def block_size(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


class Batch:
    """Some CTAs of a launch, run to their end."""

    def __init__(
        self,
        code: KernelCode,
        shape: Shape,
        ctas: Array,
        parameters: npt.NDArray[np.uint8],
        memory: Memory,
        symbols: dict[str, int],
        coverage: KernelCoverage,
        *,
        dynamic_shared: int,
        check_races: bool,
        measure: bool,
        random: np.random.Generator | None,
        max_steps: int,
    ) -> None:
        self.code, self.shape, self.parameters = code, shape, parameters
        self.memory, self.symbols, self.coverage = memory, symbols, coverage
        self.check_races, self.measure, self.random, self.max_steps = check_races, measure, random, max_steps
        size = shape.block_size
        self.num_threads = size * len(ctas)
        self.threads = np.arange(self.num_threads)
        in_cta = self.threads % size
        self.cta = self.threads // size  # among the resident ones
        self.cta_number = ctas.astype(np.int64)[self.cta]
        warps_per_cta = -(-size // 32)
        self.warp = self.cta * warps_per_cta + in_cta // 32
        self.lane = (in_cta % 32).astype(np.uint32)
        self.lane_bit = np.uint32(1) << self.lane
        self.num_warps = warps_per_cta * len(ctas)
        self.special = self._special_registers(in_cta)
        self.registers = [
            np.zeros(self.num_threads, np.bool_)
            if kind.kind == "pred"
            else np.full(self.num_threads, REGISTER_POISON & ((1 << kind.bits) - 1), UNSIGNED[kind.bits])
            for kind in code.kernel.registers.values()
        ]
        self.clocks = Clocks(self.cta_number * size + in_cta, self.cta, self.warp, self.lane, size)
        self._make_shared(len(ctas), dynamic_shared)
        self.local_stride = -(-code.local_bytes // 16) * 16
        self.local = Region(0, self.local_stride * self.num_threads, 0)

        self.ready: dict[int, list[Array]] = {0: [self.threads]}
        self.at_barrier: list[tuple[int, Array]] = []
        self.at_warp_operation: dict[int, Array] = {}
        self.exited = np.zeros(self.num_threads, np.bool_)
        self.lanes_of_warp = self.lanes_present(self.threads)  # fewer in a CTA's last warp
        self.steps = self.thread_steps = 0

    def _special_registers(self, in_cta: Array) -> dict[str, Array]:
        (gx, gy, gz), (bx, by, bz) = self.shape.grid, self.shape.block
        one = np.uint32(1)
        numbers = {
            "%tid.x": in_cta % bx, "%tid.y": in_cta // bx % by, "%tid.z": in_cta // (bx * by),
            "%ctaid.x": self.cta_number % gx, "%ctaid.y": self.cta_number // gx % gy,
            "%ctaid.z": self.cta_number // (gx * gy),
            "%laneid": self.lane, "%warpid": in_cta // 32,
            "%lanemask_eq": one << self.lane, "%lanemask_lt": (one << self.lane) - one,
        }  # fmt: skip
        numbers["%lanemask_le"] = numbers["%lanemask_eq"] | numbers["%lanemask_lt"]
        numbers["%lanemask_gt"], numbers["%lanemask_ge"] = ~numbers["%lanemask_le"], ~numbers["%lanemask_lt"]
        sizes = {"%ntid.x": bx, "%ntid.y": by, "%ntid.z": bz, "%nctaid.x": gx, "%nctaid.y": gy, "%nctaid.z": gz}
        numbers |= {name: np.full(self.num_threads, n) for name, n in (sizes | {"WARP_SZ": 32}).items()}
        return {name: values.astype(np.uint32) for name, values in numbers.items()}

    def _make_shared(self, num_ctas: int, dynamic: int) -> None:
        """Every CTA's variables with red zones between them, the dynamic part last."""
        start = self.code.dynamic_offset
        self.shared_stride = -(-(start + dynamic) // 16) * 16
        self.shared = Region(0, self.shared_stride * num_ctas, FORBIDDEN)
        state = self.shared.state.reshape(num_ctas, -1) if self.shared_stride else self.shared.state.reshape(0, 0)
        for first, num_bytes in [*self.code.shared_spans, (start, dynamic)]:
            state[:, first : first + num_bytes] = 0

    # what operations use

    def index(self, select: Select) -> Array:
        """Thread numbers."""
        return self.threads if isinstance(select, slice) else select

    def lanes_present(self, threads: Array) -> Array:
        """By warp: a bit for every lane among the threads."""
        return np.bincount(self.warp[threads], self.lane_bit[threads], self.num_warps).astype(np.uint32)

    def fault(
        self, kind: type[Fault], message: str, instruction: Instruction, thread: int, address: int | None = None
    ) -> NoReturn:
        raise kind(
            message,
            kernel=self.code.kernel.name,
            line=instruction.line,
            text=instruction.text,
            cta=int(self.cta_number[thread]),
            thread=thread % self.shape.block_size,
            address=address,
        )

    # the schedule

    def run(self) -> None:
        while self.ready:
            counters = self.ready.keys()
            counter = min(counters)
            if self.random is not None and self.random.random() < 0.5:
                counter = int(self.random.choice(list(counters)))
            groups = self.ready.pop(counter)
            threads = groups[0] if len(groups) == 1 else np.sort(np.concatenate(groups))
            if self.random is None:
                others = [c for c in self.ready if c > counter]
                self._advance(counter, threads, min(others, default=len(self.code.operations) + 1) - counter)
            else:
                if self.random.random() < 0.25:  # only some of the warps go on
                    chosen = self.random.random(self.num_warps) < 0.5
                    going = chosen[self.warp[threads]]
                    if going.any() and not going.all():
                        self._put(counter, threads[~going])
                        threads = threads[going]
                self._advance(counter, threads, int(self.random.integers(1, LONGEST_TURN)))
        if not self.exited.all():
            self._report_deadlock()

    def _put(self, counter: int, threads: Array) -> None:
        if len(threads):
            self.ready.setdefault(counter, []).append(threads)

    def _advance(self, first: int, threads: Array, turn: int) -> None:
        """Up to `turn` instructions, ending early at a jump or where threads wait."""
        operations, coverage = self.code.operations, self.coverage
        for counter in range(first, first + turn):
            if counter >= len(operations):
                self._exit(threads)
                return
            self.steps += 1
            self.thread_steps += len(threads)
            if self.steps > self.max_steps:
                self.fault(StepLimit, f"{self.steps} steps", self.code.instruction(counter), int(threads[0]))
            active, passive, guard = threads, threads[:0], self.code.guards[counter]
            if guard is not None:
                true = self.registers[guard[0]][threads] != guard[1]
                if not true.all():
                    active, passive = threads[true], threads[~true]
            operation = operations[counter]
            coverage.executions[counter] += len(active)
            if callable(operation):
                if len(active):
                    operation(self, active if len(active) != self.num_threads else ALL)
            elif isinstance(operation, int):
                coverage.executions[counter] += len(passive)
                coverage.taken[counter] += len(active)
                coverage.not_taken[counter] += len(passive)
                self._put(operation, active)
                self._put(counter + 1, passive)
                return
            elif operation is None:
                if len(active):
                    self._exit(active)
                threads = passive
                if len(threads) == 0:
                    return
            elif len(active):
                self._put(counter + 1, passive)
                if isinstance(operation, WarpOperation):
                    going = self._meet_in_warp(counter, operation, active)
                    self._put(counter + 1, going)
                else:
                    self.at_barrier.append((counter, active))
                    self._release_barriers()
                return
        self._put(first + turn, threads)

    def _exit(self, threads: Array) -> None:
        self.exited[threads] = True
        self._release_barriers()  # which finds those that wait for these

    def _meet_in_warp(self, counter: int, operation: WarpOperation, threads: Array) -> Array:
        """Lets the operation happen for the threads whose masks are complete, and gives these; others wait.

        Stricter than PTX: an exited lane is waited for too (in vain), and lanes have to meet at one instruction."""
        if counter in self.at_warp_operation:
            threads = np.sort(np.concatenate([threads, self.at_warp_operation.pop(counter)]))
        masks = np.broadcast_to(operation.mask(self, threads), threads.shape)
        warps, lanes, instruction = self.warp[threads], self.lane[threads], self.code.instruction(counter)
        outside = np.flatnonzero(masks >> lanes & np.uint32(1) == 0)
        if len(outside):
            self.fault(InvalidMask, "the membermask excludes its own lane,", instruction, int(threads[outside[0]]))
        present = self.lanes_present(threads)[warps]
        complete = masks & self.lanes_of_warp[warps] & ~present == 0
        if not complete.all():
            self.at_warp_operation[counter] = threads[~complete]
            threads, masks, warps, lanes = threads[complete], masks[complete], warps[complete], lanes[complete]
        if len(threads) == 0:
            return threads
        if (masks != masks[0]).any():
            by_lane = np.zeros((self.num_warps, 32), np.uint32)
            by_lane[warps, lanes] = masks
            others = by_lane[warps]  # [thread, lane of its warp]
            differ = np.flatnonzero((mask_bits(masks) & (others != masks[:, None]) & (others != 0)).any(1))
            if len(differ):
                self.fault(InvalidMask, "lanes meet with different membermasks,", instruction, int(threads[differ[0]]))
        operation.run(self, threads, masks)
        return threads

    def _release_barriers(self) -> None:
        """Lets go the CTAs of which every thread waits at one bar.sync."""
        if not self.at_barrier:
            return
        waiting = np.concatenate([threads for _, threads in self.at_barrier])
        counters = np.concatenate([np.full(len(threads), counter) for counter, threads in self.at_barrier])
        num_ctas = len(self.cta) // self.shape.block_size
        arrived = np.bincount(self.cta[waiting], minlength=num_ctas)
        exited = np.bincount(self.cta[self.exited], minlength=num_ctas)
        complete = (arrived > 0) & (arrived + exited == self.shape.block_size)
        if not complete.any():
            return
        going = complete[self.cta[waiting]]
        waiting, counters = waiting[going], counters[going]
        self._check_barriers(waiting, counters, exited)
        for counter in np.unique(counters).tolist():
            threads = np.sort(waiting[counters == counter])
            operation = self.code.operations[counter]
            assert isinstance(operation, CtaBarrier)
            if operation.reduce is not None:
                operation.reduce(self, threads)
            self._put(counter + 1, threads)
        if self.check_races:
            self.clocks.cta_barrier(np.flatnonzero(complete))
        kept = [(counter, threads[~complete[self.cta[threads]]]) for counter, threads in self.at_barrier]
        self.at_barrier = [(counter, threads) for counter, threads in kept if len(threads)]

    def _check_barriers(self, waiting: Array, counters: Array, exited: Array) -> None:
        """The threads of whole CTAs, less the exited ones, wait at these counters."""
        gone = np.flatnonzero(exited[self.cta[waiting]])
        if len(gone):
            thread = int(waiting[gone[0]])
            message = f"{exited[self.cta[thread]]} threads of the CTA have exited and will not reach this barrier,"
            self.fault(DivergentBarrier, message, self.code.instruction(int(counters[gone[0]])), thread)
        lowest, highest = np.full(len(exited), len(self.code.operations)), np.zeros(len(exited), np.int64)
        np.minimum.at(lowest, self.cta[waiting], counters)
        np.maximum.at(highest, self.cta[waiting], counters)
        divergent = np.flatnonzero((lowest < highest)[self.cta[waiting]])
        if len(divergent):
            thread = int(waiting[divergent[0]])
            lines = [self.code.instruction(int(c[self.cta[thread]])).line for c in (lowest, highest)]
            message = f"threads of one CTA wait at different barriers, lines {lines[0]} and {lines[1]},"
            self.fault(DivergentBarrier, message, self.code.instruction(int(counters[divergent[0]])), thread)

    def _report_deadlock(self) -> NoReturn:
        waiting = [*self.at_barrier, *self.at_warp_operation.items()]
        counter, threads = min(waiting, key=lambda entry: entry[0])
        lines = sorted({self.code.instruction(c).line for c, _ in waiting})
        message = f"deadlock: threads wait for others that never come, at lines {lines},"
        self.fault(Deadlock, message, self.code.instruction(counter), int(threads[0]))

"""Kernels ready to run: one operation per instruction, checked when the module is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .datatypes import TYPES, Array
from .execute import decode
from .operands import Decoder, Operation, Scope, parse_number
from .parse import RED_ZONE, Instruction, Kernel, Param, Variable, parse
from .warp import WarpOperation, decode_warp

if TYPE_CHECKING:
    from .batch import Batch

BARRIERS = [("sync",), ("cta", "sync"), ("sync", "aligned"), ("cta", "sync", "aligned")]
BARRIER_REDUCTIONS = ("popc", "and", "or")


@dataclass
class CtaBarrier:
    """reduce, if any, is called with all threads of a CTA when they meet, for several CTAs at once."""

    reduce: Callable[[Batch, Array], None] | None


# A computation, a wait for other threads, a jump (the target's place) or an exit (None).
Executable = Operation | WarpOperation | CtaBarrier | int | None


class KernelCode:
    """A kernel's operations, guards (register slot, value that prevents) and layout of memory."""

    def __init__(self, kernel: Kernel, module_variables: list[Variable]) -> None:
        self.kernel = kernel
        own = Kernel(kernel.name, [], variables=[*module_variables, *kernel.variables])
        shared, self.shared_bytes = own.layout("shared", RED_ZONE)
        local, self.local_bytes = kernel.layout("local")
        sizes = {v.name: v.num_bytes for v in own.variables}
        self.shared_spans = [(offset, sizes[name]) for name, offset in shared.items()]
        self.dynamic_offset = -(-(self.shared_bytes + RED_ZONE) // 128) * 128 if shared else 0
        dynamic = {v.name: self.dynamic_offset for v in own.variables if v.space == "shared" and not v.num_bytes}
        self.dynamic_shared = bool(dynamic)
        self.variable_bytes = sum(num_bytes for _, num_bytes in self.shared_spans)
        in_module = {v.name for v in module_variables if v.space in ("global", "const")}
        scope = Scope(kernel, in_module, shared | dynamic | local)
        decoders = [Decoder(scope, instruction, index) for index, instruction in enumerate(kernel.instructions)]
        self.operations = [self._executable(decoder) for decoder in decoders]
        self.guards = [self._guard(decoder) for decoder in decoders]

    def instruction(self, counter: int) -> Instruction:
        return self.kernel.instructions[counter]

    @staticmethod
    def _guard(decoder: Decoder) -> tuple[int, bool] | None:
        name = decoder.instruction.guard
        if name is None:
            return None
        if decoder.scope.kernel.registers.get(name) != TYPES["pred"]:
            decoder.refuse(f"guard {name}")
        return decoder.scope.slots[name], decoder.instruction.negated

    def _executable(self, decoder: Decoder) -> Executable:
        opcode, modifiers = decoder.instruction.opcode, decoder.modifiers
        if opcode == "bra":
            decoder.allow("uni")
            if decoder.operands[0] not in self.kernel.labels:
                decoder.refuse("target")
            return self.kernel.labels[decoder.operands[0]]
        if opcode in ("ret", "exit"):
            decoder.allow("uni")
            return None
        if opcode in ("bar", "barrier") and modifiers[:1] != ("warp",):
            return decode_barrier(decoder)
        if opcode in ("shfl", "vote", "redux", "bar", "barrier"):
            return decode_warp(decoder)
        return decode(decoder)


def decode_barrier(decoder: Decoder) -> CtaBarrier:
    """bar.sync and bar.red of a whole CTA, on barrier 0. Barriers of part of a CTA are not modelled."""
    if decoder.modifiers in BARRIERS:
        decoder.expect_operands(1)
        number = decoder.operands[0]
    else:
        number = decoder.operands[1] if len(decoder.operands) == 3 else ""
    if parse_number(number) != 0:
        decoder.refuse("a barrier other than number 0 of the whole CTA")
    if decoder.modifiers in BARRIERS:
        return CtaBarrier(None)
    modes = [m for m in decoder.modifiers if m in BARRIER_REDUCTIONS]
    decoder.allow("cta", "red", "aligned", *BARRIER_REDUCTIONS)
    if "red" not in decoder.modifiers or len(modes) != 1:
        decoder.refuse("this barrier")
    mode = modes[0]
    predicate = decoder.predicate(decoder.operands[2])
    count = mode == "popc"
    write = decoder.writer(decoder.operands[0]) if count else decoder.predicate_writer(decoder.operands[0])

    def reduce(batch: Batch, threads: Array) -> None:
        votes = np.broadcast_to(predicate(batch, threads), threads.shape)
        yes, no = (np.bincount(batch.cta[threads], wanted)[batch.cta[threads]] for wanted in (votes, ~votes))
        write(batch, threads, yes.astype(np.uint32) if count else no == 0 if mode == "and" else yes > 0)

    return CtaBarrier(reduce)


@dataclass
class KernelInfo:
    """What a launcher needs to know of a kernel."""

    name: str
    params: list[Param]
    max_threads: int | None
    static_shared_bytes: int


class Module:
    """PTX text, loaded. Anything in it that is not modelled raises UnknownOpcode (or ParseError) here."""

    def __init__(self, ptx_text: str) -> None:
        parsed, self.variables = parse(ptx_text)
        self.code = {name: KernelCode(kernel, self.variables) for name, kernel in parsed.items()}
        self.kernels = {
            name: KernelInfo(name, code.kernel.params, code.kernel.max_threads, code.variable_bytes)
            for name, code in self.code.items()
        }

"""Operands of instructions, turned once into functions that read or write a batch of threads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from .datatypes import TYPES, UNSIGNED, Array, DataType, Select, wrap
from .errors import UnknownOpcode
from .parse import Instruction, Kernel, split_operands

if TYPE_CHECKING:
    from .batch import Batch

Reader = Callable[["Batch", Select], Array]  # an array of one value per thread, or of one value for all
Writer = Callable[["Batch", Select, Array], None]
Operation = Callable[["Batch", Select], None]

SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
SPECIAL |= {f"%lanemask_{which}" for which in ("lt", "le", "eq", "ge", "gt")} | {"%laneid", "%warpid", "WARP_SZ"}

NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
FLOAT_BITS = re.compile(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})$")
ADDRESS = re.compile(r"\[\s*([^\]+\s]+)\s*(?:\+\s*(-?\w+))?\s*\]$")


def parse_number(text: str) -> int | None:
    if NUMBER.match(text):
        digits = text.rstrip("U")
        octal = re.match(r"-?0\d+$", digits)
        return int(digits, 8 if octal else 0)
    match = FLOAT_BITS.match(text)
    return int(match.group(1), 16) if match else None


@dataclass
class Scope:
    """What the operands of a kernel may name. Symbols of shared and local memory are offsets, known when loading; those
    of the module get their addresses on a machine, and are kept by name."""

    kernel: Kernel
    module_symbols: set[str]
    offsets: dict[str, int]
    slots: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = {name: slot for slot, name in enumerate(self.kernel.registers)}


class Decoder:
    """One instruction while its operation is being built."""

    def __init__(self, scope: Scope, instruction: Instruction, index: int) -> None:
        self.scope, self.instruction, self.index = scope, instruction, index
        self.modifiers, self.operands = instruction.modifiers, instruction.operands

    def refuse(self, why: str) -> NoReturn:
        i = self.instruction
        raise UnknownOpcode(f"{self.scope.kernel.name}: PTX line {i.line}: {i.text}; is not modelled: {why}")

    def type(self, kinds: str = "usb", bits: tuple[int, ...] = (16, 32, 64), position: int = -1) -> DataType:
        """The type in that modifier, checked against what the opcode takes."""
        name = self.modifiers[position] if self.modifiers else ""
        kind = TYPES.get(name)
        if kind is None or kind.kind not in kinds or kind.bits not in bits:
            self.refuse(f"type {name or 'missing'}")
        return kind

    def allow(self, *modifiers: str) -> None:
        """Refuses any modifier beyond these, but for types."""
        for modifier in self.modifiers:
            if modifier not in modifiers and modifier not in TYPES:
                self.refuse(f"modifier .{modifier}")

    def expect_operands(self, *counts: int) -> None:
        if len(self.operands) not in counts:
            self.refuse(f"{len(self.operands)} operands")

    def elements(self, text: str) -> list[str]:
        """The registers of a vector operand, or the one operand."""
        return split_operands(text[1:-1]) if text.startswith("{") else [text]

    def reader(self, text: str, dtype: np.dtype[np.generic]) -> Reader:
        """Narrower than its register: the lower part; wider: extended with zeros."""
        bits = dtype.itemsize * 8
        if text in self.scope.slots:
            slot = self.scope.slots[text]
            register = self.scope.kernel.registers[text]
            if register.kind == "pred":
                self.refuse(f"predicate {text} as a number")
            if register.dtype == dtype:
                return lambda batch, select: batch.registers[slot][select]
            if register.bits == bits:
                return lambda batch, select: batch.registers[slot][select].view(dtype)
            word = UNSIGNED[bits]
            return lambda batch, select: batch.registers[slot][select].astype(word).view(dtype)
        if text in SPECIAL:
            word = UNSIGNED[bits]
            return lambda batch, select: batch.special[text][select].astype(word).view(dtype)
        number = self.scope.offsets.get(text, parse_number(text))
        if number is not None:
            constant = np.array([wrap(number, bits)], UNSIGNED[bits]).view(dtype)
            return lambda batch, select: constant
        if text in self.scope.module_symbols and bits == 64:
            return lambda batch, select: np.array([batch.symbols[text]], np.uint64).view(dtype)
        self.refuse(f"operand {text}")

    def predicate(self, text: str) -> Reader:
        negated, name = text.startswith("!"), text.lstrip("!")
        number = parse_number(name)
        if number is not None:
            constant = np.array([bool(number) != negated])
            return lambda batch, select: constant
        slot = self.scope.slots.get(name)
        if slot is None or self.scope.kernel.registers[name].kind != "pred":
            self.refuse(f"predicate {text}")
        if negated:
            return lambda batch, select: ~batch.registers[slot][select]
        return lambda batch, select: batch.registers[slot][select]

    def writer(self, text: str) -> Writer:
        """A value narrower than the register is extended by its sign if it is signed; a wider one loses its top."""
        if text == "_":
            return lambda batch, select, values: None
        slot = self.scope.slots.get(text)
        if slot is None:
            self.refuse(f"destination {text}")
        register = self.scope.kernel.registers[text]
        if register.kind == "pred":

            def write_predicate(batch: Batch, select: Select, values: Array) -> None:
                batch.registers[slot][select] = values

            return write_predicate
        dtype = UNSIGNED[register.bits]

        def write(batch: Batch, select: Select, values: Array) -> None:
            batch.registers[slot][select] = values.astype(dtype, copy=False)

        return write

    def predicate_writer(self, text: str) -> Writer:
        if text != "_" and self.scope.kernel.registers.get(text) != TYPES["pred"]:
            self.refuse(f"destination {text}")
        return self.writer(text)

    def address(self, text: str) -> Reader:
        """Of [base] or [base+offset]; 64 bits, wrapped at the width of the base."""
        match = ADDRESS.match(text)
        offset = parse_number(match.group(2) or "0") if match else None
        if match is None or offset is None:
            self.refuse(f"address {text}")
        name = match.group(1)
        register = self.scope.kernel.registers.get(name)
        bits = register.bits if register and register.bits == 32 else 64
        base, step = self.reader(name, UNSIGNED[bits]), UNSIGNED[bits].type(wrap(offset, bits))
        if bits == 64:
            return lambda batch, select: base(batch, select) + step
        return lambda batch, select: (base(batch, select) + step).astype(np.uint64)

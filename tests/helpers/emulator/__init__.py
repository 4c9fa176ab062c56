"""A PTX interpreter in NumPy for tests of kernels on machines without a GPU.

Threads run in SIMT groups; memory accesses are checked for bounds, alignment, initialisation and data races. Not
modelled: floating point, asynchronous copies, tensor cores, fences and ordered accesses between CTAs (spin-waits),
barriers of part of a CTA, calls. What is not modelled raises UnknownOpcode when a module is loaded.
"""

from .code import KernelInfo, Module
from .coverage import KernelCoverage
from .errors import (
    Deadlock,
    DivergentBarrier,
    DivisionByZero,
    EmulatorError,
    Fault,
    InvalidMask,
    LaunchError,
    Misaligned,
    NonCoherentRead,
    OutOfBounds,
    ParseError,
    Race,
    ReadOnlyWrite,
    StepLimit,
    Trap,
    UninitialisedRead,
    UnknownOpcode,
)
from .machine import Machine
from .mutate import Mutant, mutants
from .parse import Instruction, Param

__all__ = [
    "Deadlock",
    "DivergentBarrier",
    "DivisionByZero",
    "EmulatorError",
    "Fault",
    "Instruction",
    "InvalidMask",
    "KernelCoverage",
    "KernelInfo",
    "LaunchError",
    "Machine",
    "Misaligned",
    "Module",
    "Mutant",
    "NonCoherentRead",
    "OutOfBounds",
    "Param",
    "ParseError",
    "Race",
    "ReadOnlyWrite",
    "StepLimit",
    "Trap",
    "UninitialisedRead",
    "UnknownOpcode",
    "mutants",
]

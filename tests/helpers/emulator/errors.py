"""What the emulator reports: one exception class per kind of finding, so that a test can ask for the right one."""

from __future__ import annotations


class EmulatorError(Exception):
    """Anything the emulator refuses or finds."""


class ParseError(EmulatorError):
    """The text is not PTX as this parser knows it."""


class UnknownOpcode(EmulatorError):
    """An instruction, modifier or operand that is not modelled. Raised when a module is loaded, never skipped."""


class LaunchError(EmulatorError):
    """A launch that does not fit the kernel: argument count, size or range, block, grid or shared memory."""


class Fault(EmulatorError):
    """A finding while a kernel runs. The attributes say where; those that make no sense for a finding are None."""

    def __init__(
        self,
        message: str,
        *,
        kernel: str | None = None,
        line: int | None = None,
        text: str | None = None,
        cta: int | None = None,
        thread: int | None = None,
        address: int | None = None,
    ) -> None:
        self.kernel, self.line, self.text = kernel, line, text
        self.cta, self.thread, self.address = cta, thread, address
        parts = [message]
        if kernel is not None:
            parts.insert(0, f"{kernel}:")
        if line is not None:
            parts.append(f"at PTX line {line}: {text};")
        if thread is not None:
            parts.append(f"CTA {cta}, thread {thread}")
        if address is not None:
            parts.append(f"address 0x{address:x}")
        super().__init__(" ".join(parts))


class OutOfBounds(Fault):
    """An address outside every buffer, or in the red zone beside one."""


class Misaligned(Fault):
    """An address that is not a multiple of the access's size."""


class UninitialisedRead(Fault):
    """A read of bytes that nobody has written: by a thread, an atomic, or a download."""


class ReadOnlyWrite(Fault):
    """A write to constant memory."""


class NonCoherentRead(Fault):
    """Bytes that a launch both reads through .nc and writes."""


class Race(Fault):
    """Two accesses to one byte, at least one of them a plain write, that no barrier orders."""


class Deadlock(Fault):
    """Threads that wait for others which will never come."""


class DivergentBarrier(Fault):
    """bar.sync reached from different places, or by some threads of a CTA after others have exited."""


class InvalidMask(Fault):
    """A warp instruction whose membermask excludes its own thread, differs among its threads, or a lane read."""


class DivisionByZero(Fault):
    """An integer division or remainder by zero; the hardware's result is unspecified."""


class Trap(Fault):
    """The kernel executed trap."""


class StepLimit(Fault):
    """More instructions than the machine's limit: most likely an endless loop."""

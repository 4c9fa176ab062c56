"""Mutants of a PTX text: one opcode, constant or predicate changed at a time. A test suite should notice most of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Patterns at the start of an opcode, or inside it where they begin with a dot, and what stands in for them.
SWAPS = [
    ("add.", "sub."), ("sub.", "add."), ("and.b", "or.b"), ("or.b", "xor.b"), ("xor.b", "or.b"), ("shl.", "shr."),
    ("shr.", "shl."), ("mul.lo.", "add."), ("min.", "max."), ("max.", "min."), ("setp.lt.", "setp.le."),
    ("setp.le.", "setp.lt."), ("setp.ge.", "setp.gt."), ("setp.gt.", "setp.ge."), ("setp.eq.", "setp.ne."),
    ("setp.ne.", "setp.eq."), (".bfly.", ".up."), (".up.", ".down."), (".down.", ".up."), (".any.", ".all."),
    (".all.", ".any."),
]  # fmt: skip
RETYPED = {"shl.u": "shl.b", "shl.s": "shl.b", "shr.b": "shr.u"}  # shl takes bits only; shr.b would be as good as shr.u
STATEMENT = re.compile(r"^\s*(?:@(!?)(%?[\w$]+)\s+)?([a-z]\w*(?:\.[\w:]+)*)(\s+[^;]*)?;")
ENTRY = re.compile(r"\.entry\s+([\w$]+)")
LAST_CONSTANT = re.compile(r",\s*(-?\d+)\s*;")
REMOVABLE = ("bar.sync", "bar.warp.sync", "barrier.sync")


@dataclass(frozen=True)
class Mutant:
    """`after` replaces the text `before` of a line (counted from 1) of the PTX text it was made from."""

    line: int
    before: str
    after: str

    def apply(self, ptx_text: str) -> str:
        lines = ptx_text.split("\n")
        if lines[self.line - 1] != self.before:
            raise ValueError(f"line {self.line} is not {self.before!r}")
        lines[self.line - 1] = self.after
        return "\n".join(lines)


def mutants(ptx_text: str, kernel_name: str | None = None) -> list[Mutant]:
    """All mutants of the module's kernels, or of one kernel, in the order of the lines."""
    found: list[Mutant] = []
    inside: str | None = None
    for number, text in enumerate(ptx_text.split("\n"), 1):
        if entry := ENTRY.search(text):
            inside = entry.group(1)
        elif re.match(r"\s*(\.visible\s+|\.weak\s+)*\.func\b", text):
            inside = None
        if inside is not None and (kernel_name is None or inside == kernel_name):
            found += [Mutant(number, text, changed) for changed in changes(text)]
    return found


def changes(text: str) -> list[str]:
    """The changed forms of one line; none unless it is an instruction."""
    match = STATEMENT.match(text)
    if match is None:
        return []
    results = []
    start, opcode = match.start(3), match.group(3)
    rest = text[match.end(3) :]
    if match.group(2) is not None:
        flipped = text.replace("@!", "@", 1) if match.group(1) else text.replace("@", "@!", 1)
        results.append(flipped)
    if opcode in REMOVABLE:
        results.append("")
    for old, new in SWAPS:
        if opcode.startswith(old) if not old.startswith(".") else old in opcode:
            swapped = opcode.replace(old, new, 1)
            for wrong, right in RETYPED.items():
                swapped = right + swapped[len(wrong) :] if swapped.startswith(wrong) else swapped
            results.append(text[:start] + swapped + rest)
    if constant := LAST_CONSTANT.search(text):
        value = int(constant.group(1)) ^ 1
        results.append(text[: constant.start(1)] + str(value) + text[constant.end(1) :])
    return results

"""PTX text to kernels: parameters, registers, variables, labels and instructions. No meaning is given to opcodes here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .datatypes import TYPES, DataType
from .errors import ParseError

RED_ZONE = 64  # bytes between two shared variables of a kernel, so that an overrun of one does not reach the next

HEADER = re.compile(r"\.(version|target|address_size)\s[^\n]*")
FUNCTION = re.compile(r"(?:\.(?:visible|weak|extern|noreturn)\s+)*\.(entry|func)\b")
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?([^{]*)\{", re.S)
LABEL = re.compile(r"([$%\w]+)\s*:(?!:)")
GUARD = re.compile(r"@(!?)(%?[\w$@]+)\s+")
NAME = re.compile(r"%?[A-Za-z_$][\w$]*")
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s+(?:\.(?:global|shared|const|local)\s+)?(?:\.align\s+\d+\s+)?)?(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?$"
)
VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern|common)\s+)*\.(?P<space>global|const|shared|local)\s+(?:\.attribute\([^)]*\)\s+)?"
    r"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)(?:\[(?P<count>\d*)\])?\s*(?:=\s*(?P<values>.*))?$"
)


@dataclass(frozen=True)
class Param:
    """One kernel parameter; offset is its place in the parameter buffer."""

    name: str
    type: str
    num_bytes: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A variable in global, const, shared or local memory. num_bytes is 0 for the dynamic part of shared memory."""

    name: str
    space: str
    align: int
    num_bytes: int
    initial: bytes


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@!%p1 add.s32 %r1, %r2, 3;` has guard %p1, negated, opcode add, modifiers s32, three operands."""

    line: int
    text: str
    guard: str | None
    negated: bool
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass
class Kernel:
    """An .entry: what it takes, what it declares, what it executes."""

    name: str
    params: list[Param]
    max_threads: int | None = None
    registers: dict[str, DataType] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.num_bytes for p in self.params), default=0)

    def layout(self, space: str, red_zone: int = 0) -> tuple[dict[str, int], int]:
        """Offsets of the kernel's variables in that space, and the bytes from the first to the end of the last."""
        offsets: dict[str, int] = {}
        end = 0
        for v in self.variables:
            if v.space == space and v.num_bytes:
                start = end + red_zone if offsets else 0
                offsets[v.name] = -(-start // v.align) * v.align
                end = offsets[v.name] + v.num_bytes
        return offsets, end


def split_operands(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return parts


def parse(text: str) -> tuple[dict[str, Kernel], list[Variable]]:
    """Kernels by name, and the variables of the module."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"(?m)^\s*\.(loc|file)\s[^\n]*$", "", text)  # these end with the line, not with a semicolon
    kernels: dict[str, Kernel] = {}
    variables: list[Variable] = []
    position = 0
    while position < len(text):
        if text[position].isspace() or text[position] == ";":
            position += 1
        elif header := HEADER.match(text, position):
            position = header.end()
        elif text.startswith(".section", position):
            position = closing_brace(text, text.index("{", position)) + 1
        elif function := FUNCTION.match(text, position):
            entry = ENTRY.match(text, function.start(1) - 1)
            if function.group(1) == "func":  # skipped: only a call could reach it, and calls are refused
                brace, semicolon = text.find("{", position), text.find(";", position)
                declaration = brace < 0 or 0 <= semicolon < brace
                position = (semicolon if declaration else closing_brace(text, brace)) + 1
            elif entry is None:
                raise ParseError(f"line {line_of(text, position)}: .entry without a body")
            else:
                end = closing_brace(text, entry.end() - 1)
                kernel = Kernel(entry.group(1), parse_params(entry.group(2) or ""), parse_limit(entry.group(3)))
                parse_body(kernel, text, entry.end(), end)
                kernels[kernel.name] = kernel
                position = end + 1
        else:
            end = text.find(";", position)
            statement = " ".join(text[position:end].split())
            variable = parse_variable(statement) if end >= 0 else None
            if variable is None:
                raise ParseError(f"line {line_of(text, position)}: {statement[:80]}")
            variables.append(variable)
            position = end + 1
    return kernels, variables


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def closing_brace(text: str, position: int) -> int:
    """Of the brace at position."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise ParseError(f"line {line_of(text, position)}: brace without an end")


def data_type(name: str) -> DataType:
    if name not in TYPES:
        raise ParseError(f"type .{name} is not modelled")
    return TYPES[name]


def parse_limit(directives: str) -> int | None:
    """Threads a block may have, by .maxntid or .reqntid."""
    match = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    if match is None:
        return None
    x, y, z = (int(n or 1) for n in match.groups())
    return x * y * z


def parse_params(text: str) -> list[Param]:
    params: list[Param] = []
    offset = 0
    for part in split_operands(text):
        match = PARAMETER.match(" ".join(part.split()))
        if match is None:
            raise ParseError(f"parameter: {part}")
        size = data_type(match["type"]).num_bytes
        align = int(match["align"] or size)
        offset = -(-offset // align) * align
        params.append(Param(match["name"], match["type"], size * int(match["count"] or 1), offset))
        offset += params[-1].num_bytes
    return params


def parse_variable(statement: str) -> Variable | None:
    match = VARIABLE.match(statement)
    if match is None:
        return None
    size = data_type(match["type"]).num_bytes
    count = 1 if match["count"] is None else int(match["count"] or 0)
    initial = b""
    for value in (match["values"] or "").strip("{} ").split(","):
        if value.strip():
            try:
                number = int(value.strip().rstrip("U"), 0)
            except ValueError:
                raise ParseError(f"initial value {value.strip()} of {match['name']} is not an integer") from None
            initial += (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    if match["values"]:
        initial = initial.ljust(size * count, b"\0")
    return Variable(match["name"], match["space"], int(match["align"] or size), size * count, initial)


def parse_body(kernel: Kernel, text: str, position: int, end: int) -> None:
    """Statements from position to end. A brace opens a scope whose registers may repeat an outer name."""
    scopes: list[dict[str, str]] = [{}]
    line, counted = line_of(text, position), position
    while position < end:
        char = text[position]
        if char.isspace() or char == ";":
            position += 1
            continue
        line, counted = line + text.count("\n", counted, position), position
        if char == "{":
            scopes.append(dict(scopes[-1]))
            position += 1
        elif char == "}":
            scopes.pop()
            position += 1
        elif label := LABEL.match(text, position, end):
            if label.group(1) in kernel.labels:
                raise ParseError(f"line {line}: label {label.group(1)} is there twice")
            kernel.labels[label.group(1)] = len(kernel.instructions)
            position = label.end()
        else:
            stop = text.index(";", position)
            parse_statement(kernel, " ".join(text[position:stop].split()), line, scopes)
            position = stop + 1


def parse_statement(kernel: Kernel, statement: str, line: int, scopes: list[dict[str, str]]) -> None:
    if statement.startswith(".reg"):
        declare_registers(kernel, statement, line, scopes)
    elif statement.startswith(".pragma"):
        pass
    elif statement.startswith("."):
        variable = parse_variable(statement)
        if variable is None:
            raise ParseError(f"line {line}: {statement}")
        kernel.variables.append(variable)
    else:
        inner = len(scopes) > 1
        renamed = NAME.sub(lambda m: scopes[-1].get(m.group(), m.group()), statement) if inner else statement
        guard = GUARD.match(renamed)
        opcode, _, rest = renamed[guard.end() if guard else 0 :].partition(" ")
        name, *modifiers = opcode.split(".")
        kernel.instructions.append(
            Instruction(
                line,
                statement,
                guard.group(2) if guard else None,
                bool(guard and guard.group(1)),
                name,
                tuple(modifiers),
                tuple(split_operands(rest)),
            )
        )


def declare_registers(kernel: Kernel, statement: str, line: int, scopes: list[dict[str, str]]) -> None:
    match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement)
    if match is None:
        raise ParseError(f"line {line}: {statement}")
    kind = data_type(match.group(1))
    for name in split_operands(match.group(2)):
        several = re.match(r"(%?[\w$]+)<(\d+)>$", name)
        names = [f"{several.group(1)}{i}" for i in range(int(several.group(2)))] if several else [name]
        for register in names:
            unique = register if len(scopes) == 1 else f"{register}@{line}"
            scopes[-1][register] = unique
            kernel.registers[unique] = kind

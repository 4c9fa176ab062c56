"""What leaves a host when several ranks share it: stock FSDP2, and every codec flat and hierarchical.

    python benchmarks/two_by_two.py [--ranks-per-host 2] [--passes 3] [--codecs raw ...] [--json PATH] [--plot PATH]

Two network namespaces stand for two hosts (see fsdp_ciera.bench.netns; needs root and iproute2), each with two gloo ranks. They
run forward passes of the model of interface_bytes.py under `no_grad`, so that parameter all-gathers are all that moves; each
rank changes its shards a little after every pass. A first pass, which fills the caches, is not counted. Read are the
counters of the hosts' interfaces; ranks of one host reach each other over the host's loopback.

It begins with a plain all-gather, in shards (what one rank contributes) that leave a host. gloo passes the pieces round a
ring, so that only one rank of each host sends to the other host, and W - 1 shards go over that link: 3 with 2 x 2 ranks. A
hierarchical gather needs one shard for each rank of the host: 2. So 3 / 2 is the most that it can save here, and 7 / 4 with
2 x 4 ranks. If each rank sent its shard to every other one, 4 would leave a host with 2 x 2 ranks.

The exit code is 1 if a codec's cache is not at least halved, or if the hierarchical gather saves fewer bytes between hosts
than plain gathers of equal shards do, measured in the same run (with 2 % for gloo's own messages). The mark of 1.9 is printed
beside; a ring of 2 x 2 ranks cannot reach it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interface_bytes import await_files, build_model, counters_at_rest, forward_passes
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fsdp_ciera import CieraPolicy, stats
from fsdp_ciera.bench.netns import NetnsCluster, RankProcesses
from fsdp_ciera.errors import NetnsError, RankError

NUM_HOSTS = 2
MARK_RATIO, MARK_CACHE = 1.9, 2.0
CODECS = ("raw", "entropy", "exponent_block", "exponent_delta", "value_delta")
FLAT, HIERARCHICAL = "flat", "hierarchical"
PLAIN_BYTES = 8 * 2**20
"""Bytes that each rank contributes to a plain all-gather."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to gather: a codec and a topology, stock FSDP2 (no codec), or a plain all-gather (`plain`)."""

    name: str
    topology: str = FLAT
    codec: str | None = None
    is_plain: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.topology}"

    def policy(self, ranks_per_host: int) -> CieraPolicy | None:
        """`None` for stock FSDP2."""
        if self.codec is None:
            return None
        if self.topology == FLAT:
            return CieraPolicy(codecs=(self.codec,))
        return CieraPolicy(codecs=(self.codec,), topology="hierarchical", ranks_per_node=ranks_per_host)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes and caches of one contender, over all counted passes."""

    contender: Contender
    host_bytes: list[int]
    """Bytes that left each host, by its interface: payloads, headers of ours, of gloo and of TCP/IP."""
    cache_bytes: int
    """Bytes of rank 0's caches."""
    by_link: dict[str, int]
    """Bytes that rank 0 counts as sent, in all passes, by link."""


def main() -> int:
    """Returns the exit code: 1 if the marks are missed; exits with 2 if nothing could be measured."""
    parser = argparse.ArgumentParser(description="bytes between two hosts, flat and hierarchical")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="gloo ranks in each of the two namespaces")
    parser.add_argument("--passes", type=int, default=3, help="counted forward passes of each contender")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS, help="codecs to measure")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the figures there (PNG; needs matplotlib)")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)  # given to the ranks that this starts
    arguments = parser.parse_args()
    contenders = contenders_of(arguments.codecs)
    if arguments.rank_folder is not None:
        run_rank(arguments.rank_folder, contenders, arguments.passes)
        return 0
    if arguments.ranks_per_host < 2 or arguments.passes < 1:
        parser.error("--ranks-per-host must be at least 2 and --passes at least 1")
    try:
        measured = measure(contenders, arguments.ranks_per_host, arguments.passes)
    except (NetnsError, RankError, TimeoutError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    console = Console(width=max(Console().width, 100))  # the table's
    console.print(plain_table(measured, arguments.ranks_per_host))
    console.print(table(measured, arguments.passes, arguments.ranks_per_host))
    limit = host_megabytes(measured[0], 1) / host_megabytes(measured[1], 1)
    verdicts = [verdict_of(measured, codec, limit) for codec in arguments.codecs]
    for _, text in verdicts:
        console.print(text, highlight=False)
    if arguments.json is not None:
        figures = {"hosts": NUM_HOSTS, "ranks_per_host": arguments.ranks_per_host, "passes": arguments.passes}
        figures |= {"plain_bytes": PLAIN_BYTES, "measured": [asdict(run) for run in measured]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.plot is not None:
        draw(measured, arguments.passes, arguments.ranks_per_host, arguments.plot)
    return 0 if all(reached for reached, _ in verdicts) else 1


def contenders_of(codecs: Sequence[str]) -> list[Contender]:
    """All contenders, in the order in which they run."""
    plain = [Contender(name="plain all-gather", topology=topology, is_plain=True) for topology in (FLAT, HIERARCHICAL)]
    pairs = [Contender(name=codec, codec=codec, topology=t) for codec in codecs for t in (FLAT, HIERARCHICAL)]
    return [*plain, Contender(name="stock FSDP2"), *pairs]


def measure(contenders: Sequence[Contender], ranks_per_host: int, num_passes: int) -> list[Measured]:
    """Runs all contenders one after the other in the same processes, reading the interfaces around the counted passes.

    Raises `NetnsError` when there are no network namespaces to be had, `RankError` when a rank fails.
    """
    num_ranks = NUM_HOSTS * ranks_per_host
    codecs = [contender.codec for contender in contenders if contender.codec is not None and contender.topology == FLAT]
    measured = []
    with (
        tempfile.TemporaryDirectory(prefix="ciera-hosts-") as name,
        NetnsCluster(NUM_HOSTS) as cluster,
        Progress() as bar,
    ):
        folder = Path(name)
        argv = [sys.executable, __file__, "--rank-folder", name, "--passes", str(num_passes)]
        run: RankProcesses = cluster.start([*argv, "--codecs", *codecs], ranks_per_host=ranks_per_host)
        task = bar.add_task("measuring", total=len(contenders))
        for index, contender in enumerate(contenders):
            bar.update(task, description=str(contender))
            await_files((folder / f"{index} ready {rank}" for rank in range(num_ranks)), run)
            before = counters_at_rest(cluster)
            (folder / f"{index} go").touch()
            files = [folder / f"{index} done {rank}" for rank in range(num_ranks)]
            await_files(files, run)
            sent = [now.since(then).tx for now, then in zip(counters_at_rest(cluster), before, strict=True)]
            (folder / f"{index} read").touch()
            measured.append(Measured(contender=contender, host_bytes=sent, **json.loads(files[0].read_text())))
            bar.advance(task)
        run.wait(60)
    return measured


def run_rank(folder: Path, contenders: Sequence[Contender], num_passes: int) -> None:
    """Runs as one rank, inside its namespace: all contenders, each when the harness says go."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks_per_host = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    process_groups = between_hosts(ranks_per_host)
    for index, contender in enumerate(contenders):
        model = None
        if not contender.is_plain:
            model = build_model(contender.policy(ranks_per_host))
            forward_passes(model, 1)
        earlier = links_of(model, contender)
        dist.barrier()
        (folder / f"{index} ready {rank}").touch()
        await_files([folder / f"{index} go"])
        if model is None:
            plain_all_gather(None if contender.topology == FLAT else process_groups[rank % ranks_per_host])
        else:
            forward_passes(model, num_passes)
        links = {link: count - earlier.get(link, 0) for link, count in links_of(model, contender).items()}
        cache_bytes = 0 if model is None or contender.codec is None else stats(model).cache_bytes
        unfinished = folder / f"unfinished {rank}"
        unfinished.write_text(json.dumps({"cache_bytes": cache_bytes, "by_link": links}))
        unfinished.rename(folder / f"{index} done {rank}")
        await_files([folder / f"{index} read"])  # the next contender's first pass must not be counted with this one's
    dist.destroy_process_group()


def between_hosts(ranks_per_host: int) -> list[dist.ProcessGroup]:
    """The process groups of ranks that have the same number on their hosts."""
    num_ranks = dist.get_world_size()
    return [dist.new_group(list(range(number, num_ranks, ranks_per_host))) for number in range(ranks_per_host)]


def plain_all_gather(process_group: dist.ProcessGroup | None) -> None:
    """Does one `all_gather_into_tensor` of `PLAIN_BYTES` a rank."""
    size = dist.get_world_size(process_group)
    output = torch.empty(size * PLAIN_BYTES, dtype=torch.uint8)
    dist.all_gather_into_tensor(output, torch.ones(PLAIN_BYTES, dtype=torch.uint8), group=process_group)


def links_of(model: torch.nn.Module | None, contender: Contender) -> dict[str, int]:
    """Bytes that this rank counts as sent so far, by link."""
    if model is None or contender.codec is None:
        return {}
    return {link: amount.wire_bytes for link, amount in stats(model).by_link.items()}


def host_megabytes(run: Measured, num_passes: int) -> float:
    """MB a pass that leave the host that sends the most."""
    return max(run.host_bytes) / num_passes / 1e6


def find(measured: Sequence[Measured], codec: str, topology: str) -> Measured:
    """The run of `codec` in `topology`."""
    return next(run for run in measured if run.contender.codec == codec and run.contender.topology == topology)


def verdict_of(measured: Sequence[Measured], codec: str, limit: float) -> tuple[bool, str]:
    """Whether a codec reaches the marks, and the line that says so. `limit` is what plain gathers of equal size give."""
    flat, nodes = find(measured, codec, FLAT), find(measured, codec, HIERARCHICAL)
    ratio = host_megabytes(flat, 1) / host_megabytes(nodes, 1)
    # What has no cache needs no less of it.
    cache_is_halved = MARK_CACHE * nodes.cache_bytes <= 1.01 * flat.cache_bytes
    cache = f"{flat.cache_bytes / 1e6:.1f} -> {nodes.cache_bytes / 1e6:.1f} MB" if flat.cache_bytes else "none"
    text = (
        f"{codec}: {ratio:.2f}x fewer bytes between hosts (mark {MARK_RATIO}: "
        f"{'reached' if ratio >= MARK_RATIO else 'MISSED'}; a ring allows {limit:.2f}), cache {cache} "
        f"(mark a half: {'reached' if cache_is_halved else 'MISSED'})"
    )
    return ratio >= min(MARK_RATIO, 0.98 * limit) and cache_is_halved, text


def plain_table(measured: Sequence[Measured], ranks_per_host: int) -> Table:
    """A table of the plain all-gathers, in shards."""
    shard = f"{PLAIN_BYTES / 2**20:.0f} MiB"
    result = Table(title=f"Plain all-gather, {NUM_HOSTS} hosts x {ranks_per_host} ranks, {shard} a rank", box=SIMPLE)
    for heading in ("", "host", "MB out", "shards out"):
        result.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for run in measured:
        if run.contender.is_plain:
            label = "all ranks, one group" if run.contender.topology == FLAT else "between hosts only"
            for host, sent in enumerate(run.host_bytes):
                result.add_row("" if host else label, str(host), f"{sent / 1e6:.2f}", f"{sent / PLAIN_BYTES:.3f}")
    return result


def table(measured: Sequence[Measured], num_passes: int, ranks_per_host: int) -> Table:
    """A table of what leaves a host (the one that sends the most), and of rank 0's caches."""
    result = Table(title=f"Out of a host in a forward pass, {NUM_HOSTS} hosts x {ranks_per_host} ranks", box=SIMPLE)
    for heading in ("", "topology", "MB out", "stock / this", "flat / this", "cache MB"):
        result.add_column(heading, justify="left" if heading in ("", "topology") else "right", no_wrap=True)
    stock = next(run for run in measured if run.contender.codec is None and not run.contender.is_plain)
    for run in measured:
        if run.contender.is_plain:
            continue
        codec, topology = run.contender.codec, run.contender.topology
        flat = "" if codec is None or topology == FLAT else ratio_text(find(measured, codec, FLAT), run)
        result.add_row(
            run.contender.name if topology == FLAT else "",
            topology,
            f"{host_megabytes(run, num_passes):.3f}",
            ratio_text(stock, run),
            flat,
            f"{run.cache_bytes / 1e6:.1f}",
        )
    return result


def ratio_text(before: Measured, after: Measured) -> str:
    """`1.50`."""
    return f"{host_megabytes(before, 1) / host_megabytes(after, 1):.2f}"


def draw(measured: Sequence[Measured], num_passes: int, ranks_per_host: int, path: Path) -> None:
    """A PNG: MB out of a host and MB of cache, flat beside hierarchical."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    codecs = [run.contender.name for run in measured if run.contender.codec and run.contender.topology == FLAT]
    stock = next(run for run in measured if run.contender.codec is None and not run.contender.is_plain)
    figure, panels = plt.subplots(1, 2, figsize=(12, 4), sharey=True)
    for topology, shift, color in ((FLAT, -0.2, "#9aa5b1"), (HIERARCHICAL, 0.2, "#1f6feb")):
        runs: list[Any] = [find(measured, codec, topology) for codec in codecs]
        widths = [[host_megabytes(run, num_passes) for run in runs], [run.cache_bytes / 1e6 for run in runs]]
        for axes, values in zip(panels, widths, strict=True):
            axes.barh([p + shift for p in range(len(codecs))], values, height=0.38, color=color, label=topology)
            for position, value in enumerate(values):
                axes.text(value, position + shift, f" {value:.2f}", va="center", fontsize=9)
    panels[0].axvline(
        host_megabytes(stock, num_passes), color="black", linewidth=1, linestyle="--", label="stock FSDP2"
    )
    panels[0].set_yticks(range(len(codecs)), codecs)
    panels[0].invert_yaxis()
    panels[0].set_title("MB out of a host in a forward pass, by its interface", fontsize=11)
    panels[1].set_title("MB of caches a rank", fontsize=11)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="lower center", ncols=3)
    figure.suptitle(f"{NUM_HOSTS} hosts with {ranks_per_host} ranks each", fontsize=12)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())

"""`ciera bench`: e2e, gather, compare."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fsdp_ciera.cli.arguments import count, not_negative, positive
from fsdp_ciera.cli.bench_gather import add_gather

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_bench(commands: _Commands) -> None:
    """Adds `bench` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure: a training job by all contenders on throttled links, or single gathers",
        description="Measure on this machine, in network namespaces with throttled links (root), or on the loopback.",
    )
    benches = parser.add_subparsers(title="benches", metavar="BENCH", required=True)
    _add_e2e(benches)
    add_gather(benches)
    _add_compare(benches)


def _add_e2e(benches: _Commands) -> None:
    parser = benches.add_parser(
        "e2e",
        help="one training job by FSDP2, its rivals and every setting of ours, interleaved",
        description="Train a small pretrained MoE on several hosts (network namespaces, veth pairs, a bridge; tbf limits what "
        "each sends) with stock FSDP2, DeepSpeed ZeRO-3, a lossy int8 gather, stateless compression, and ours: in turn, round "
        "after round. Writes results.json, results.csv, steps.csv, traces and pictures. Needs root; --loopback does not, but "
        "has no links to throttle. Exits with 1 if bits differ that must not.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hosts", type=count, default=4, help="hosts")
    parser.add_argument("--ranks-per-host", type=count, default=1, help="gloo ranks of each host")
    parser.add_argument("--rate", help="what each host may send, as tc writes it, or none (200mbit when not given)")
    parser.add_argument(
        "--loopback", action="store_true", help="plain processes instead of hosts, no root and no --rate"
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="KEY", help="who runs, by key (default: all; wrong keys list them)"
    )
    parser.add_argument("--rounds", type=count, default=2, help="turns of each contender")
    parser.add_argument("--warmup-steps", type=count, default=2, help="iterations of a turn before the timed ones")
    parser.add_argument("--steps", type=count, default=3, help="timed iterations of a turn")
    parser.add_argument("--tokens", type=count, default=8, help="tokens a rank and step")
    parser.add_argument("--lr", type=not_negative, default=1e-5, help="learning rate")
    parser.add_argument(
        "--reduce-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of gradients on the links"
    )
    parser.add_argument("--reduce-scatter", choices=("ring", "gloo"), default="ring",
                        help="gloo's own is an all-reduce and sends twice the bytes")  # fmt: skip
    parser.add_argument("--turn-seconds", type=positive, default=900.0, help="longest that a turn may take")
    parser.add_argument("--out", metavar="FOLDER", default="runs/bench", help="where results go")
    parser.add_argument("--job", metavar="FOLDER", help="where the model is kept (default: <out>/job)")
    parser.set_defaults(run=_e2e)


def _e2e(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from fsdp_ciera.bench.e2e import E2EOptions, run_e2e
    from fsdp_ciera.bench.job import JobOptions
    from fsdp_ciera.bench.run import RunOptions

    output = Path(parsed.out)
    given = parsed.rate or ("none" if parsed.loopback else "200mbit")
    run = RunOptions(
        hosts=parsed.hosts,
        ranks_per_host=parsed.ranks_per_host,
        rate=None if given == "none" else given,
        loopback=parsed.loopback,
        rounds=parsed.rounds,
        warmup_steps=parsed.warmup_steps,
        timed_steps=parsed.steps,
        turn_seconds=parsed.turn_seconds,
        reduce_scatter=parsed.reduce_scatter,
        job=JobOptions(learning_rate=parsed.lr, tokens_per_rank=parsed.tokens, reduce_dtype=parsed.reduce_dtype),
    )
    job = Path(parsed.job) if parsed.job else output / "job"
    return run_e2e(E2EOptions(run=run, contenders=parsed.contenders, output=output, job=job))


def _add_compare(benches: _Commands) -> None:
    parser = benches.add_parser(
        "compare",
        help="do runs agree? or: how do ratios move with the link?",
        description="Two results.json of equal settings: do the ratios to stock FSDP2 agree within 10 %% (exit 1 if not)? "
        "Several of different rates: a picture of ratios by rate.",
    )
    parser.add_argument("results", nargs="+", metavar="RESULTS.json")
    parser.add_argument("--plot", metavar="PATH", help="draw ratios by rate there (PNG)")
    parser.set_defaults(run=_compare)


def _compare(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from fsdp_ciera.bench.e2e import run_compare

    return run_compare([Path(path) for path in parsed.results], Path(parsed.plot) if parsed.plot else None)

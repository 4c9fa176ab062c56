"""`ciera simulate`: the arguments."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from fsdp_ciera.cli.arguments import count, not_negative, positive

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_simulate(commands: _Commands) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "simulate",
        help="project measured or planned training steps to other clusters, with the projection's own error",
        description="A trace-driven event simulator: recorded steps (or a model's planned ones) on 1 to 16,384 GPUs. It "
        "refuses to project (exit code 3) unless it predicts measured iterations that it was not calibrated on within 4 %.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("traces", nargs="*", metavar="TRACE.json", help="recorded steps, stock FSDP2's among them; "
                        "without any and without --model, those of the largest run of --calibrate")  # fmt: skip
    parser.add_argument("--model", help="instead of traces: a model of the paper, or a folder with a config.json")
    measured = parser.add_argument_group("measured runs, output folders of `ciera bench e2e`")
    measured.add_argument(
        "--calibrate", nargs="+", default=[], metavar="FOLDER", help="learn the stand's constants here"
    )
    measured.add_argument("--validate", nargs="+", default=[], metavar="FOLDER", help="compare predictions with these; those "
                          "with hosts and rate of a calibrated run do not count")  # fmt: skip
    measured.add_argument("--unvalidated", action="store_true", help="project all the same, and stamp every output")
    measured.add_argument("--save-calibration", metavar="PATH", help="write the calibration there (JSON)")
    where = parser.add_argument_group("where it shall run")
    where.add_argument("--gpus", nargs="+", type=count, default=[8, 16, 64, 256, 1024, 4096, 16384], metavar="N",
                       help="world sizes")  # fmt: skip
    where.add_argument("--ranks-per-node", type=count, default=8, help="GPUs of a node")
    where.add_argument("--topology", choices=("flat", "hierarchical"), default="flat", help="of our gathers")
    where.add_argument("--between-nodes", metavar="SPEED", default="8GB/s 30us",
                       help="bus bandwidth and latency of an all-gather across nodes")  # fmt: skip
    where.add_argument("--in-node", metavar="SPEED", default="230GB/s 15us", help="the same inside a node")
    where.add_argument(
        "--hop-us", type=not_negative, default=9.6, help="microseconds of a hop between nodes (NCCL's own model)"
    )
    where.add_argument("--in-node-hop-us", type=not_negative, default=3.4, help="the same inside a node")
    where.add_argument("--rate", metavar="RATE", help="instead of links: the calibrated stand at this rate, such as 200mbit, "
                       "or `none` for no limit; its ranks go on sharing its cores")  # fmt: skip
    where.add_argument("--schedule", choices=("auto", "serial", "overlapped"), default="auto",
                       help="auto: serial with --rate, overlapped with links")  # fmt: skip
    work = parser.add_argument_group("what is not recorded")
    work.add_argument("--speedup", type=positive, default=1.0, help="of compute and codecs over the recorded machine's")
    work.add_argument("--compute-seconds", type=positive, help="with --model: of a layer's forward")
    work.add_argument("--flops", type=positive, default=125e12, help="with --model: FLOP/s that a GPU really reaches")
    work.add_argument("--tokens", type=count, default=4096, help="with --model: tokens a GPU and step")
    work.add_argument("--backward-factor", type=positive, default=2.0, help="with --model: backward over forward")
    work.add_argument(
        "--reduce-dtype", choices=("float32", "bfloat16"), default="float32", help="with --model: of gradients"
    )
    work.add_argument("--lr", type=positive, default=1e-5, help="learning rate, for change rates")
    work.add_argument("--table", help="change rates: a shipped table or the path of one; the model's own by default")
    work.add_argument(
        "--costs", default="a100", help="codec costs of derived contenders: a100, this-machine, or a JSON file"
    )
    work.add_argument("--budget", metavar="BYTES", default="8GiB", help="caches on each rank, or none for no limit")
    out = parser.add_argument_group("output")
    out.add_argument("--contenders", nargs="+", metavar="KEY", help="only these, and stock FSDP2")
    out.add_argument("--json", metavar="PATH", help="write everything there; - for stdout, without tables")
    out.add_argument("--plot", metavar="PATH", help="draw timelines there (PNG): stock FSDP2 above ours")
    out.add_argument("--plot-contender", metavar="KEY", default="default", help="whose timeline is drawn below")
    out.add_argument(
        "--plot-gpus", type=count, metavar="N", help="at which world size; the smallest with several nodes"
    )
    out.add_argument("--plot-projection", metavar="PATH", help="draw iterations over the number of GPUs there (PNG)")
    parser.set_defaults(run=_simulate)


def _simulate(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from fsdp_ciera.errors import SimulationError
    from fsdp_ciera.simulator.run import SimulateOptions, run_simulate

    def path(text: str | None) -> Path | None:
        return None if text is None else Path(text)

    try:
        return run_simulate(
            SimulateOptions(
                traces=tuple(map(Path, parsed.traces)),
                model=parsed.model,
                calibrate=tuple(map(Path, parsed.calibrate)),
                validate=tuple(map(Path, parsed.validate)),
                unvalidated=parsed.unvalidated,
                save_calibration=path(parsed.save_calibration),
                gpus=tuple(sorted(set(parsed.gpus))),
                ranks_per_node=parsed.ranks_per_node,
                topology=parsed.topology,
                between_nodes=parsed.between_nodes,
                in_node=parsed.in_node,
                hop_seconds=1e-6 * parsed.hop_us,
                in_node_hop_seconds=1e-6 * parsed.in_node_hop_us,
                rate=parsed.rate,
                schedule=parsed.schedule,
                speedup=parsed.speedup,
                compute_seconds=parsed.compute_seconds,
                flops_per_second=parsed.flops,
                tokens=parsed.tokens,
                backward_factor=parsed.backward_factor,
                reduce_dtype=parsed.reduce_dtype,
                learning_rate=parsed.lr,
                table=parsed.table,
                costs=parsed.costs,
                budget=parsed.budget,
                contenders=None if parsed.contenders is None else tuple(parsed.contenders),
                json_path=parsed.json,
                plot=path(parsed.plot),
                plot_contender=parsed.plot_contender,
                plot_gpus=parsed.plot_gpus,
                plot_projection=path(parsed.plot_projection),
            )
        )
    except SimulationError as error:
        print(f"ciera: {error}", file=sys.stderr)
        return 2

"""`ciera bench e2e`: prepare, measure, report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fsdp_ciera.bench.ablation import ablation_steps
from fsdp_ciera.bench.compare import compare
from fsdp_ciera.bench.contenders import chosen
from fsdp_ciera.bench.job import prepare
from fsdp_ciera.bench.netns import check_available
from fsdp_ciera.bench.options import RunOptions
from fsdp_ciera.bench.report import (
    exit_code,
    verdicts,
    write_csv,
    write_steps_csv,
)
from fsdp_ciera.bench.results import Results
from fsdp_ciera.bench.run import cluster_of, measure_contenders
from fsdp_ciera.cli.bench_e2e import E2EOptions
from fsdp_ciera.cli.tables.bench_e2e import ablation_table, comparison_table, print_report, print_verdicts
from fsdp_ciera.errors import NetnsError, RankError

_LEAST_WIDTH = 120  # the tables'


def run_e2e(options: E2EOptions) -> int:
    """Measures and reports. Returns the exit code: 0, or 1 if bits differ that must not.

    Returns 2, with one line on stderr, if nothing can be measured.
    """
    run = options.settings
    try:
        contenders = chosen(options.contenders or None)
        cluster_of(run)  # reports a wrong rate or number of hosts before anything is prepared
        if not run.loopback:
            check_available()
    except (ValueError, NetnsError) as error:
        return _say(error, run)
    console = Console(width=max(Console().width, _LEAST_WIDTH))
    able = []
    for contender in contenders:
        reason = contender.lacks(run.hosts, run.ranks_per_host)
        if reason is None:
            able.append(contender)
        else:
            console.print(f"left out: {contender.label}: {reason}", style="yellow", highlight=False)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which accelerate imports, looks for one and warns
    console.print("preparing the model ...")
    model = prepare(options.job_folder or options.output / "job")
    console.print(f"{model.name}, {model.num_parameters / 1e6:.1f} M parameters", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("starting the ranks", total=None)
            results, traces = measure_contenders(
                run,
                model,
                able,
                lambda text, done, total: bar.update(task, description=text, completed=done, total=total),
            )
    except (NetnsError, RankError) as error:
        return _say(error, run)
    return report(results, traces, options.output, console)


def report(results: Results, traces: dict[str, object], output: Path, console: Console) -> int:
    """Prints and writes everything. Returns the exit code."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text(results.to_json())
    write_csv(results, output / "results.csv")
    write_steps_csv(results, output / "steps.csv")
    (output / "traces").mkdir(exist_ok=True)
    for key, trace in traces.items():
        (output / "traces" / f"{key}.json").write_text(json.dumps(trace, indent=1) + "\n")
    print_report(console, results)
    console.print(ablation_table(results))
    all_verdicts = verdicts(results)
    print_verdicts(console, all_verdicts)
    try:
        from fsdp_ciera.cli.figures.bench_e2e import draw_ablation, draw_iterations, draw_losses

        draw_iterations(results, output / "iterations.png")
        if any(step.reason is None for step in ablation_steps(results)):
            draw_ablation(results, output / "ablation.png")
        draw_losses(results, output / "losses.png")
    except ImportError:
        console.print("no pictures: matplotlib is not installed (pip install 'fsdp-ciera[plot]')", style="yellow")
    console.print(
        f"see {output}/results.json, results.csv, steps.csv, traces, iterations.png, ablation.png, losses.png"
    )
    return exit_code(all_verdicts)


def run_compare(paths: Sequence[Path], plot: Path | None) -> int:
    """Compares runs. Returns the exit code: 0, 1 if two runs do not agree, or 2 for files that are not results."""
    console = Console(width=max(Console().width, _LEAST_WIDTH))
    try:
        runs = [Results.load(path) for path in paths]
        agree = True
        if len(runs) == 2:
            comparison = compare(*runs)
            console.print(comparison_table(comparison))
            agree = comparison.agrees
        if plot is not None:
            from fsdp_ciera.cli.figures.bench_e2e import draw_rates

            draw_rates(runs, plot)
            console.print(f"see {plot}")
    except (OSError, ValueError) as error:
        print(f"ciera bench compare: {error}", file=sys.stderr)
        return 2
    return 0 if agree else 1


def _say(error: Exception, run: RunOptions) -> int:
    hint = (
        ""
        if run.loopback or not isinstance(error, NetnsError)
        else " (--loopback needs no root, and throttles nothing)"
    )
    print(f"ciera bench e2e: {error}{hint}", file=sys.stderr)
    return 2

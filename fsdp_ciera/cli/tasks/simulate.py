"""Runs `ciera simulate`, from options to output: calibrate, validate, refuse or project, show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fsdp_ciera.cli.figures.simulate import Panel, draw_projection, draw_timeline
from fsdp_ciera.cli.simulate import SimulateOptions
from fsdp_ciera.cli.tables.simulate import projection_table, validation_table
from fsdp_ciera.cli.tasks.plan import codec_costs, meta_model
from fsdp_ciera.errors import CieraFileError, MissingPackageError, SimulationError, UnitError
from fsdp_ciera.policies.links import Link, parse_link
from fsdp_ciera.policies.tables import load_table, table_for_model
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.profiling.trace import Trace
from fsdp_ciera.simulator.modelled import ComputeCosts, ModelParameters
from fsdp_ciera.simulator.network import Network, Place
from fsdp_ciera.simulator.place import Machine
from fsdp_ciera.simulator.project import (
    ModelJob,
    Point,
    ProjectedJob,
    SimulatedCluster,
    TraceJob,
    label_of,
    place_at,
    project,
    schedule,
)
from fsdp_ciera.simulator.report import STAMP, as_json
from fsdp_ciera.simulator.runs import MeasuredRun, RunSetting, load_run, load_trace
from fsdp_ciera.simulator.schemes import Assumptions
from fsdp_ciera.simulator.validate import BAR, Predictor, Validation, validate
from fsdp_ciera.units import format_share, parse_rate

REFUSED = 3
"""The exit code where no measured run vouches for the projection."""
_WIDTH = 140
"""Characters in a line of a table that goes to a file or a pipe."""


def run_simulate(options: SimulateOptions) -> int:
    """Runs the command. Returns 0, or 3 where measured runs do not vouch for the projection.

    Raises errors of `fsdp_ciera.errors`, which the command line prints in one line.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    is_quiet = options.json_path == "-"
    if options.validate and not options.calibrate:
        raise SimulationError(
            "--validate needs --calibrate: folders with other rates or hosts to learn the constants from"
        )
    calibration_runs = [load_run(folder) for folder in options.calibrate]
    predictor = Predictor(calibration_runs) if calibration_runs else None
    validation = Validation()
    if predictor is not None:
        validation_runs = [load_run(folder) for folder in options.validate]
        _check_same_job([*calibration_runs, *validation_runs])
        validation = validate(predictor, validation_runs)
        if options.save_calibration is not None:
            _write("--save-calibration", options.save_calibration, predictor.calibration.to_json())
    if not is_quiet and validation.checks:
        console.print(validation_table(validation))
    is_unvalidated = not validation.passes
    if is_unvalidated and not options.unvalidated:
        _refuse(validation)
        return REFUSED
    job, cluster, assumptions, notes = _prepare(options, predictor, calibration_runs)
    keys = _keys(options, job)
    points = project(job, cluster, options.world_sizes, keys, assumptions)
    notes = [validation.verdict(), *notes]
    if options.json_path is not None:
        calibration = None if predictor is None else predictor.calibration
        report = as_json(points, validation, calibration, notes, is_unvalidated)
        text = json.dumps(report, indent=2) + "\n"
        if is_quiet:
            print(text, end="")
        else:
            _write("--json", Path(options.json_path), text)
    if not is_quiet:
        validated = {check.contender for check in validation.counted if abs(check.error) <= BAR}
        _show(console, options, job, points, notes, is_unvalidated, sorted(validated))
    _draw(options, job, cluster, assumptions, points, is_unvalidated)
    return 0


def _check_same_job(runs: Sequence[MeasuredRun]) -> None:
    for run in runs[1:]:
        if run.job != runs[0].job:
            raise SimulationError(
                f"{str(run.folder)!r} trained another job than {str(runs[0].folder)!r}: {run.job}; allowed: {runs[0].job}"
            )


def _refuse(validation: Validation) -> None:
    console = Console(stderr=True, width=_WIDTH)
    console.print(f"ciera: no projection: {validation.verdict()}", highlight=False, markup=False)
    for check in validation.counted:
        if abs(check.error) > BAR:
            text = (
                f"  {check.contender} on {check.setting}: {format_share(check.error, signed=True)} (predicted "
                f"{check.predicted_seconds:.3f} s, measured {check.measured_seconds:.3f} s; its iterations scatter by "
                f"{format_share(check.measured_scatter)})"
            )
            console.print(text, highlight=False, markup=False)
    console.print("  --unvalidated projects all the same, and stamps every output", highlight=False, markup=False)


def _prepare(
    options: SimulateOptions, predictor: Predictor | None, runs: Sequence[MeasuredRun]
) -> tuple[ProjectedJob, SimulatedCluster, Assumptions, list[str]]:
    """Returns the job, the cluster, the assumptions, and notes that say in words what is assumed."""
    notes: list[str] = []
    between = _link("--between-nodes", options.between_nodes)
    inside = _link("--in-node", options.in_node)
    is_stand = options.rate is not None
    is_serial = is_stand if options.schedule == "auto" else options.schedule == "serial"
    if options.model is not None:
        table, table_notes = table_for_model(options.model)
    else:
        table, table_notes = table_for_model("smollm2-moe")
    if options.table is not None:
        table, table_notes = load_table(options.table), ()
    costs, costs_note = codec_costs(options.costs, CieraPolicy())
    assumptions = Assumptions(
        table=table,
        learning_rate=options.learning_rate,
        costs=costs,
        between=between,
        inside=inside,
        overlap=not is_serial,
        budget=None if options.budget == "none" else options.budget,
        is_hierarchical=options.topology == "hierarchical",
    )
    if is_stand:
        job, cluster, stand_notes = _on_the_stand(options, predictor, is_serial)
        bytes_per_second = cluster.network(Place(world_size=2)).rate_bytes_per_second
        assumptions = replace(assumptions, between=Link(0.0, min(bytes_per_second, 1e12)), inside=Link(0.0, 1e12))
        notes += stand_notes
    else:
        network = Network.of_links(between, inside, 1e-6 * options.hop_us, 1e-6 * options.in_node_hop_us)
        cluster = SimulatedCluster(
            ranks_per_host=options.ranks_per_node, network=lambda _: network, is_serial=is_serial
        )
        job, job_notes = _job(options, runs)
        notes += [
            f"links: {network.label}; a hop {options.hop_us:g} us between nodes, "
            f"{options.in_node_hop_us:g} us inside (NCCL's tuning model); every rank has a device of its own",
            *job_notes,
        ]
    notes.append(
        "schedule: serial, collectives block"
        if is_serial
        else "schedule: overlapped as FSDP2 prefetches; the stand, where nothing overlaps, cannot vouch for that"
    )
    if not is_stand:
        notes.append("derived contenders: what nobody recorded follows from stock FSDP2's step; " + costs_note)
        notes += [f"change rates: {table.name} at a learning rate of {options.learning_rate:g}", *table_notes]
    notes.append("shards are cut evenly (FSDP2 pads: beyond some hundred ranks share parameters among fewer, HSDP)")
    return job, cluster, assumptions, notes


def _on_the_stand(
    options: SimulateOptions, predictor: Predictor | None, is_serial: bool
) -> tuple[ProjectedJob, SimulatedCluster, list[str]]:
    if predictor is None:
        raise SimulationError(
            "--rate is one of the measured stand: give --calibrate FOLDER, or --between-nodes instead"
        )
    if options.model is not None:
        raise SimulationError("--rate goes with recorded traces; --model goes with --between-nodes and --in-node")
    assert options.rate is not None
    bits_per_second = None if options.rate == "none" else parse_rate(options.rate)
    stand = predictor

    def step_at(key: str, place: Place) -> Trace | None:
        setting = RunSetting(
            hosts=place.hosts, ranks_per_host=place.ranks_per_host, rate_bits_per_second=bits_per_second
        )
        return stand.trace_for(key, setting)

    def correct(key: str, place: Place, own_seconds: float, network_seconds: float) -> float:
        correction = stand.calibration.correction_of(key, place)
        return own_seconds + correction.network_scale * network_seconds + correction.rest_seconds

    traces = {trace.contender: trace for trace in stand.traces}
    job = TraceJob(list(traces.values()), stand.calibration.machine, step_at=step_at)
    cluster = SimulatedCluster(
        ranks_per_host=options.ranks_per_node,
        network=lambda place: stand.calibration.network(bits_per_second, place),
        is_serial=is_serial,
        correct=correct if is_serial else None,
    )
    num_cores = stand.calibration.num_cores
    return job, cluster, [f"the measured stand at {options.rate}: its ranks share {num_cores} cores"]


def _job(options: SimulateOptions, runs: Sequence[MeasuredRun]) -> tuple[ProjectedJob, list[str]]:
    if options.model is not None:
        if options.traces:
            raise SimulationError("--model and traces are both there: give one of them")
        costs = ComputeCosts(
            layer_seconds=options.compute_seconds,
            flops_per_second=options.flops_per_second,
            tokens=options.tokens,
            backward_factor=options.backward_factor,
        )
        reduce_item_bytes = {"float32": 4, "bfloat16": 2}[options.reduce_dtype]
        model = ModelParameters.of(meta_model(options.model))
        return ModelJob(options.model, model, costs, reduce_item_bytes), [costs.describe()]
    if options.traces:
        traces = [load_trace(path) for path in options.traces]
    else:
        with_traces = [run for run in runs if run.traces]
        if not with_traces:
            raise SimulationError("nothing to simulate: give traces, --model, or --calibrate folders with traces")
        traces = list(max(with_traces, key=lambda run: run.setting.place.world_size).traces.values())
    job = TraceJob(traces, Machine(), speedup=options.speedup)
    return job, [f"compute: as recorded, without sharing cores, {options.speedup:g} times as fast"]


def _keys(options: SimulateOptions, job: ProjectedJob) -> list[str]:
    known_keys = job.keys()
    if not options.contenders:
        return known_keys
    unknown_keys = [key for key in options.contenders if key not in known_keys]
    if unknown_keys:
        raise SimulationError(f"contender {unknown_keys[0]!r} is not known here, allowed: {', '.join(known_keys)}")
    return [key for key in known_keys if key == "fsdp2" or key in options.contenders]


def _show(
    console: Console,
    options: SimulateOptions,
    job: ProjectedJob,
    points: Sequence[Point],
    notes: Sequence[str],
    is_unvalidated: bool,
    validated: Sequence[str],
) -> None:
    sizes = list(dict.fromkeys(point.world_size for point in points))
    max_columns = 5  # that fit
    for start in range(0, len(sizes), max_columns):
        shown_sizes = sizes[start : start + max_columns]
        shown_points = [point for point in points if point.world_size in shown_sizes]
        console.print(projection_table(job.name, _where(options), shown_points, is_unvalidated, validated))
    for note in notes:
        console.print(f"- {note}", highlight=False, markup=False)
    if is_unvalidated:
        console.print(STAMP, style="bold red")


def _where(options: SimulateOptions) -> str:
    nodes = f"{options.ranks_per_node} a node, {options.topology} gathers"
    return f"{nodes}, {options.rate}" if options.rate else f"{nodes}, {options.between_nodes} between nodes"


def _draw(
    options: SimulateOptions,
    job: ProjectedJob,
    cluster: SimulatedCluster,
    assumptions: Assumptions,
    points: Sequence[Point],
    is_unvalidated: bool,
) -> None:
    try:
        if options.plot is not None:
            multi_node_sizes = [size for size in options.world_sizes if size > options.ranks_per_node]
            size = options.plot_gpus or min(multi_node_sizes or [max(options.world_sizes)])
            place = place_at(size, options.ranks_per_node)
            title = f"one step of {job.name}, on {size:,} ranks, {_where(options)}"
            draw_timeline(title, _panels(options, job, cluster, assumptions, place), options.plot, is_unvalidated)
        if options.plot_projection is not None:
            title = f"projection of {job.name}, {_where(options)}"
            draw_projection(title, points, options.plot_projection, is_unvalidated)
    except ImportError:
        raise MissingPackageError("--plot needs matplotlib: pip install 'fsdp-ciera[plot]'") from None
    except OSError as error:
        raise CieraFileError(f"--plot: {error.filename!r} cannot be written: {error.strerror}") from None


def _panels(
    options: SimulateOptions, job: ProjectedJob, cluster: SimulatedCluster, assumptions: Assumptions, place: Place
) -> list[Panel]:
    keys = dict.fromkeys(("fsdp2", *_keys(replace(options, contenders=(options.plot_contender,)), job)))
    panels = []
    for key in keys:
        for is_serial in (True, False):
            panel_cluster = replace(cluster, is_serial=is_serial)
            panel_assumptions = replace(assumptions, overlap=not is_serial)
            _, step_schedule, _ = schedule(job, panel_cluster, place, key, panel_assumptions)
            panels.append(Panel(f"{label_of(key)}, {'serial' if is_serial else 'overlapped'}", step_schedule))
    return panels


def _link(option: str, text: str) -> Link:
    try:
        return parse_link(text)
    except UnitError as error:
        raise UnitError(f"{option}: {error}") from None


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CieraFileError(f"{option}: {str(path)!r} cannot be written: {error.strerror}") from None

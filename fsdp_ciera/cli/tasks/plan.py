"""`ciera plan`: forecasts what fsdp_ciera brings a model, given by name or folder, on a cluster, given in numbers. No GPU.

model on "meta"  +  cluster, codec costs, change rates  ->  fsdp_ciera.planning.forecast  ->  tables, picture, JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable
from torch import nn

from fsdp_ciera.backends import backend_of
from fsdp_ciera.cli.figures.plan import draw_plan
from fsdp_ciera.cli.plan import PlanOptions
from fsdp_ciera.cli.tables.library import plan_table
from fsdp_ciera.errors import CieraFileError, MissingPackageError, UnitError
from fsdp_ciera.planning.forecast import Cluster, Forecast, ForecastRow, forecast
from fsdp_ciera.planning.measure import measure_costs
from fsdp_ciera.policies.costs import CodecCost
from fsdp_ciera.policies.links import Link, parse_link
from fsdp_ciera.policies.machines import MACHINES
from fsdp_ciera.policies.tables import load_table, table_for_model
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.units import format_in

THIS_MACHINE = "this-machine"
_WIDTH = 120
"""Characters in a line of tables that go to a file or pipe."""


def run_plan(options: PlanOptions) -> int:
    """Plans, shows the plan, and returns the exit code 0. Raises `CieraPolicyError`, `CieraFileError`, `UnitError` or
    `MissingPackageError` for an option that is not allowed, and for a file or package that is missing."""
    changes: dict[str, Any] = {
        "cache_budget": None if options.budget == "none" else options.budget,
        "learning_rate": options.lr,
        "micro_batches": options.micro_batches,
        "topology": options.topology,
    }
    if options.codecs:
        changes["codecs"] = options.codecs
    policy = CieraPolicy.paper(**changes) if options.paper else CieraPolicy(**changes)
    cluster = Cluster(
        world_size=options.world_size,
        ranks_per_node=min(options.ranks_per_node, options.world_size),
        between_nodes=_link("--between-nodes", options.between_nodes),
        in_node=_link("--in-node", options.in_node),
    )
    costs, costs_note = codec_costs(options.costs, policy)
    table, notes = (load_table(options.table), ()) if options.table else table_for_model(options.model)
    projection = forecast(
        meta_model(options.model),
        policy,
        cluster,
        costs=costs,
        overlap=options.costs != THIS_MACHINE,
        table=table,
        reduce_dtype=getattr(torch, options.reduce_dtype),
    )
    notes = (costs_note, *notes, *projection.notes)
    if options.json_path == "-":
        print(json.dumps(_as_json(options, projection, notes), indent=2))
    else:
        _show(options, projection, notes)
        if options.json_path is not None:
            text = json.dumps(_as_json(options, projection, notes), indent=2) + "\n"
            try:
                Path(options.json_path).write_text(text)
            except OSError as error:
                raise CieraFileError(f"--json: {options.json_path!r} cannot be written: {error.strerror}") from None
    if options.plot is not None:
        try:
            draw_plan(options.model, projection, options.plot)
        except ImportError:
            raise MissingPackageError("--plot needs matplotlib: pip install 'fsdp-ciera[plot]'") from None
        except OSError as error:
            raise CieraFileError(f"--plot: {str(options.plot)!r} cannot be written: {error.strerror}") from None
    return 0


def meta_model(name: str) -> nn.Module:
    """A causal LM on "meta": one of the paper's models by name, or what the config.json of a folder describes.

    Raises `CieraFileError` where there is neither, `MissingPackageError` without transformers.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        from fsdp_ciera.recipes.build import prepare_transformers
        from fsdp_ciera.recipes.models import MODELS
    except ImportError:
        raise MissingPackageError("`ciera plan` needs transformers: pip install 'fsdp-ciera[recipes]'") from None
    with torch.device("meta"):
        if name in MODELS:
            model: nn.Module = MODELS[name].model_class()(MODELS[name].config())
            return model
        prepare_transformers()  # registers the models that only recipes know
        if not (Path(name) / "config.json").is_file():
            raise CieraFileError(
                f"model {name!r} is neither a folder with a config.json nor one of {', '.join(sorted(MODELS))}"
            )
        try:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, local_files_only=True))
        except (OSError, ValueError) as error:
            raise CieraFileError(f"model {name!r} cannot be read: {str(error).partition(chr(10))[0]}") from None
        return model


def _link(option: str, text: str) -> Link:
    try:
        return parse_link(text)
    except UnitError as error:
        raise UnitError(f"{option}: {error}") from None


def codec_costs(name: str, policy: CieraPolicy) -> tuple[Mapping[str, CodecCost], str]:
    """Codec costs and a note that says where they come from. `name` is a machine of `MACHINES`, `"this-machine"` or the path of
    a JSON file. Raises `CieraFileError` if it is none of these, or if the file lacks a codec of the policy."""
    if name in MACHINES:
        return MACHINES[
            name
        ], f"codec costs of {name}: a projection from DietGPU's published figures, not measured by us"
    if name == THIS_MACHINE:
        costs = measure_costs(policy.codecs, torch.bfloat16, policy.block_size, backend_of(torch.device("cpu")))
        return costs, "codec costs: measured on this machine's CPU just now; encoding is not overlapped"
    path = Path(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        costs = {codec: CodecCost.from_json(values) for codec, values in content.items()}
    except OSError:
        allowed = ", ".join([*MACHINES, THIS_MACHINE])
        raise CieraFileError(f"--costs: got {name!r}, allowed: {allowed}, or the path of a JSON file") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CieraFileError(f"--costs: {name!r} does not hold codec costs: {error!r}") from None
    missing = [codec for codec in policy.codecs if codec != "raw" and codec not in costs]
    if missing:
        raise CieraFileError(f"--costs: {name!r} says nothing of {missing[0]!r}")
    return costs, f"codec costs: {name}"


def _as_json(options: PlanOptions, projection: Forecast, notes: tuple[str, ...]) -> dict[str, Any]:
    return {"model": options.model, **projection.to_dict(), "notes": list(notes)}


def _show(options: PlanOptions, projection: Forecast, notes: tuple[str, ...]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    cluster = projection.cluster
    console.print(
        f"[bold]{options.model}[/], {projection.num_parameters / 1e9:.2f} B parameters, on {cluster.world_size} ranks, "
        f"{cluster.local_size} a node; {cluster.between_nodes} between nodes, {cluster.in_node} inside"
    )
    title = f"the plan: {projection.topology} gathers, bytes and seconds of one rank and step"
    console.print(plan_table(projection.plan, title))
    console.print(_contenders(projection))
    for note in notes:
        console.print(f"- {note}", highlight=False, markup=False)
    ours, stock = projection.contenders[-1], projection.contenders[0]
    console.print(_verdict(projection, stock, ours), style="bold", highlight=False)


def _verdict(projection: Forecast, stock: ForecastRow, ours: ForecastRow) -> str:
    if ours.slow_bytes == stock.slow_bytes:
        return "Nothing to gain here: every shard goes raw, as in stock FSDP2."
    where = "inside the node" if projection.cluster.num_nodes == 1 else "across nodes"
    speed = stock.gather_seconds / ours.gather_seconds
    seconds = f"{speed:.2f}x fewer seconds" if speed >= 1 else f"{1 / speed:.2f}x MORE seconds"
    return (
        f"Gathers: {stock.slow_bytes / ours.slow_bytes:.2f}x fewer bytes {where}, {seconds} than FSDP2 (a projection)."
    )


def _contenders(projection: Forecast) -> RichTable:
    table = RichTable(
        title="beside the others, one rank and step (seconds: of the links, without overlap; a projection)"
    )
    table.add_column("")
    for heading in ("gathers GB", "across nodes GB", "gathers s", "reduce GB", "extra GiB"):
        table.add_column(heading, justify="right")
    table.add_column("scheme")
    for contender in projection.contenders:
        table.add_row(
            contender.name,
            format_in(contender.gather_bytes, "GB", 2),
            format_in(contender.slow_bytes, "GB", 2),
            f"{contender.gather_seconds:,.3f}",
            format_in(contender.reduce_bytes, "GB", 2),
            format_in(contender.extra_memory_bytes, "GiB", 2),
            contender.source,
            style="bold" if contender is projection.contenders[-1] else None,
        )
    return table

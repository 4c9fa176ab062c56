"""Builds a `Trace` from what instruments recorded of some steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from torch import nn

from fsdp_ciera._compat import (
    FSDPModule,
    FSDPParamGroup,
    gather_dtype,
    param_groups,
    param_names_and_sizes,
)
from fsdp_ciera.profiling.instruments import Recorded
from fsdp_ciera.profiling.trace import Event, Trace, TracedGroup


@dataclass(frozen=True)
class RecordedStep:
    """One step of this rank: when it began and ended, what was recorded of it in order of beginning, and when its phases began.

    All times are seconds of one clock.
    """

    began: float
    ended: float
    recorded: Sequence[Recorded]
    phases: Sequence[tuple[str, float]]


def param_groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """The parameter groups of a model, in the order of its modules."""
    modules = (module for module in model.modules() if isinstance(module, FSDPModule))
    return [param_group for module in modules for param_group in param_groups(module)]


def describe_param_groups(model_param_groups: Sequence[FSDPParamGroup]) -> tuple[TracedGroup, ...]:
    """Name and values per rank of each parameter group. Call it after a first forward."""
    described = []
    for param_group in model_param_groups:
        name, _, sizes = param_names_and_sizes(param_group, gather_dtype(param_group))
        described.append(TracedGroup(name=name or "(root)", values_per_rank=sum(sizes)))
    return tuple(described)


def build_trace(steps: Sequence[RecordedStep], model_param_groups: Sequence[FSDPParamGroup], **facts: object) -> Trace:
    """The median step. Raises `ValueError` where the steps did not do the same things in the same order.

    `facts` are the fields of `Trace` that instruments cannot know. Time between two recorded stretches is `Compute`, of the
    parameter group gathered last.
    """
    indices = {id(param_group): index for index, param_group in enumerate(model_param_groups)}
    sequences = [_events(step, indices) for step in steps]
    shape = [(event.node, event.phase, event.group, event.num_collectives) for event in sequences[0]]
    for sequence in sequences[1:]:
        if [(event.node, event.phase, event.group, event.num_collectives) for event in sequence] != shape:
            raise ValueError("the recorded steps differ in what they gathered: record steps of equal kind")
    events = []
    for repeats in zip(*sequences, strict=True):
        seconds = median(event.seconds for event in repeats)
        payload_bytes = round(median(event.payload_bytes for event in repeats))
        first = repeats[0]
        events.append(Event(node=first.node, phase=first.phase, group=first.group, seconds=seconds,
                            payload_bytes=payload_bytes, num_collectives=first.num_collectives))  # fmt: skip
    return Trace(
        groups=describe_param_groups(model_param_groups),
        events=tuple(events),
        iteration_seconds=tuple(step.ended - step.began for step in steps),
        **facts,  # type: ignore[arg-type]
    )


def _events(step: RecordedStep, indices: dict[int, int]) -> list[Event]:
    events: list[Event] = []
    position = step.began
    gathered: int | None = None
    phases = list(step.phases)

    def compute(until: float) -> None:
        """Adds `Compute` from `position` up to `until`, cut where phases change."""
        nonlocal position
        while position < until:
            while len(phases) > 1 and phases[1][1] <= position:
                phases.pop(0)
            phase = phases[0][0] if phases else "forward"
            end = min(until, phases[1][1]) if len(phases) > 1 else until
            param_group = None if phase == "optimizer" else gathered
            before = events[-1] if events else None
            if before is not None and before.node == "Compute" and (before.phase, before.group) == (phase, param_group):
                seconds = events.pop().seconds + end - position
            else:
                seconds = end - position
            events.append(Event(node="Compute", phase=phase, group=param_group, seconds=seconds))
            position = end

    for recorded in step.recorded:
        param_group = indices.get(id(recorded.param_group)) if recorded.param_group is not None else None
        compute(recorded.start)
        if recorded.node in ("AllGather", "InNode", "Hash") and param_group is not None:
            gathered = param_group
        events.append(Event(node=recorded.node, phase=recorded.phase, group=param_group, seconds=recorded.seconds,
                            payload_bytes=recorded.payload_bytes,
                            num_collectives=recorded.num_collectives))  # fmt: skip
        position = max(position, recorded.end)
    compute(step.ended)
    return events

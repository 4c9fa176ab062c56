"""What instruments recorded of some steps -> a `Trace`."""

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
from fsdp_ciera.profiling.trace import Event, Group, Trace


@dataclass(frozen=True)
class RecordedStep:
    """One step of this rank: seconds on one clock, what was recorded in order of beginning, and where phases began."""

    began: float
    ended: float
    recorded: Sequence[Recorded]
    phases: Sequence[tuple[str, float]]


def groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """The parameter groups of a model, in the order of its modules."""
    return [group for module in model.modules() if isinstance(module, FSDPModule) for group in param_groups(module)]


def describe_groups(groups: Sequence[FSDPParamGroup]) -> tuple[Group, ...]:
    """Names, and what each rank gathers; after a first forward."""
    described = []
    for group in groups:
        name, _, sizes = param_names_and_sizes(group, gather_dtype(group))
        described.append(Group(name=name or "(root)", values_per_rank=sum(sizes)))
    return tuple(described)


def build_trace(steps: Sequence[RecordedStep], groups: Sequence[FSDPParamGroup], **facts: object) -> Trace:
    """The median step. Raises `ValueError` where the steps did not do the same things in the same order.

    `facts` are the fields of `Trace` that instruments cannot know. Time between two recorded stretches is `Compute`, of the
    group gathered last.
    """
    index = {id(group): number for number, group in enumerate(groups)}
    sequences = [_events(step, index) for step in steps]
    shape = [(event.node, event.phase, event.group, event.num_collectives) for event in sequences[0]]
    for sequence in sequences[1:]:
        if [(event.node, event.phase, event.group, event.num_collectives) for event in sequence] != shape:
            raise ValueError("the recorded steps differ in what they gathered: record steps of equal kind")
    events = []
    for same in zip(*sequences, strict=True):
        seconds = median(event.seconds for event in same)
        payload_bytes = round(median(event.payload_bytes for event in same))
        first = same[0]
        events.append(Event(node=first.node, phase=first.phase, group=first.group, seconds=seconds,
                            payload_bytes=payload_bytes, num_collectives=first.num_collectives))  # fmt: skip
    return Trace(
        groups=describe_groups(groups),
        events=tuple(events),
        iteration_seconds=tuple(step.ended - step.began for step in steps),
        **facts,  # type: ignore[arg-type]
    )


def _events(step: RecordedStep, index: dict[int, int]) -> list[Event]:
    found: list[Event] = []
    position = step.began
    gathered: int | None = None
    phases = list(step.phases)

    def compute(until: float) -> None:
        """Adds what lies between here and there, cut where phases change."""
        nonlocal position
        while position < until:
            while len(phases) > 1 and phases[1][1] <= position:
                phases.pop(0)
            phase = phases[0][0] if phases else "forward"
            end = min(until, phases[1][1]) if len(phases) > 1 else until
            group = None if phase == "optimizer" else gathered
            before = found[-1] if found else None
            if before is not None and before.node == "Compute" and (before.phase, before.group) == (phase, group):
                seconds = found.pop().seconds + end - position
            else:
                seconds = end - position
            found.append(Event(node="Compute", phase=phase, group=group, seconds=seconds))
            position = end

    for one in step.recorded:
        group = index.get(id(one.group)) if one.group is not None else None
        compute(one.start)
        if one.node in ("AllGather", "InNode", "Hash") and group is not None:
            gathered = group
        found.append(Event(node=one.node, phase=one.phase, group=group, seconds=one.seconds,
                           payload_bytes=one.payload_bytes, num_collectives=one.num_collectives))  # fmt: skip
        position = max(position, one.end)
    compute(step.ended)
    return found

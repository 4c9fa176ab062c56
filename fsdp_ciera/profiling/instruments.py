"""Times and counts what a training step does, from outside: collectives, codec stages, and as the rest of it, compute.

    with Instruments() as watch:
        watch.begin(); watch.enter("forward"); ... watch.enter("optimizer"); ...
        started, ended, recorded = watch.end()        -> tracing.build_trace

`torch.distributed`'s collectives are replaced by timed ones while the block lasts, so that every contender of the stand (FSDP2,
DeepSpeed, ours) is measured in the same way. Times are those of the host thread: true on gloo, which blocks it; on CUDA they
would be those of launches.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from fsdp_ciera._compat import FSDPParamGroup, watch_groups
from fsdp_ciera.gather.channel import Channel

GATHERS = ("all_gather_into_tensor", "all_gather_single", "all_gather", "_all_gather_base", "all_gather_coalesced")
REDUCE_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter")
ALL_REDUCES = ("all_reduce",)
CODEC_STAGES = ("Hash", "Cmp", "PreDecmp", "Decmp")
ReduceScatter = Callable[[Tensor, Tensor, Any, dist.ProcessGroup], None]
"""Called with (output [n], values [world_size * n], op, process_group); done when it returns."""


@dataclass(frozen=True)
class Recorded:
    """A stretch of time on this rank's host thread; no two overlap."""

    node: str
    phase: str
    param_group: object | None
    start: float
    end: float
    payload_bytes: int = 0
    sent_bytes: int = 0
    """Bytes that this rank sends to other hosts for it."""
    num_collectives: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Instruments:
    """Records one step at a time."""

    def __init__(self, reduce_scatter: ReduceScatter | None = None) -> None:
        """`reduce_scatter` runs instead of c10d's own."""
        self._reduce_scatter = reduce_scatter
        self._recorded: list[Recorded] = []
        self.phases: list[tuple[str, float]] = []
        """Phases of this step, each with the time at which it began."""
        self._phase = "forward"
        self._param_groups: list[FSDPParamGroup] = []
        self._is_inside = False  # a collective calls others of those that are replaced
        self._in_node = False
        self._stack = ExitStack()
        self._began = 0.0

    def __enter__(self) -> Instruments:
        for names, node in ((GATHERS, "AllGather"), (REDUCE_SCATTERS, "ReduceScatter"), (ALL_REDUCES, "AllReduce")):
            for name in names:
                original = getattr(dist, name, None)
                if original is not None:
                    timed = self._timed(node, original)
                    for module in (dist, dist.distributed_c10d):
                        if hasattr(module, name):
                            self._stack.enter_context(mock.patch.object(module, name, timed))
        self._stack.enter_context(mock.patch.object(Channel, "stage", self._staged(Channel.stage)))
        self._stack.enter_context(watch_groups(self._in_param_group))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Begins a step."""
        self._recorded, self.phases = [], []
        self._began = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Begins a phase of the step, one of `fsdp_ciera.profiling.trace.PHASES`."""
        self._phase = phase
        self.phases.append((phase, time.perf_counter()))

    def end(self) -> tuple[float, float, list[Recorded]]:
        """Ends the step -> when it began, when it ended, and what was recorded of it, in order of beginning."""
        return self._began, time.perf_counter(), sorted(self._recorded, key=lambda recorded: recorded.start)

    def add(self, node: str, start: float, end: float) -> None:
        """Records codec work that the caller timed."""
        self._recorded.append(Recorded(node, self._phase, self._param_group, start, end))

    @property
    def _param_group(self) -> FSDPParamGroup | None:
        return self._param_groups[-1] if self._param_groups else None

    @contextmanager
    def _in_param_group(self, param_group: FSDPParamGroup) -> Iterator[None]:
        self._param_groups.append(param_group)
        try:
            yield
        finally:
            self._param_groups.pop()

    def _staged(self, original: Any) -> Any:
        watch = self

        @contextmanager
        def stage(state: Channel, name: str) -> Iterator[None]:
            start = time.perf_counter()
            outer, watch._in_node = watch._in_node, name == "InNode"
            try:
                with original(state, name):
                    yield
            finally:
                watch._in_node = outer
            if name in CODEC_STAGES:
                watch.add(name, start, time.perf_counter())

        return stage

    def _timed(self, node: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            call = _Call(node, bound.arguments)
            phase, param_group = self._phase, self._param_group
            kind = "InNode" if node == "AllGather" and self._in_node else node
            start = time.perf_counter()
            self._is_inside = True
            try:
                substitute = self._reduce_scatter if node == "ReduceScatter" else None
                if substitute is not None and isinstance(call.input, Tensor) and isinstance(call.output, Tensor):
                    substitute(call.output, call.input, call.op, call.process_group)
                    work = _Done() if call.is_async else None
                else:
                    work = original(*args, **kwargs)
            finally:
                self._is_inside = False

            def record(end: float, began: float) -> None:
                self._recorded.append(
                    Recorded(kind, phase, param_group, began, end, call.payload_bytes, call.sent_bytes, 1)
                )

            if call.is_async and isinstance(work, dist.Work):
                return _TimedWork(work, record)
            record(time.perf_counter(), start)
            return work

        return collective


class _Call:
    """The arguments of a collective, by what they mean."""

    def __init__(self, node: str, arguments: Mapping[str, Any]) -> None:
        self.is_async = bool(arguments.get("async_op"))
        self.op = arguments.get("op", dist.ReduceOp.SUM)
        self.process_group = arguments.get("group") or dist.distributed_c10d._get_default_group()
        self.output = _first_of(arguments, "output_tensor", "output", "tensor")
        self.input = _first_of(arguments, "input_tensor", "input", "tensor")
        shard = self.output if node == "ReduceScatter" else self.input
        self.payload_bytes = shard.numel() * shard.element_size() if isinstance(shard, Tensor) else 0
        num_ranks = self.process_group.size()
        self.sent_bytes = (num_ranks - 1) * leaves_host(self.process_group) * self.payload_bytes
        if node == "AllReduce":  # a reduce-scatter and an all-gather, of 1 / W each
            self.sent_bytes = 2 * self.sent_bytes // num_ranks


def _first_of(arguments: Mapping[str, Any], *names: str) -> Any:
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def leaves_host(process_group: dist.ProcessGroup) -> bool:
    """Whether what this rank sends in a ring over `process_group` leaves its host: the next rank is on another one."""
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks = dist.get_process_group_ranks(process_group)
    following = ranks[(process_group.rank() + 1) % len(ranks)]
    return following // ranks_per_host != dist.get_rank() // ranks_per_host


class _Done(dist.Work):
    """A work that has been done."""

    def wait(self, timeout: Any = None) -> bool:  # type: ignore[override]
        return True

    def is_completed(self) -> bool:
        return True


class _TimedWork:
    """An asynchronous collective. Records the time that the host waits for it."""

    def __init__(self, work: dist.Work, record: Callable[[float, float], None]) -> None:
        self._work = work
        self._record: Callable[[float, float], None] | None = record

    def wait(self, *args: Any) -> Any:
        start = time.perf_counter()
        result = self._work.wait(*args)
        if self._record is not None:
            self._record(time.perf_counter(), start)
            self._record = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

"""Faults that others met with FSDP and wrote about in public, each with its kind: stock FSDP2 trains, and so does this package,
with the same bits, or it raises one error with a name on all ranks.

Where a test is about what gathers do with memory or devices, it runs on the backend of CUDA too (its kernels in torch).
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import backends_under_test
from fsdp_ciera import CieraPolicy, CieraPolicyError, CieraStats, detach, fully_shard, stats
from fsdp_ciera.gather import presence
from fsdp_ciera.planning import measure
from fsdp_ciera.testing import ShardFunction, compare_with_stock, run_ranks

pytestmark = pytest.mark.rotating

VALUE_DELTA = CieraPolicy(codecs=("value_delta",))
HIERARCHICAL = CieraPolicy(codecs=("value_delta",), topology="hierarchical", ranks_per_node=2)
SEVERAL = CieraPolicy(codecs=("value_delta", "exponent_block"), cache_budget=1 << 20)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BACKENDS = ("cpu", "tiles")
WIDTH = 64


class Tower(nn.Module):
    """Two layers, of which the first may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, has_images: bool = True) -> torch.Tensor:
        out: torch.Tensor = self.body(self.tower(x) if has_images else x)
        return out


def build_tower(shard: ShardFunction) -> nn.Module:
    model = Tower()
    shard(model.tower, mp_policy=HALF)
    shard(model.body, mp_policy=HALF)
    return shard(model, mp_policy=HALF)


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH, device="cpu", dtype=torch.float32).view(2, WIDTH)


def train(
    model: nn.Module, num_steps: int = 3, before: Callable[[int], Any] = lambda step: None, **kwargs: Any
) -> Iterator[torch.Tensor]:
    """Losses of SGD steps; `before` runs before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(num_steps):
        before(step)
        for _ in range(2):  # micro-batches: the second gathers repeat
            loss = model(inputs().to(torch.bfloat16), **kwargs).float().square().mean()
            loss.backward()
            yield loss
        optimizer.step()
        optimizer.zero_grad()


def assert_sends_less(report: CieraStats, share: float = 0.7) -> None:
    between = [amount for link, amount in report.by_link.items() if link != "in_node"]
    assert sum(one.wire_bytes for one in between) < share * sum(one.raw_bytes for one in between), report


# ---- process groups that not all ranks are in


def first_and_last(world_size: int) -> list[int]:
    return [0, world_size - 1]


def with_other_groups(rank: int, world_size: int, when: str, policy: CieraPolicy) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.new_group([0], use_local_synchronization=True) if rank == 0 and when == "rank 0 logs" else None
    if when == "before, on all ranks":
        dist.new_group([0])
    if when == "destroyed on some":
        group = dist.new_group(first_and_last(world_size))
        if rank == 0:
            dist.destroy_process_group(group)

    def before(step: int) -> None:
        if when == "between steps" and rank in first_and_last(world_size):
            dist.barrier(dist.new_group(first_and_last(world_size), use_local_synchronization=True))

    report = compare_with_stock(build_tower, lambda model: train(model, before=before), policy)
    assert "between_nodes" in report.by_link
    assert_sends_less(report)


@pytest.mark.parametrize("policy", [HIERARCHICAL, CieraPolicy(codecs=("value_delta",), topology="auto")],
                         ids=["hierarchical", "auto"])  # fmt: skip
@pytest.mark.parametrize("when", ["rank 0 logs", "before, on all ranks", "destroyed on some", "between steps"])
def test_other_process_groups(when: str, policy: CieraPolicy) -> None:
    run_ranks(with_other_groups, 4, when, policy, timeout_s=60)


def two_models_on_some_ranks(rank: int, world_size: int) -> None:
    """A second hierarchical model on the first four ranks only: the counts of groups differ from then on."""
    compare_with_stock(build_tower, train, HIERARCHICAL)
    some = dist.new_group(range(4))
    if rank < 4:
        mesh = DeviceMesh.from_group(some, "cpu")

        def build(shard: ShardFunction) -> nn.Module:
            return shard(Tower(), mesh=mesh, mp_policy=HALF)

        compare_with_stock(build, train, HIERARCHICAL)
    compare_with_stock(build_tower, train, HIERARCHICAL, seed=1)


def test_a_model_on_some_ranks_between_models_on_all() -> None:
    run_ranks(two_models_on_some_ranks, 6, timeout_s=90)


# ---- planning must not need ranks that are elsewhere


class Towers(nn.Module):
    """A tower over a part of the ranks, that only some ranks use, and a collective of the user's behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.llm = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, has_images: bool) -> torch.Tensor:
        if has_images:
            x = self.tower(x)
        dist.all_reduce(torch.ones(1))
        out: torch.Tensor = self.llm(x)
        return out


def towers(rank: int, world_size: int, policy: CieraPolicy, keeps_root: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def build(shard: ShardFunction) -> nn.Module:
        model = Towers()
        shard(model.tower, mesh=mesh["shard"], mp_policy=HALF)
        if not keeps_root:
            shard(model.llm, mp_policy=HALF)
        return shard(model, mp_policy=HALF)

    compare_with_stock(build, lambda model: train(model, has_images=rank < 2), policy)
    compare_with_stock(build, lambda model: train(model, has_images=True), policy, seed=1)


@pytest.mark.parametrize("policy", [VALUE_DELTA, SEVERAL, CieraPolicy(), CieraPolicy.paper()],
                         ids=["given", "within a budget", "default", "paper"])  # fmt: skip
@pytest.mark.parametrize("keeps_root", [False, True], ids=["a root without parameters", "a root with parameters"])
def test_towers(policy: CieraPolicy, keeps_root: bool) -> None:
    run_ranks(towers, 4, policy, keeps_root, timeout_s=90)


def parts_alone(rank: int, world_size: int) -> None:
    """A part of the model runs alone, in front of any forward of the root, then the root."""

    def run(model: nn.Module) -> Iterator[torch.Tensor]:
        assert isinstance(model, Tower)
        yield from train(model, 1)
        for part in (model.body, model.tower):
            yield part(inputs().to(torch.bfloat16)).float().sum()
        yield from train(model, 2)

    assert_sends_less(compare_with_stock(build_tower, run, VALUE_DELTA), 0.9)


def test_a_part_that_runs_alone() -> None:
    run_ranks(parts_alone, 2, timeout_s=60)


# ---- ranks hold other modules


class Experts(nn.Module):
    """A dense layer over all ranks, and experts of this rank's own."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        for expert in self.experts.values():
            x = expert(x)
        return x


def other_modules(rank: int, world_size: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("edp", "ep"))
    names = {
        "one expert a rank": [str(rank % 2)],
        "numbered through": [str(2 * (rank % 2)), str(2 * (rank % 2) + 1)],
        "other numbers of experts": [str(index) for index in range(1 + rank % 2)],
    }[kind]

    def build(shard: ShardFunction) -> nn.Module:
        model = Experts(names)
        for expert in model.experts.values():
            shard(expert, mesh=mesh["edp"], mp_policy=HALF)
        return shard(model, mp_policy=HALF)

    assert_sends_less(compare_with_stock(build, train, VALUE_DELTA), 0.9)
    compare_with_stock(build, train, CieraPolicy())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["one expert a rank", "numbered through", "other numbers of experts"])
def test_other_modules(kind: str, world_size: int) -> None:
    run_ranks(other_modules, world_size, kind, timeout_s=60)


# ---- ambient defaults


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Then torch fills what `empty` gives."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AMBIENT: dict[str, Callable[[], Any]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
}


def under(rank: int, world_size: int, ambient: str, policy: CieraPolicy, backend: str) -> None:
    backends_under_test.use_backend(backend)

    def run(model: nn.Module) -> Iterator[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = inputs().to(torch.bfloat16)
        if ambient == "inference mode":  # stock FSDP2 cannot go on from a first gather under it
            yield model(x)
        for _ in range(3):
            with AMBIENT[ambient]():
                seen = model(x).detach().clone()
            yield seen
            loss = model(x).float().square().mean()
            with nullcontext() if ambient in ("inference mode", "no grad") else AMBIENT[ambient]():
                loss.backward()
            yield loss
            optimizer.step()
            optimizer.zero_grad()

    compare_with_stock(build_tower, run, policy)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ambient", AMBIENT)
def test_ambient_defaults(ambient: str, backend: str) -> None:
    """Another default device, another default dtype, and other modes, in all gathers of a training."""
    for policy in (CieraPolicy(), CieraPolicy.paper(), CieraPolicy(codecs=("value_delta",), verify=1), HIERARCHICAL):
        world_size = 4 if policy is HIERARCHICAL else 2
        run_ranks(under, world_size, ambient, policy, backend, timeout_s=60)


# ---- nodes of unequal or unknown size


def on_nodes(rank: int, world_size: int, sizes: list[str], policy: CieraPolicy) -> CieraStats | str:
    os.environ["LOCAL_WORLD_SIZE"] = sizes[rank]
    if not sizes[rank]:
        del os.environ["LOCAL_WORLD_SIZE"]
    try:
        return compare_with_stock(build_tower, train, policy)
    except CieraPolicyError as error:
        return str(error)


@pytest.mark.parametrize("sizes", [["2", "2", "1"], ["2", "2", "", ""], ["", "", ""], ["4", "4", "2", "2"], ["x", "2"]])
def test_auto_goes_flat_where_nodes_differ(sizes: list[str]) -> None:
    reports = run_ranks(
        on_nodes, len(sizes), sizes, CieraPolicy(codecs=("value_delta",), topology="auto"), timeout_s=60
    )
    for report in reports:
        assert set(report.by_link) == {"flat"}
        assert_sends_less(report)
        assert any("gathers are flat" in note for note in report.notes) == any(size.isdecimal() for size in sizes)


@pytest.mark.parametrize("sizes", [["2", "2", "1"], ["2", "2", "", ""], ["", "", ""]])
def test_hierarchical_is_an_error_where_nodes_differ(sizes: list[str]) -> None:
    policy = CieraPolicy(codecs=("value_delta",), topology="hierarchical")
    texts = run_ranks(on_nodes, len(sizes), sizes, policy, timeout_s=60)
    assert len(set(texts)) == 1 and "ranks_per_node=" in texts[0], texts


# ---- parameters that make their own gather inputs


class OwnInput(torch.Tensor):
    """As torchao's float8 weights: what is gathered is made by the tensor itself."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, kind: str) -> OwnInput:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.shape,
            strides=data.stride(),
            dtype=data.dtype,
            device=data.device,
            requires_grad=data.requires_grad,
        )

    def __init__(self, data: torch.Tensor, kind: str) -> None:
        self.data_, self.kind = data, kind

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_"], self.kind

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], kind: Any, size: Any, stride: Any) -> OwnInput:
        return OwnInput(tensors["data_"], kind)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kinds = []

        def unwrap(value: OwnInput) -> torch.Tensor:
            kinds.append(value.kind)
            return value.data_

        args, kwargs = torch.utils._pytree.tree_map_only(cls, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        keeps = {
            torch.ops.aten.empty_like.default, torch.ops.aten.new_zeros.default, torch.ops.aten.slice.Tensor,
            torch.ops.aten.copy_.default, torch.ops.aten.view.default, torch.ops.aten.as_strided.default,
            torch.ops.aten._to_copy.default, torch.ops.aten._pin_memory.default, torch.ops.aten.split.Tensor,
            torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.select.int,
        }  # fmt: skip
        if func not in keeps or not kinds:
            return out
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda value: cls(value, kinds[0]), out)

    def fsdp_pre_all_gather(self, *args: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        half = self.data_.to(torch.bfloat16)
        if self.kind == "one tensor":
            return (half,), None
        scale = torch.full((4,), 2.0, dtype=torch.bfloat16)
        return (half / 2, scale) if self.kind == "two tensors" else (half.view(torch.uint8),), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        if out is not None:
            return None
        whole = outputs[0] * outputs[1][0] if len(outputs) > 1 else outputs[0]
        whole = whole.view(torch.bfloat16)
        return whole, outputs


def with_own_inputs(rank: int, world_size: int, kind: str) -> CieraStats:
    def build(shard: ShardFunction) -> nn.Module:
        model = Tower()
        model.tower = nn.Linear(WIDTH, WIDTH, bias=False)
        model.tower.weight = nn.Parameter(OwnInput(model.tower.weight.detach(), kind))
        shard(model.tower)
        shard(model.body, mp_policy=HALF)
        return shard(model, mp_policy=HALF)

    def run(model: nn.Module) -> Iterator[torch.Tensor]:
        for _ in range(4):
            with torch.no_grad():
                yield model(inputs().to(torch.bfloat16))

    torch.manual_seed(0)
    seen = []
    report = CieraStats()
    for ours in (False, True):
        model = build(torch_fully_shard if not ours else _with(VALUE_DELTA))  # type: ignore[arg-type]
        seen.append(list(run(model)))
        if ours:
            report = stats(model)
            detach(model)
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    return report


def _with(policy: CieraPolicy) -> ShardFunction:
    def shard(module: nn.Module, **kwargs: Any) -> Any:
        return fully_shard(module, ciera_policy=policy, **kwargs)

    return shard


@pytest.mark.parametrize("kind", ["one tensor", "two tensors", "bytes"])
def test_parameters_that_make_their_own_inputs(kind: str) -> None:
    for report in run_ranks(with_own_inputs, 2, kind, timeout_s=60):
        if kind == "one tensor":  # repeats cost nothing
            assert_sends_less(report, 0.5)
        else:
            assert report.num_gathers > 0


# ---- stores and process groups that can do less


class _Store(torch._C._distributed_c10d.Store):
    """A store that only keeps values."""


def with_a_poor_store(rank: int, world_size: int) -> list[str]:
    presence.__dict__["default_store"] = _Store
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_sends_less(compare_with_stock(build_tower, train, VALUE_DELTA))
    return [str(warning.message) for warning in caught if "have not come" in str(warning.message)]


def test_a_store_without_counters() -> None:
    assert run_ranks(with_a_poor_store, 2, timeout_s=60) == [[], []]


class ListsNoDevice(dist.ProcessGroup):
    """A process group in Python that hands on to another: it lists no device."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner

    def getBackendName(self) -> str:
        return "python"


def lists_no_device(rank: int, world_size: int) -> None:
    from fsdp_ciera import _compat

    group = ListsNoDevice(dist.distributed_c10d._get_default_group())
    assert not group._device_types
    assert _compat._device_of_numbers(group) == torch.device("cpu")
    assert _compat._timeout_of(group) is None


def test_a_process_group_that_lists_no_device() -> None:
    run_ranks(lists_no_device, 2)


def fake_group(rank: int, world_size: int) -> None:
    """A dry run: nothing is sent, so nothing that arrives means anything, but it must not fail in ways stock FSDP2 does not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = Tower()
    torch_fully_shard(model)
    model(inputs()).sum().backward()
    presence.wait_for_peers(dist.distributed_c10d._get_default_group(), "a dry run")
    dist.destroy_process_group()


def test_a_fake_process_group() -> None:
    run_ranks(fake_group, 1, is_fresh=True)


# ---- two trainers in two threads of a process


def in_two_threads(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    groups = [dist.new_group(range(world_size), timeout=timedelta(seconds=30)) for _ in range(2)]
    errors: list[str] = []
    turns = [threading.Event(), threading.Event()]

    def run(number: int) -> None:
        try:
            torch.manual_seed(number)
            model = Tower()
            fully_shard(model, ciera_policy=VALUE_DELTA, mesh=DeviceMesh.from_group(groups[number], "cpu"))
            if rank == number:  # each rank begins with another trainer
                turns[number].set()
            else:
                turns[1 - number].wait(20)
            for _ in range(3):
                model(inputs()).sum().backward()
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return errors, [str(warning.message) for warning in caught if "fsdp_ciera" in str(warning.message)]


def test_two_trainers_in_two_threads() -> None:
    assert run_ranks(in_two_threads, 2, timeout_s=90) == [([], []), ([], [])]


# ---- memory that measuring takes


def allocated_by_measuring(rank: int, world_size: int) -> int:
    """The most bytes that measuring had at once, if 256 KiB were the bound."""
    measure._MOST_GATHERED_BYTES = 1 << 18
    backend = backends_under_test.make_backend("cpu")
    asked: list[int] = []
    real = backend.empty

    def empty(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return real(num_bytes)

    backend.empty = empty  # type: ignore[method-assign]
    measure.measure_link(dist.distributed_c10d._get_default_group(), backend)
    return max(asked)


def test_measuring_a_link_takes_the_same_memory_on_any_number_of_ranks() -> None:
    for world_size in (2, 4):
        assert max(run_ranks(allocated_by_measuring, world_size)) == {2: 1 << 18, 4: 1 << 16}[world_size]

"""The backend of CUDA on CPU tensors, its kernels through the shim: what differs from the CPU's, which test_bit_identity.py and
the others run on both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_ciera
import shim_device
from backends_under_test import use_backend
from fsdp_ciera import CieraPolicy, detach, fully_shard, invalidate, settle_sizes, stats
from fsdp_ciera.backends.cuda import CudaBackend
from fsdp_ciera.backends.plain import PlainBackend
from fsdp_ciera.errors import CieraDesyncError, CieraMismatchError, CieraPeerError
from fsdp_ciera.gather import exchange
from fsdp_ciera.gather.collective import CieraAllGather
from fsdp_ciera.gather.layout import build_layout
from fsdp_ciera.kernels import cuda
from fsdp_ciera.kernels.heads import HEAD_BYTES
from fsdp_ciera.testing import run_ranks
from loops import TILES, gather, make_loop
from tiny_moe import recover

VALUE_DELTA = CieraPolicy(codecs=("value_delta",))
EXPONENT_BLOCK = CieraPolicy(codecs=("exponent_block",), block_size=64)
ONE_CODEC = [CieraPolicy(codecs=(codec,)) for codec in ("value_delta", "exponent_delta", "exponent_block")]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Twins(nn.Module):
    """Two layers of one shape, run in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 24, bias=False)
        self.k_proj = nn.Linear(24, 24, bias=False)

    def forward(self, x: torch.Tensor, reverse: bool = False) -> torch.Tensor:
        layers = [self.q_proj, self.k_proj]
        for layer in reversed(layers) if reverse else layers:
            x = layer(x).tanh()
        return x.square().mean()


def build(policy: CieraPolicy | None, root_has_parameters: bool = True) -> nn.Module:
    torch.manual_seed(3)
    model = Twins()
    if root_has_parameters:
        model.scale = nn.Parameter(torch.randn(7))
    arguments: dict[str, Any] = {"mp_policy": BF16}
    if policy is not None:
        arguments["ciera_policy"] = policy
    shard: Any = torch_fully_shard if policy is None else fully_shard
    shard(model.q_proj, **arguments)
    shard(model.k_proj, **arguments)
    return shard(model, **arguments)


def train(model: nn.Module, num_steps: int, lr: float = 1e-3, num_micro_batches: int = 1) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(num_steps):
        for _ in range(num_micro_batches):
            loss = model(torch.randn(4, 24, generator=generator))
            loss.backward()
            seen.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(parameter.to_local().detach().clone() for parameter in model.parameters())]


def write(parameters: nn.Module | Sequence[Any], *ranks: int, factor: float = 1.25) -> None:
    """Scales the shards of these ranks. A model's parameters are its shards only while it is resharded."""
    if dist.get_rank() in ranks:
        for parameter in parameters.parameters() if isinstance(parameters, nn.Module) else parameters:
            parameter.data.to_local().mul_(factor)


def wrong_values(model: nn.Module) -> int:
    """How many values of the gathered parameters are not what the shards say."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    gathered = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for module in modules:
        module.reshard()
    expected = {name: parameter.full_tensor().bfloat16() for name, parameter in model.named_parameters()}
    differences = (
        gathered[name].bfloat16().view(torch.int16) != value.view(torch.int16) for name, value in expected.items()
    )
    return sum(int(difference.sum()) for difference in differences)


def channels_of(model: nn.Module) -> list[Any]:
    return [c for comm in fsdp_ciera.attach.__globals__["_comms"](model) for c in comm.channels.values()]


# The host waits for nothing in a gather, and launches do not depend on the ranks


class Ops(TorchDispatchMode):
    """Names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WAITING_OPS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "index", "unique", "item"}
"""On a GPU the host waits in these, since they need a number from it."""


def waiting_ops(rank: int, world_size: int, policy: CieraPolicy) -> tuple[set[str], set[str], set[str]]:
    """Those of a control, those of gathers, and those of agreements but for the one read."""
    use_backend("shim")
    model = build(policy)
    train(model, 2)
    control, gathered, agreed = Ops(), Ops(), Ops()
    real_gather, real_agree = CieraAllGather._gather, fsdp_ciera.session.agree
    real_read = CudaBackend.read

    def watched_gather(self: CieraAllGather, *arguments: Any) -> None:
        with gathered:
            real_gather(self, *arguments)

    def watched_agree(*arguments: Any) -> Any:
        with agreed:
            return real_agree(*arguments)

    def unwatched_read(self: CudaBackend, numbers: torch.Tensor) -> list[Any]:
        with torch.utils._python_dispatch._disable_current_modes():
            return real_read(self, numbers)

    CieraAllGather._gather = watched_gather  # type: ignore[method-assign]
    fsdp_ciera.session.agree = watched_agree  # type: ignore[assignment]
    CudaBackend.read = unwatched_read  # type: ignore[method-assign]
    train(model, 2, num_micro_batches=2)
    with control:
        int(torch.ones(3).nonzero().sum())
    assert len(gathered.names) > 5 and len(agreed.names) > 5
    return tuple(set(ops.names) & WAITING_OPS for ops in (control, gathered, agreed))  # type: ignore[return-value]


@pytest.mark.parametrize("policy", ONE_CODEC, ids=lambda policy: policy.codecs[0])
def test_no_gather_asks_the_device_for_a_number(policy: CieraPolicy) -> None:
    for in_control, in_gathers, in_agreements in run_ranks(waiting_ops, 2, policy):
        assert in_control == {"nonzero", "_local_scalar_dense"}
        assert not in_gathers and not in_agreements


NAMES = ["self_attn.q_proj.weight", "mlp.gate.weight", "mlp.experts.gate_up_proj", "embed_tokens.weight"]


def launches_of(world_size: int, sizes: Sequence[int], codecs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Kernels and torch operations of one rank's first gather after a change, without those of its peers."""
    with shim_device.install() as device:
        backend = CudaBackend(torch.device("cpu"), cuda)
        layout = build_layout(NAMES[: len(sizes)], sizes, codecs, sum(sizes), torch.bfloat16)
        loop = make_loop(layout, world_size, backend=backend)
        shards = torch.arange(world_size * sum(sizes)).view(world_size, -1).to(torch.int16).view(torch.bfloat16)
        gather(loop, shards)
        shards = (shards.view(torch.int16) + 1).view(torch.bfloat16)
        loop.settle_all(max(loop.announce(rank, shard) for rank, shard in enumerate(shards)))
        payloads = torch.stack([loop.take_payload(rank, shard) for rank, shard in enumerate(shards)])
        output = shards.clone()
        device.launches.clear()
        with Ops() as ops:
            loop.decode(1, payloads, output)
        assert torch.equal(output.view(torch.int16), shards.view(torch.int16))
        return [name for name, _ in device.launches], ops.names


@pytest.mark.parametrize("codec", ["value_delta", "exponent_delta", "exponent_block", "entropy"])
def test_launches_do_not_depend_on_the_number_of_peers_or_runs(codec: str) -> None:
    of_two = launches_of(2, [70, 30, 10, 50], [codec] * 4)
    assert 0 < len(of_two[0]) <= 3
    for world_size in (8, 64):
        assert launches_of(world_size, [70, 30, 10, 50], [codec] * 4) == of_two
    assert launches_of(2, [160], [codec]) == of_two


# What users do between gathers


def disturbances(rank: int, world_size: int) -> list[str]:
    """What users do between gathers -> which kinds of gathers came after each."""
    use_backend("shim")
    model, stock = build(VALUE_DELTA), build(None)
    found: list[str] = []

    def both(change: Callable[[nn.Module], Any]) -> None:
        for each in (model, stock):
            change(each)

    def step() -> None:
        before = dict(stats(model).gathers_by_phase)
        seen = train(model, 1)
        after = stats(model).gathers_by_phase
        found.append(" ".join(sorted({k.partition("/")[0] for k in after if after[k] > before.get(k, 0)})))
        assert all(map(torch.equal, seen, train(stock, 1)))

    step()
    step()
    settle_sizes(model)
    both(lambda each: write(each, 1))  # a write on one rank, after sizes were settled
    step()
    settle_sizes(model)
    both(lambda each: each.load_state_dict({name: 2 * value for name, value in each.state_dict().items()}))
    step()
    average = [parameter.to_local().detach().clone() * 0.5 for parameter in model.parameters()]
    settle_sizes(model)
    with torch.no_grad():  # evaluation with other weights, between two steps
        kept = [parameter.to_local().clone() for parameter in model.parameters()]
        for each in (model, stock):
            for parameter, value in zip(each.parameters(), average, strict=True):
                parameter.to_local().copy_(value)
        assert torch.equal(model(torch.ones(4, 24)), stock(torch.ones(4, 24)))
        for each in (model, stock):
            for module in each.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            for parameter, value in zip(each.parameters(), kept, strict=True):
                parameter.to_local().copy_(value)
    step()
    settle_sizes(model)
    settle_sizes(model)
    step()
    if rank == 1:
        invalidate(model)
    step()
    assert wrong_values(model) == 0  # by hand
    step()
    detach(model)
    assert all(map(torch.equal, train(model, 1), train(stock, 1)))
    return found


def test_whatever_users_do_between_gathers() -> None:
    for found in run_ranks(disturbances, 2):
        assert found == ["cold repeat", *["first repeat"] * 5, "cold repeat", "first repeat"], found


def within_a_pass(rank: int, world_size: int) -> list[str]:
    """What cannot be mended there is an error on all ranks before the optimizer, and training goes on exactly after it."""
    use_backend("shim")
    model = build(EXPONENT_BLOCK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shards = list(model.parameters())
    texts = []

    def step(disturb: Callable[[], None]) -> None:
        loss = model(torch.ones(4, 24))
        disturb()
        loss.backward()
        before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
        try:
            optimizer.step()
        except CieraDesyncError as error:
            texts.append(str(error))
            assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
        optimizer.zero_grad()

    step(lambda: None)
    step(lambda: write(shards, 1))  # between forward and backward
    step(lambda: None)
    step(lambda: write(shards, 0, 1, factor=-1.0))  # a checksum must see signs
    step(lambda: invalidate(model) if rank == 1 else None)  # waits until the pass has ended
    step(lambda: None)
    assert wrong_values(model) == 0
    return texts


def test_weights_that_change_within_a_pass_stop_the_optimizer() -> None:
    for texts in run_ranks(within_a_pass, 2):
        assert len(texts) == 2
        for text in texts:
            assert "a rank's shard changed after the ranks had agreed" in text and "module 'q_proj'" in text


# Ranks that do not do the same


def mispaired(rank: int, world_size: int, backend: str) -> tuple[str, str]:
    """Two layers of one shape, which rank 1 runs in the other order -> the errors of a step and of the next forward."""
    use_backend(backend)
    model = build(EXPONENT_BLOCK)
    optimizer = torch.optim.AdamW(model.parameters())
    texts = []
    try:
        model(torch.ones(4, 24), reverse=rank == 1).backward()
        optimizer.step()
    except CieraDesyncError as error:
        texts.append(str(error))
    dist.barrier()
    recover(model)
    optimizer.zero_grad()
    invalidate(model)
    model(torch.ones(4, 24)).backward()
    optimizer.step()
    assert wrong_values(model) == 0
    return texts[0], ""


def test_mispaired_gathers_of_one_shape() -> None:
    for text, _ in run_ranks(mispaired, 2, "shim"):
        assert "a payload belongs to another gather" in text
    for text, _ in run_ranks(mispaired, 2, "cpu"):
        assert "the ranks are not at the same gather" in text
        assert 'module: "q_proj" on ranks [0]; "k_proj" on ranks [1]' in text


def other_bases(rank: int, world_size: int, backend: str) -> str:
    """Two models in other order on rank 1: nobody can tell in the first pass, but what they remember differs."""
    use_backend(backend)
    first, second = build(EXPONENT_BLOCK), build(EXPONENT_BLOCK)
    write(second, 0, 1, factor=-1.5)
    for model in (first, second) if rank == 0 else (second, first):
        model(torch.ones(4, 24)).backward()
    try:
        for model in (first, second):
            model(torch.ones(4, 24)).backward()
    except CieraDesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["shim", "cpu"])
def test_different_bases(backend: str) -> None:
    for text in run_ranks(other_bases, 2, backend):
        assert "an earlier gather of it met another module's of the same shape" in text


def damaged(rank: int, world_size: int, policy: CieraPolicy) -> tuple[list[str], int]:
    """One rank gets other bytes than were sent -> the errors before the optimizer and at the next agreement."""
    use_backend("shim")
    model = build(policy)
    train(model, 2, lr=1e-4)
    real = exchange.all_gather_flat

    def damaging(output: torch.Tensor, local: torch.Tensor, group: Any, async_op: bool) -> Any:
        done = real(output, local, group, async_op)
        if rank == 0 and output.dtype == torch.uint8 and len(local) > HEAD_BYTES + 8 * 3:
            output.view(2, -1)[1, HEAD_BYTES + 64 :].fill_(255)
        return done

    optimizer = torch.optim.AdamW(model.parameters())
    texts = []
    exchange.all_gather_flat = damaging  # type: ignore[attr-defined]
    model(torch.ones(4, 24)).backward()
    exchange.all_gather_flat = real  # type: ignore[attr-defined]
    try:
        optimizer.step()
    except CieraDesyncError as error:
        texts.append(str(error))
    optimizer.zero_grad()
    try:
        model(torch.ones(4, 24))
    except CieraDesyncError as error:
        texts.append(str(error))
    recover(model)
    return texts, wrong_values(model)


@pytest.mark.parametrize("verify", [None, "every", 1])
@pytest.mark.parametrize("codec", ["value_delta", "exponent_block"])
def test_a_damaged_payload_is_told_before_the_optimizer_and_on_all_ranks(codec: str, verify: Any) -> None:
    """A plane has no redundancy, so that only `verify` sees what happens to it."""
    outcomes = run_ranks(damaged, 2, CieraPolicy(codecs=(codec,), verify=verify))
    for texts, num_wrong in outcomes:
        assert num_wrong == 0 or not texts
        assert bool(texts) == (codec == "value_delta" or verify is not None)
    if outcomes[0][0]:
        assert "start again from a checkpoint" in outcomes[0][0][0]
        assert len(outcomes[0][0]) + len(outcomes[1][0]) >= 2  # rank 0 before its optimizer, rank 1 at the agreement


# What cannot run


def refusals(rank: int, world_size: int) -> list[list[str]]:
    found = []
    for backend, policy in (
        (TILES, CieraPolicy(codecs=("entropy",))),
        (PlainBackend(torch.device("cpu"), "the driver is too old"), VALUE_DELTA),
        (PlainBackend(torch.device("cpu"), "the driver is too old"), CieraPolicy(cache_budget=None)),
    ):
        fsdp_ciera.session.backend_of = lambda device, backend=backend: backend  # type: ignore[misc, assignment]
        model = build(policy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, 1)
        notes = stats(model).notes
        assert [str(w.message) for w in caught if "fsdp_ciera" in str(w.message)] == [f"fsdp_ciera: {n}" for n in notes]
        found.append(notes)
        if isinstance(backend, PlainBackend):
            assert all(phase.startswith("plain/") for phase in stats(model).gathers_by_phase)
    return found


def test_what_cannot_run_is_said_once() -> None:
    for found in run_ranks(refusals, 2):
        assert [len(notes) for notes in found] == [0, 1, 1], "entropy has kernels"
        assert "run as in stock FSDP2: the driver is too old" in found[1][0]


def without_kernels(rank: int, world_size: int) -> None:
    use_backend("shim")
    if rank == 1:  # an old driver, say
        plain = PlainBackend(torch.device("cpu"), "the driver is too old")
        fsdp_ciera.session.backend_of = lambda device: plain  # type: ignore[assignment]
    with pytest.raises(CieraMismatchError, match=r'kernels: "cuda" on ranks \[0\]; "none" on ranks \[1\]'):
        train(build(VALUE_DELTA), 2)


def test_a_rank_without_kernels_is_told() -> None:
    run_ranks(without_kernels, 2)


# Memory that runs out


def failing(real: Any, on_call: int) -> Any:
    calls = 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == on_call:
            raise torch.OutOfMemoryError("pretended")
        return real(*args)

    return call


def failures(rank: int, world_size: int) -> None:
    """Memory that runs out on one rank: in an agreement all raise, in a gather the others are told before the optimizer."""
    backend = use_backend("shim")
    assert isinstance(backend, CudaBackend)
    model = build(EXPONENT_BLOCK)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, 2, lr=1e-5)
    write(model, 0, 1, factor=4.0)  # exponents change
    kernels = backend._kernels
    real = kernels.pack_blocks
    if rank == 1:
        kernels.pack_blocks = failing(real, 2)  # type: ignore[method-assign]
    with pytest.raises(CieraPeerError, match="rank 1: OutOfMemoryError"):
        settle_sizes(model)
    kernels.pack_blocks = real  # type: ignore[method-assign]
    settle_sizes(model)
    assert wrong_values(model) == 0
    train(model, 2, lr=1e-5)

    real = kernels.split_tiles
    if rank == 1:
        kernels.split_tiles = failing(real, 2)  # type: ignore[method-assign]
    if rank == 1:
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.ones(4, 24))
    else:
        model(torch.ones(4, 24))
        with pytest.raises(CieraDesyncError, match="a rank could not encode its shard"):
            optimizer.step()
    kernels.split_tiles = real  # type: ignore[method-assign]
    dist.barrier()
    recover(model)
    train(model, 2)
    assert wrong_values(model) == 0


def test_nothing_is_wrong_after_memory_ran_out() -> None:
    run_ranks(failures, 2)


def test_an_arena_that_is_too_small() -> None:
    """What does not fit goes raw, and there is room the next time."""
    layout = build_layout(NAMES[:1], [5000], ["value_delta"], 5000, torch.bfloat16)
    loop = make_loop(layout, 2, backend=TILES, may_go_raw=True)
    shards = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    gather(loop, shards)
    raw = loop.channels[0].raw_payload_bytes
    for channel in loop.channels:
        channel.room_bytes = 64
    sizes = []
    for _ in range(2):
        shards.view(torch.int16)[:, ::9] += 1
        sizes.append(loop.announce(0, shards[0]))
        loop.announce(1, shards[1])
        gather(loop, shards)
    assert sizes[0] == raw > sizes[1] > 5000 // 9
    shards.view(torch.int16)[:, :] += 300  # every value is a literal: more than raw
    assert loop.announce(0, shards[0]) == raw
    gather(loop, shards)

"""Gathers as they run on CUDA: sizes settled once a step, payloads made and taken apart by the shipped PTX.

No GPU: gloo ranks on CPU tensors, `FSDP_CIERA_KERNELS=cuda`, the production launcher, a stand-in driver and the PTX
interpreter. Streams and events are not part of it.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda import run_with_fake_cuda
from fsdp_ciera import (
    CieraDesyncError,
    CieraMismatchError,
    CieraPolicy,
    attach,
    detach,
    invalidate,
    settle_sizes,
    stats,
)
from fsdp_ciera.kernels.dispatch import VARIABLE
from fsdp_ciera.kernels.nvcomp import Alignments
from ranks import run_ranks
from test_nvcomp import FakeNvcomp, bytes_at, ints, words

CUDA = {VARIABLE: "cuda"}
VALUE_DELTA = CieraPolicy(codecs=("value_delta",))
EXPONENT_BLOCK = CieraPolicy(codecs=("exponent_block",), block_size=64)


class Tiny(nn.Module):
    """Two groups under FSDP, of a few runs each; sizes divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(37, 20)
        self.norm = nn.LayerNorm(20)
        self.q_proj = nn.Linear(20, 23)
        self.lm_head = nn.Linear(23, 37, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.lm_head(torch.tanh(self.q_proj(self.norm(self.embed_tokens(tokens)))))
        return nn.functional.cross_entropy(hidden[:-1], tokens[1:])


def build(policy: CieraPolicy | None) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = Tiny()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.q_proj, mp_policy=precision)
    fully_shard(model, mp_policy=precision, reshard_after_forward=True)
    if policy is not None:
        attach(model, policy)
    return model


def train(
    model: nn.Module, rank: int, num_steps: int, lr: float = 1e-3, num_micro_batches: int = 1
) -> list[torch.Tensor]:
    """-> losses and parameters, bits to compare."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(num_steps):
        for _ in range(num_micro_batches):
            loss = model(torch.randint(37, (11,), generator=generator))
            loss.backward()
            seen.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        try:
            settle_sizes(model)
        except Exception as error:
            if "no module of" not in str(error):
                raise
    return [*seen, *(parameter.to_local().detach().clone() for parameter in model.parameters())]  # type: ignore[attr-defined]


def with_fake_cuda() -> Any:
    from fake_cuda.bridge import FakeCuda

    warnings.simplefilter("ignore")
    return FakeCuda(check_races=False)


def equal_bits(rank: int, world_size: int, policy: CieraPolicy) -> tuple[list[str], dict[str, int]]:
    fake = with_fake_cuda()
    expected = train(build(None), rank, 4)
    model = build(policy)
    found = train(model, rank, 4)
    assert all(map(torch.equal, found, expected)), [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
    report = stats(model)
    assert report.cache_bytes > 0
    return [launch.kernel for launch in fake.launches], report.gathers_by_phase


def train_with(policy: CieraPolicy) -> None:
    for kernels, phases in run_ranks(equal_bits, 3, policy, timeout_s=280):
        for kind in ("cold", "first", "repeat"):
            assert sum(count for phase, count in phases.items() if phase.startswith(kind)), phases
        needed = {
            "value_delta": {"scan_bf16", "compact_bf16", "apply_bf16"},
            "exponent_block": {"hash_bf16", "split_bf16", "merge_bf16", "take_blocks_bf16", "put_blocks"},
        }[policy.codecs[0]]
        assert needed <= set(kernels), set(kernels)


@pytest.mark.parametrize("policy", [VALUE_DELTA, EXPONENT_BLOCK], ids=lambda policy: policy.codecs[0])
def test_training_equals_stock_fsdp2(policy: CieraPolicy) -> None:
    run_with_fake_cuda(train_with, policy, env=CUDA)


class Ops(TorchDispatchMode):
    """Names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WAITING_OPS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "index", "unique", "item"}
"""On a GPU the host waits in these, since they need a number from it."""


def waiting_ops(rank: int, world_size: int, policy: CieraPolicy) -> tuple[set[str], set[str]]:
    """Those of a control, and those of settled gathers."""
    with_fake_cuda()
    from fsdp_ciera.gather import collective
    from fsdp_ciera.gather.device_watch import DamageWatch

    model = build(policy)
    train(model, rank, 2)
    control, gathered = Ops(), Ops()
    real = collective.DeviceStream.gather

    def watched(stream: Any, output: torch.Tensor, local: torch.Tensor) -> Any:
        with gathered:
            return real(stream, output, local)

    collective.DeviceStream.gather = watched  # type: ignore[method-assign]
    DamageWatch.look = lambda self: None  # type: ignore[method-assign]  # it reads memory of the host
    train(model, rank, 2, num_micro_batches=2)
    with control:
        int(torch.ones(3).nonzero().sum())
    assert len(gathered.names) > 5
    return control.names & WAITING_OPS, gathered.names & WAITING_OPS


def wait_for_nothing(policy: CieraPolicy) -> None:
    for in_control, in_gathers in run_ranks(waiting_ops, 2, policy, timeout_s=280):
        assert in_control == {"nonzero", "_local_scalar_dense"}
        assert not in_gathers


@pytest.mark.parametrize("policy", [VALUE_DELTA, EXPONENT_BLOCK], ids=lambda policy: policy.codecs[0])
def test_no_gather_asks_the_device_for_a_number(policy: CieraPolicy) -> None:
    run_with_fake_cuda(wait_for_nothing, policy, env=CUDA)


def write_on_rank_1(model: nn.Module, rank: int) -> None:
    if rank == 1:
        for parameter in model.parameters():
            parameter.data.to_local().mul_(1.25)  # type: ignore[attr-defined]


def disturbances(rank: int, world_size: int) -> list[str]:
    """What users do between gathers. -> which kinds of gathers came after each."""
    with_fake_cuda()
    model = build(VALUE_DELTA)
    train(model, rank, 2)
    found = []

    def phases_of(step: Any) -> str:
        before = stats(model).gathers_by_phase
        step()
        after = stats(model).gathers_by_phase
        return " ".join(sorted({kind.partition("/")[0] for kind in after if after[kind] > before.get(kind, 0)}))

    write_on_rank_1(model, rank)  # after they were settled: told on all ranks at the next settling
    model.unshard()
    model.reshard()
    with pytest.raises(CieraDesyncError, match=r"ranks \[1\]") as raised:
        settle_sizes(model)
    assert "module 'FSDPTiny'" in str(raised.value)
    found.append(phases_of(lambda: train(model, rank, 2)))  # plain, then from scratch
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    with pytest.raises(CieraDesyncError, match="Call settle_sizes"):  # on all ranks: told by the next group's gather
        model(torch.arange(11))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with pytest.raises(CieraDesyncError, match=r"ranks \[0, 1\]"):
        settle_sizes(model)
    settle_sizes(model)
    found.append(phases_of(lambda: train(model, rank, 1)))
    if rank == 1:
        invalidate(model)
    found.append(phases_of(lambda: train(model, rank, 2)))  # as settled, then from scratch on all ranks
    settle_sizes(model)
    settle_sizes(model)  # what was compressed ahead is never gathered
    found.append(phases_of(lambda: train(model, rank, 1)))
    expected = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    loss = model(torch.arange(11))
    detach(model)
    assert torch.equal(model(torch.arange(11)), loss)
    assert all(map(torch.equal, (p.to_local() for p in model.parameters()), expected))  # type: ignore[attr-defined]
    return found


def disturb() -> None:
    for found in run_ranks(disturbances, 2, timeout_s=280):
        assert found == ["cold plain repeat", "cold repeat", "cold first repeat", "cold repeat"], found


def test_whatever_users_do_between_gathers() -> None:
    run_with_fake_cuda(disturb, env=CUDA)


def corrupted(rank: int, world_size: int) -> None:
    with_fake_cuda()
    from fsdp_ciera.gather import device_stream

    model = build(VALUE_DELTA)
    train(model, rank, 3, lr=1e-2)
    real = device_stream.all_gather_flat

    def damaging(output: torch.Tensor, local: torch.Tensor, group: Any, async_op: bool) -> Any:
        done = real(output, local, group, async_op)
        if rank == 0 and output.dtype == torch.uint8 and len(output) > 2 * len(local) - 1:
            output.view(2, -1)[1].fill_(255)  # every bit of the bitmap, and every move an escape
        return done

    device_stream.all_gather_flat = damaging  # type: ignore[attr-defined]
    model.unshard()  # type: ignore[operator]
    model.reshard()  # type: ignore[operator]
    device_stream.all_gather_flat = real  # type: ignore[attr-defined]
    with pytest.raises(CieraDesyncError, match=r"ranks \[0\]"):
        settle_sizes(model)


def corrupt() -> None:
    run_ranks(corrupted, 2, timeout_s=280)


def test_a_damaged_payload_is_told_on_all_ranks() -> None:
    run_with_fake_cuda(corrupt, env=CUDA)


def refusals(rank: int, world_size: int) -> list[str]:
    with_fake_cuda()
    notes = []
    for policy in (
        CieraPolicy(),
        CieraPolicy(codecs=("value_delta",), topology="hierarchical", ranks_per_node=1),
        CieraPolicy(codecs=("exponent_delta",)),
        CieraPolicy(codecs=("value_delta",), verify="every"),
    ):
        model = build(policy)
        train(model, rank, 1)
        notes.append(" | ".join(stats(model).notes))
    return notes


def refuse() -> None:
    for found in run_ranks(refusals, 2, timeout_s=280):
        several, hierarchical, unknown, verify = found
        assert "name one codec" in several
        assert "exponent_delta cannot run" in unknown
        assert "verify=" in verify
        assert not hierarchical or "flat" in hierarchical


def test_what_cannot_run_there_is_said() -> None:
    run_with_fake_cuda(refuse, env=CUDA)


class ZlibNvcomp(FakeNvcomp):
    """Codes chunks with zlib: sizes differ, and incompressible chunks become larger."""

    def answer_CompressGetRequiredAlignments(self, options: Any, alignments: int) -> None:
        Alignments.from_address(alignments).__init__(16, 16, 1)  # type: ignore[misc]

    answer_DecompressGetRequiredAlignments = answer_CompressGetRequiredAlignments

    def answer_CompressGetMaxOutputChunkSize(self, chunk_bytes: int, options: Any, most: int) -> None:
        ctypes.c_size_t.from_address(most).value = 2 * chunk_bytes

    def answer_CompressGetTempSize(self, *args: Any) -> None:
        ctypes.c_size_t.from_address(args[3]).value = 1

    answer_DecompressGetTempSize = answer_CompressGetTempSize

    def answer_CompressAsync(self, *args: Any) -> None:
        pointers, sizes, _, num_chunks, _, _, outputs, out_sizes, _, statuses, _ = args
        for i in range(num_chunks):
            coded = zlib.compress(bytes(bytes_at(words(pointers, num_chunks)[i], words(sizes, num_chunks)[i])))
            bytes_at(words(outputs, num_chunks)[i], len(coded))[:] = np.frombuffer(coded, np.uint8)
            words(out_sizes, num_chunks)[i] = len(coded)
            ints(statuses, num_chunks)[i] = 0

    def answer_DecompressAsync(self, *args: Any) -> None:
        pointers, sizes, _, out_sizes, num_chunks, _, _, outputs, _, statuses, _ = args
        for i in range(num_chunks):
            address = words(pointers, num_chunks)[i]
            assert address % 16 == 0
            try:
                data = zlib.decompress(bytes(bytes_at(address, words(sizes, num_chunks)[i])))
            except zlib.error:
                ints(statuses, num_chunks)[i] = 13
                continue
            bytes_at(words(outputs, num_chunks)[i], len(data))[:] = np.frombuffer(data, np.uint8)
            words(out_sizes, num_chunks)[i] = len(data)
            ints(statuses, num_chunks)[i] = 0


def coded_bits(rank: int, world_size: int) -> None:
    with_fake_cuda()
    from fsdp_ciera.gather import device_coder
    from fsdp_ciera.kernels import launch, nvcomp

    expected = train(build(None), rank, 4)
    sent = {}
    for coding in (False, True):
        if coding:
            device_coder.LEAST_BYTES, nvcomp.CHUNK_BYTES = 40, 64
            nvcomp.ans = functools.cache(lambda: nvcomp.Ans(ZlibNvcomp()))
            nvcomp.why_not_available = lambda: None
            nvcomp.current_place = launch.current_place  # the stand-in's
        for policy in (VALUE_DELTA, EXPONENT_BLOCK):
            model = build(policy)
            found = train(model, rank, 4)
            assert all(map(torch.equal, found, expected)), (coding, policy.codecs)
            report = stats(model)
            sent[coding, policy.codecs] = sum(
                sizes.wire_bytes for phase, sizes in report.by_phase.items() if phase.startswith("first")
            )
            if not coding:
                assert any("entropy-coded" in note for note in report.notes)
    for policy in (VALUE_DELTA, EXPONENT_BLOCK):
        assert sent[True, policy.codecs] < sent[False, policy.codecs], sent


def code() -> None:
    run_ranks(coded_bits, 2, timeout_s=280)


def test_coded_parts_equal_stock_fsdp2_in_fewer_bytes() -> None:
    run_with_fake_cuda(code, env=CUDA)


def wrong_values(model: nn.Module) -> int:
    """How many values of the gathered parameters are not what the shards say."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    gathered = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for module in modules:
        module.reshard()
    expected = {name: parameter.full_tensor().bfloat16() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    return sum(int((gathered[name].bfloat16() != value).sum()) for name, value in expected.items())


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
    """Memory that runs out on all ranks, in the middle of what moves state on."""
    with_fake_cuda()
    from fsdp_ciera.gather import device_codecs

    model = build(EXPONENT_BLOCK)
    train(model, rank, 2)
    assert wrong_values(model) == 0
    for parameter in model.parameters():
        parameter.data.to_local().mul_(4.0)  # type: ignore[attr-defined]  # exponents change
    real = device_codecs.cuda.take_blocks
    device_codecs.cuda.take_blocks = failing(real, 2)
    with pytest.raises(torch.OutOfMemoryError):
        settle_sizes(model)
    device_codecs.cuda.take_blocks = real
    settle_sizes(model)  # the first run's hashes had moved on: they must not say "unchanged" now
    assert wrong_values(model) == 0

    model = build(VALUE_DELTA)
    train(model, rank, 3, lr=1e-2)
    real = device_codecs.cuda.apply
    device_codecs.cuda.apply = failing(real, 2)
    with pytest.raises(torch.OutOfMemoryError):
        wrong_values(model)
    device_codecs.cuda.apply = real
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with pytest.raises(CieraDesyncError, match="an earlier gather failed"):  # its moves would be applied twice
        wrong_values(model)
    settle_sizes(model)
    assert wrong_values(model) == 0


def fail_on_all_ranks() -> None:
    run_ranks(failures, 2, timeout_s=280)


def test_nothing_is_wrong_after_memory_ran_out() -> None:
    run_with_fake_cuda(fail_on_all_ranks, env=CUDA)


def flipped_signs(rank: int, world_size: int) -> None:
    with_fake_cuda()
    model = build(VALUE_DELTA)
    train(model, rank, 2)
    model.q_proj.weight.data.to_local().neg_()  # type: ignore[union-attr, operator]
    model.q_proj.unshard()  # type: ignore[union-attr, operator]
    model.q_proj.reshard()  # type: ignore[union-attr, operator]
    with pytest.raises(CieraDesyncError, match="q_proj"):
        settle_sizes(model)


def without_kernels(rank: int, world_size: int) -> None:
    with_fake_cuda()
    from fsdp_ciera.gather import collective

    if rank == 1:  # an old driver, say
        collective.kernels_are_there = lambda device: False
    model = build(VALUE_DELTA)
    with pytest.raises(CieraMismatchError, match="groups"):
        train(model, rank, 2)


def differ() -> None:
    run_ranks(flipped_signs, 2, timeout_s=280)
    run_ranks(without_kernels, 2, timeout_s=280)


def test_flipped_signs_and_a_rank_without_kernels_are_told() -> None:
    run_with_fake_cuda(differ, env=CUDA)

"""Kernels and codecs through the production launcher (cuda.py, launch.py, `cuda.core`): the shipped PTX runs in the PTX
interpreter, behind a stand-in driver, on CPU tensors. It shows what is launched with what, and that the codecs get the bytes
of the host kernels; it says nothing of a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from fake_cuda import run_with_fake_cuda
from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.gather.layout import build_layout
from fsdp_ciera.gather.lockstep import LockstepState
from fsdp_ciera.kernels import reference
from fsdp_ciera.kernels.changes import Form, Received
from fsdp_ciera.kernels.dispatch import VARIABLE, kernels_of
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat

CUDA = {VARIABLE: "cuda"}


def random_values(fmt: FloatFormat, num_values: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (num_values * fmt.item_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(fmt.dtype)


def stepped(values: torch.Tensor, fmt: FloatFormat, share: float, seed: int) -> torch.Tensor:
    """Most changed values a few units away, some anywhere."""
    generator = torch.Generator().manual_seed(seed)
    fresh = values.clone().view(fmt.int_dtype)
    chosen = torch.rand(len(values), generator=generator) < share
    fresh[chosen] += torch.randint(-9, 9, (int(chosen.sum()),), generator=generator).to(fmt.int_dtype)
    far = torch.rand(len(values), generator=generator) < share / 5
    fresh[far] = torch.randint(-30000, 30000, (int(far.sum()),), generator=generator).to(fmt.int_dtype)
    return fresh.view(fmt.dtype)


def kernels_in_child() -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda(check_races=True)
    for fmt in FORMATS.values():
        for num_values in (1, 2047, 4999):
            values = random_values(fmt, num_values, num_values)
            kernels = kernels_of(values)
            assert kernels is not reference
            assert torch.equal(kernels.hash_blocks(values, fmt, 64), reference.hash_blocks(values, fmt, 64))
            sizes = (num_values, num_values * fmt.low_bytes, (num_values * fmt.top_bits + 7) // 8)
            planes = [[torch.zeros(size, dtype=torch.uint8) for size in sizes] for _ in range(2)]
            for one, into in zip((kernels, reference), planes, strict=True):
                one.split_planes(values, fmt, into[0], into[1], into[2] if fmt.top_bits else None)
            assert all(map(torch.equal, *planes))
            out = torch.zeros_like(values)
            kernels.merge_planes(planes[0][0], planes[0][1], planes[0][2] if fmt.top_bits else None, fmt, out)
            assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))
            fresh, last, expected_last = stepped(values, fmt, 0.2, 1), values.clone(), values.clone()
            found = kernels.find_changes(fresh, last, fmt, Form())
            expected = reference.find_changes(fresh, expected_last, fmt, Form())
            assert torch.equal(last.view(torch.uint8), fresh.view(torch.uint8))
            assert found.changed is not None and expected.changed is not None
            assert torch.equal(found.changed, expected.changed) and torch.equal(found.moves, expected.moves)
            assert torch.equal(found.literals, expected.literals)
            assert kernels.count_bits(found.changed, num_values) == len(found.moves)
            again, into = values.clone(), torch.zeros_like(values)
            used = kernels.apply_changes(
                again, fmt, Received(Form(), found.changed, None, found.moves[:0], found.moves, found.literals), into
            )
            assert (used.num_moves, used.num_literals) == (len(found.moves), len(found.literals))
            for restored in (again, into):
                assert torch.equal(restored.view(torch.uint8), fresh.view(torch.uint8))
        rows = random_values(fmt, 3 * 1001, 5).view(3, 1001)
        assert torch.equal(kernels.checksum(rows), reference.checksum(rows))
    kinds = {launch.kernel for launch in fake.launches}
    assert {"hash_bf16", "split_fp16", "merge_fp32", "scan_bf16", "compact_fp32", "apply_fp16", "checksum"} <= kinds, (
        kinds
    )
    assert not [name for name in fake.calls() if "Synchronize" in name or "Memcpy" in name]


def test_kernels_through_the_launcher_equal_the_reference() -> None:
    run_with_fake_cuda(kernels_in_child, env=CUDA)


def codecs_in_child(codecs: tuple[str, ...]) -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda(check_races=False)
    for codec in codecs:
        for fmt in FORMATS.values():
            send_both_ways(codec, fmt)
    assert fake.launches


def send_both_ways(codec: str, fmt: FloatFormat) -> None:
    """Encoded by the CUDA kernels, decoded by them and by the host build: there is one wire format for host sections."""
    num_values = 3001
    layout = build_layout(["w"], [num_values], [codec], num_values, fmt.dtype)
    sender, receiver, on_host = (LockstepState(layout, 64, 2, rank) for rank in (0, 1, 1))
    for state in (receiver, on_host):
        state.prepare()
    values = random_values(fmt, num_values, 0)
    for step in range(4):
        encoded = sender.encode(values)
        payload = encoded.payload(encoded.num_bytes).clone()
        for state, kernels in ((receiver, "cuda"), (on_host, "host")):
            os.environ[VARIABLE] = kernels
            output = torch.zeros(2, num_values, dtype=fmt.dtype)
            state.decode(payload.expand(2, -1), [len(payload)] * 2, output)
            assert torch.equal(output[0].view(torch.uint8), values.view(torch.uint8)), (codec, fmt.name, step, kernels)
        os.environ[VARIABLE] = "cuda"
        if step != 1:  # once nothing changes
            values = stepped(values, fmt, 0.1, step)


@pytest.mark.parametrize("codecs", [("entropy", "exponent_block"), ("exponent_delta", "value_delta")], ids="-".join)
def test_codecs_through_the_launcher(codecs: tuple[str, ...]) -> None:
    run_with_fake_cuda(codecs_in_child, codecs, env=CUDA)


def damage_in_child() -> None:
    from fake_cuda.bridge import FakeCuda

    FakeCuda()
    fmt = FORMATS[torch.bfloat16]
    values = random_values(fmt, 3000, 0)
    kernels = kernels_of(values)
    found = kernels.find_changes(stepped(values, fmt, 0.2, 1), values.clone(), fmt, Form())
    for moves, literals in ((found.moves[:-1], found.literals), (found.moves, found.literals[:-1])):
        again = values.clone()
        used = kernels.apply_changes(again, fmt, Received(Form(), found.changed, None, moves[:0], moves, literals))
        assert (used.num_moves, used.num_literals) != (len(moves), len(literals))


def test_damage_is_told_and_touches_nothing_outside() -> None:
    run_with_fake_cuda(damage_in_child, env=CUDA)


def test_without_a_driver_forcing_the_kernels_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cuda")
    values = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(CieraPolicyError, match=r"is 'cuda', but .*(no NVIDIA driver|cannot run on a 'cpu' device)"):
        kernels_of(values).hash_blocks(values, FORMATS[torch.bfloat16], 8)

"""Which kernels serve, and that the codecs send and understand the same bytes under each of them."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest
import torch

from changes_of_values import FORMS, NAMES, changed
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.gather.layout import build_layout
from fsdp_ciera.gather.loopback import Loopback
from fsdp_ciera.kernels import dispatch, host, reference
from fsdp_ciera.kernels.dispatch import VARIABLE, chosen_for, kernels_of
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.reference import CHUNK_VALUES
from loops import make_loop

needs_build = pytest.mark.skipif(bool(host.WHY_NOT), reason=f"no host build: {host.WHY_NOT}")
VALUES = torch.zeros(3)


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says, and whatever was found out and warned of before."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "_REGISTRY", dispatch._Registry())


def test_the_variable_is_the_documented_one() -> None:
    assert VARIABLE == "FSDP_CIERA_KERNELS"


@pytest.mark.parametrize("why_not", ["", "there is no compiler"])
def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch, why_not: str) -> None:
    monkeypatch.setattr(host, "WHY_NOT", why_not)
    monkeypatch.setenv(VARIABLE, "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # who asks for it needs no warning
        assert kernels_of(VALUES) is reference


@pytest.mark.parametrize("forced", [None, "host"])
def test_the_host_build_is_the_default_on_cpu_and_can_be_forced(
    monkeypatch: pytest.MonkeyPatch, forced: str | None
) -> None:
    monkeypatch.setattr(host, "WHY_NOT", "")
    if forced is not None:
        monkeypatch.setenv(VARIABLE, forced)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels_of(VALUES) is host


def test_an_empty_value_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert chosen_for(torch.device("cpu")) == "host"


@pytest.mark.parametrize("wrong", ["numpy", "Host", "reference,host"])
def test_any_other_value_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(VARIABLE, wrong)
    with pytest.raises(CieraPolicyError) as caught:
        kernels_of(VALUES)
    for said in (VARIABLE, repr(wrong), "'reference'", "'host'"):
        assert said in str(caught.value)


def test_a_host_build_that_is_forced_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WHY_NOT", "the compiler is on strike")
    monkeypatch.setenv(VARIABLE, "host")
    with pytest.raises(CieraPolicyError, match=r"'host'.*the compiler is on strike"):
        kernels_of(VALUES)


def test_without_a_host_build_the_reference_serves_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WHY_NOT", "the compiler is on strike")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [kernels_of(VALUES) for _ in range(3)] == [reference] * 3
    assert len(caught) == 1
    assert "the compiler is on strike" in str(caught[0].message) and "reference" in str(caught[0].message)


def test_other_devices_have_the_reference_and_no_host_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WHY_NOT", "")
    values = torch.empty(3, device="meta")
    with pytest.warns(UserWarning, match="on meta the torch reference"):
        assert kernels_of(values) is reference
    monkeypatch.setenv(VARIABLE, "host")
    with pytest.raises(CieraPolicyError, match=r"'host'.*not on meta"):
        kernels_of(values)


# ---- codecs

KERNELS: tuple[tuple[str, ModuleType], ...] = (("reference", reference), ("host", host))
STEPS = ["nothing", *FORMS, "nothing"]


def payloads_of(loop: Loopback, shards: torch.Tensor) -> list[torch.Tensor]:
    """What the ranks send."""
    settled_bytes = max(loop.announce(rank, shard) for rank, shard in enumerate(shards))
    loop.settle_all(settled_bytes)
    return [loop.take_payload(rank, shard) for rank, shard in enumerate(shards)]


def decoded(loop: Loopback, rank: int, payloads: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """All ranks' shards, as this rank has them afterwards; its own slot stays 0."""
    output = torch.zeros_like(like)
    loop.decode(rank, torch.stack(payloads), output)
    channel = loop.channels[rank]
    assert channel.settled is not None
    channel.complete(channel.settled, None, output)
    return output


def check_codec(
    monkeypatch: pytest.MonkeyPatch, codec: str, dtype: torch.dtype, num_values: int, steps: list[str]
) -> None:
    """A few gathers of two ranks: equal payloads, and each decodes the other's."""
    layout = build_layout(NAMES[:1], [num_values], [codec], num_values, dtype)
    loops = {name: make_loop(layout, 2) for name, _ in KERNELS}
    integers = FORMATS[dtype].int_dtype
    shards = torch.randn(2, num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    for step in steps:
        if step in FORMS:
            shards = torch.stack([changed(shard, step, seed) for seed, shard in enumerate(shards)])
        payloads = {}
        for name, module in KERNELS:
            monkeypatch.setenv(VARIABLE, name)
            assert kernels_of(shards) is module
            payloads[name] = payloads_of(loops[name], shards)
        for one, other in zip(*payloads.values(), strict=True):
            assert torch.equal(one, other), step
        for (name, _), (sender, _) in zip(KERNELS, KERNELS[::-1], strict=True):
            monkeypatch.setenv(VARIABLE, name)
            for rank in range(2):
                output = decoded(loops[name], rank, payloads[sender], shards)
                assert torch.equal(output[1 - rank].view(integers), shards[1 - rank].view(integers)), (step, name)
                assert not output[rank].view(integers).any()


@needs_build
@pytest.mark.rotating
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_codecs_send_and_understand_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, codec: str, dtype: torch.dtype
) -> None:
    check_codec(monkeypatch, codec, dtype, 10_007, STEPS)


@needs_build
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_codecs_agree_over_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    steps = ["nothing", "few", "small ones far, large ones replaced", "some replaced"]
    check_codec(monkeypatch, codec, torch.bfloat16, CHUNK_VALUES + 300, steps)

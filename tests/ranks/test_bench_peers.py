"""fsdp_ciera/bench/peers.py: the lossless rivals are stock FSDP2 bit for bit, the lossy one keeps within its bound."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ciera.bench.peers import Int8AllGather, PeerAllGather, StatelessAllGather, use
from fsdp_ciera.errors import MissingPeerError, PeerError
from fsdp_ciera.testing import run_ranks
from tiny_moe import Case, Training, bits, build, local_part

SEED = 7


def _installed_coders() -> list[str]:
    try:
        import zipnn  # noqa: F401
    except ImportError:
        return ["zstd", "zstd_planes"]
    return ["zstd", "zstd_planes", "zipnn"]


def _gathered(peer: PeerAllGather, values: torch.Tensor) -> torch.Tensor:
    """As FSDP2 calls it: `values` [n] are copied into this rank's slot, which is then the input."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    output = peer.allocate((world_size * values.numel(),), dtype=values.dtype, device=values.device)
    slot = output[rank * values.numel() : (rank + 1) * values.numel()]
    slot.copy_(values)
    assert dist.group.WORLD is not None
    assert peer(output, slot, dist.group.WORLD, async_op=True) is None
    return output.view(world_size, -1)


def _all_shards(dtype: torch.dtype, length: int) -> list[torch.Tensor]:
    shards = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(SEED + rank)
        shards.append((torch.randn(length, generator=generator) * 10.0 ** (rank - 1)).to(dtype))
    return shards


def _lossless_gathers(rank: int, world_size: int, compress: str) -> None:
    peer, expected_bytes = StatelessAllGather(compress), 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for length in (1, 2, 7, 511, 4097, 70_001):
            shards = _all_shards(dtype, length)
            shards[0][: length // 2] = 0.0  # so that sizes differ between the ranks
            specials = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).tiny / 2])
            shards[1][: min(length, 5)] = specials[:length].to(dtype)
            before = peer.sent_bytes
            assert torch.equal(bits(_gathered(peer, shards[rank])), bits(torch.cat(shards))), (compress, dtype, length)
            raw_bytes = length * dtype.itemsize
            assert 8 < peer.sent_bytes - before <= (world_size - 1) * (raw_bytes + 8)
            expected_bytes += (world_size - 1) * (raw_bytes + 8)
    assert peer.sent_bytes < 0.95 * expected_bytes
    mixed = torch.full((999,), rank, dtype=torch.uint8)  # FSDP2's buffer for a group of several dtypes
    assert torch.equal(_gathered(peer, mixed), torch.arange(world_size, dtype=torch.uint8)[:, None].expand(-1, 999))
    assert _gathered(peer, torch.empty(0)).numel() == 0
    assert peer.num_gathers == 3 * 6 + 2
    assert peer.codec_seconds > 0.0


@pytest.mark.parametrize("compress", _installed_coders())
def test_stateless_gathers_are_lossless_on_any_length_and_dtype(compress: str) -> None:
    run_ranks(_lossless_gathers, 2, compress)


def _train(peers_of: Any, case: Case) -> tuple[list[torch.Tensor], list[PeerAllGather]]:
    """Losses of three steps and then all local shards, and the peers that gathered."""
    training = Training(case, None)
    peers = use(training.model, peers_of) if peers_of is not None else []
    seen = [training.train()[0] for _ in range(3)]
    return seen + [local_part(p).clone() for p in training.model.parameters()], peers


def _lossless_training(rank: int, world_size: int, coders: list[str]) -> None:
    for case in (Case(), Case(reshard_after_forward=False, param_dtype=None)):
        expected, _ = _train(None, case)
        for compress in coders:
            got, peers = _train(lambda compress=compress: StatelessAllGather(compress), case)
            assert len(peers) == 3  # two layers and the root
            for a, b in zip(expected, got, strict=True):
                assert torch.equal(a, b), (rank, compress, case)
            gathers = sum(peer.num_gathers for peer in peers)
            assert gathers == 3 * (5 if case.reshard_after_forward else 3)  # the root keeps its parameters


def test_training_with_stateless_gathers_is_stock_fsdp2_bit_for_bit() -> None:
    run_ranks(_lossless_training, 2, _installed_coders())


def _int8_gathers(rank: int, world_size: int, block_size: int) -> None:
    peer, expected_bytes = Int8AllGather(block_size), 0
    # What rounding to the dtype adds, relative; and fp32 arithmetic with 127 x scale.
    units = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
    for dtype, unit in units.items():
        for length in (1, 7, block_size - 1, block_size, block_size + 1, 5 * block_size + 3):
            shards = _all_shards(dtype, length)
            shards[1][: length // 3] = 0.0
            got = _gathered(peer, shards[rank])
            for shard, received in zip(shards, got, strict=True):
                for block, result in zip(
                    torch.split(shard, block_size), torch.split(received, block_size), strict=True
                ):
                    exact, result = block.double(), result.double()
                    bound = exact.abs().max() / 127 / 2 * (1 + 1e-4) + unit * result.abs()
                    assert ((exact - result).abs() <= bound).all(), (dtype, length)
            assert torch.equal(bits(got), bits(_gathered(peer, shards[rank])))
            num_blocks = -(-length // block_size)
            expected_bytes += 2 * (world_size - 1) * (-(-length // 4) * 4 + 4 * num_blocks)
    assert peer.sent_bytes == expected_bytes
    digest = got.clone()
    dist.broadcast(digest, src=0)
    assert torch.equal(digest, got), "ranks compute with different weights"


@pytest.mark.parametrize("block_size", [64, 4096])
def test_int8_gather_keeps_its_error_bound_and_sends_what_its_formula_says(block_size: int) -> None:
    run_ranks(_int8_gathers, 2, block_size)


def _int8_special_values(rank: int, world_size: int) -> None:
    values = torch.linspace(-1, 1, 24).reshape(6, 4)
    values[1] = 0.0
    values[2, 1] = torch.inf
    values[3, 2] = torch.nan
    values[4] = torch.tensor(
        [1.4e-45, -2.8e-45, 0.0, 1.4e-43]
    )  # denormals of fp32, 127 x less than which there is nothing
    values[5] = torch.tensor([torch.finfo(torch.float32).max, -1.0, 0.0, -torch.finfo(torch.float32).max])
    for got in _gathered(Int8AllGather(4), values.view(-1)).view(-1, 6, 4):
        assert torch.equal(got[1], torch.zeros(4))
        assert got[2:4].isnan().all()
        assert torch.equal(got[4], values[4])
        assert torch.allclose(got[5], values[5], rtol=1e-6, atol=1e36)
        assert ((got[0] - values[0]).abs() <= values[0].abs().max() / 127 / 2 * 1.0001).all()
    mixed = torch.arange(256).to(torch.uint8)
    assert torch.equal(_gathered(Int8AllGather(4), mixed), mixed.expand(world_size, -1))


def test_int8_gather_of_zeros_infinities_nans_and_denormals() -> None:
    run_ranks(_int8_special_values, 2)


def _int8_training(rank: int, world_size: int) -> None:
    case = Case(lr=1e-3)
    expected, _ = _train(None, case)
    got, peers = _train(Int8AllGather, case)
    again, _ = _train(Int8AllGather, case)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not reproducible"
    losses = torch.stack([torch.stack(expected[:3]), torch.stack(got[:3])]).float()
    dist.all_reduce(losses)
    assert losses.isfinite().all()
    stock, int8 = losses
    assert not torch.equal(stock, int8) and torch.allclose(stock, int8, rtol=0.02)
    assert any(not torch.equal(a, b) for a, b in zip(expected[3:], got[3:], strict=True)), "int8 changed nothing"
    raw_bytes = int8_bytes = 0
    for peer in peers:
        assert peer.param_group is not None
        sizes = [param.padded_sharded_param_size.numel() for param in peer.param_group.fsdp_params]
        raw_bytes += peer.num_gathers * 2 * sum(sizes)
        int8_bytes += peer.num_gathers * (-(-sum(sizes) // 4) * 4 + 4 * len(sizes))  # a block holds the largest
    assert sum(peer.sent_bytes for peer in peers) == (world_size - 1) * int8_bytes < 0.53 * (world_size - 1) * raw_bytes


def test_int8_training_differs_a_little_and_counts_half_the_bytes() -> None:
    run_ranks(_int8_training, 2)


def _layer_norms(rank: int, world_size: int) -> None:
    """A block that spanned a layer norm's ones and a weight of 1e-3 would have a scale of 1 / 127."""
    model: Any = build(Case(), None)
    with torch.no_grad():
        for parameter in model.model.layers[0].self_attn.parameters():
            local_part(parameter).mul_(1e-3)
    use(model, Int8AllGather)
    model(torch.arange(29))  # names and dtypes are settled
    layer = model.model.layers[0]
    layer.reshard()
    exact = layer.self_attn.q_proj.weight.full_tensor()
    layer.unshard()
    weight = layer.self_attn.q_proj.weight
    assert isinstance(weight, nn.Parameter)
    error = (weight.float() - exact).abs().max()
    assert 0.0 < error < exact.abs().max() / 100


def test_int8_blocks_begin_anew_at_every_parameter() -> None:
    run_ranks(_layer_norms, 2)


def test_errors_of_settings_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="compress='lz4' is not allowed: one of zstd, zstd_planes, zipnn"):
        StatelessAllGather("lz4")
    with pytest.raises(PeerError, match="block_size 0 is not allowed"):
        Int8AllGather(0)
    with pytest.raises(PeerError, match="only 'cpu' is supported"):
        Int8AllGather().allocate((1,), dtype=torch.bfloat16, device=torch.device("meta"))
    monkeypatch.setitem(sys.modules, "zipnn", None)
    with pytest.raises(MissingPeerError, match=r"pip install zipnn==0\.5\.4") as error:
        StatelessAllGather("zipnn")
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)

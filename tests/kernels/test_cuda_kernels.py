"""kernels/cuda.py through the production launcher (launch.py, `cuda.core`): the shipped PTX runs in the PTX interpreter, behind
a stand-in driver, on CPU tensors. It shows what is launched with what, that results are those of the reference, that nothing
waits for the device, and that peers and runs cost no launches; it says nothing of a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda import run_with_fake_cuda
from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.kernels import cuda, reference, reference_tiles
from fsdp_ciera.kernels.dispatch import VARIABLE, kernels_of, tile_kernels_of
from fsdp_ciera.kernels.heads import HEAD_BYTES, TILES
from fsdp_ciera.kernels.tiles import Payloads, Scan, SectionRoom, TileKernels
from kernel_cases import (
    BF16,
    FLOATS,
    GuardedMemory,
    Layout,
    Unit,
    all_cases,
    layout_of,
    run_case,
    sent_payloads,
    symbol_plane_bytes,
)

CUDA = {VARIABLE: "cuda"}
CPU = torch.device("cpu")


# ---- equal to the reference


def cases_in_child(kernels: tuple[str, ...]) -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda(check_races=False)
    assert tile_kernels_of(CPU) is cuda
    ran = [case for case in all_cases() if case.quick and case.kernels[0].startswith(kernels)]
    for case in ran:
        memory = GuardedMemory(CPU, 0xCD)
        run_case(case, memory)
        memory.check_guards()
    assert {launch.kernel for launch in fake.launches} == {kernel for case in ran for kernel in case.kernels}
    assert {launch.block for launch in fake.launches} == {(256, 1, 1)}
    assert not [name for name in fake.calls() if "Synchronize" in name or "Memcpy" in name]
    print(len(ran), "cases")


@pytest.mark.parametrize(
    "kernels",
    [("scan", "pack"), ("apply",), ("split", "merge", "copy", "hash"), ("put", "check", "write")],
    ids="-".join,
)
def test_kernels_through_the_launcher_equal_the_reference(kernels: tuple[str, ...]) -> None:
    run_with_fake_cuda(cases_in_child, kernels, env=CUDA)


def test_symbols_ask_for_room() -> None:
    """What a kernel could not write or read within its bounds is not launched."""
    unit = Unit(BF16, ((0, 100), (200, 70)))
    tiles, fresh, damage = unit.tiles, unit.fresh[0], torch.zeros(1, dtype=torch.int32)
    tops, out = torch.zeros(2, dtype=torch.uint8), torch.stack(unit.last)
    payloads = sent_payloads(unit, layout_of(unit, "symbols"), 0)
    end = payloads.data.shape[1] - sum(symbol_plane_bytes(unit))
    for wrong in (
        lambda: cuda.scan_symbols(fresh[:269], tiles, BF16),
        lambda: cuda.put_nibbles(fresh, tiles, BF16, tops, torch.zeros(127, dtype=torch.uint8)),
        lambda: cuda.put_nibbles(fresh, tiles, BF16, tops[:1], torch.zeros(128, dtype=torch.uint8)),
        lambda: cuda.merge_symbols(payloads, end + 1, tiles, BF16, out, damage),
        lambda: cuda.merge_symbols(payloads, 0, tiles, BF16, out[:1], damage),
        lambda: cuda.merge_symbols(payloads, 0, tiles, BF16, out.half(), damage),
        lambda: cuda.merge_symbols(payloads, 0, tiles, BF16, out[:, :269], damage),
    ):
        with pytest.raises(AssertionError):
            wrong()


# ---- launches, and what torch does beside them

WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::item",
    "aten::unique2",
    "aten::is_nonzero",
}


class Operations(TorchDispatchMode):
    """Counts torch's operations, and refuses those that wait for a device or copy to or from one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        assert name not in WAITS, name
        assert name not in ("aten::_to_copy", "aten::_pin_memory", "aten::lift_fresh"), (
            f"{name} makes a tensor of host data"
        )
        masks = [arg for arg in args if isinstance(arg, list | tuple) for arg in arg if isinstance(arg, torch.Tensor)]
        assert name not in ("aten::index", "aten::index_put_") or not any(mask.dtype == torch.bool for mask in masks), (
            name
        )
        self.names[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wait",
    [
        lambda values: values[0].item(),
        lambda values: bool(values.any()),
        lambda values: values.nonzero(),
        lambda values: values[values > 0],
        lambda values: torch.tensor([1, 2]),
        lambda values: values.to("meta"),
    ],
)
def test_operations_that_wait_are_refused(wait: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(AssertionError), Operations():
        wait(torch.ones(3))


def functions(unit: Unit, own: int) -> dict[str, Callable[[], Any]]:
    """A call of each function of TileKernels, by its name. Results of others are made by the reference."""
    tiles, fmt, world_size = unit.tiles, unit.fmt, unit.world_size
    fresh, last, exponents = unit.fresh[0], unit.state(unit.last[0]), unit.exponents(unit.last[0])
    rows = torch.stack([unit.state(values) for values in unit.last])
    shards, out = torch.stack(unit.fresh), torch.stack(unit.last)
    state = torch.zeros(world_size - 1, tiles.num_state_values, dtype=torch.uint8)
    damage, number = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    scans: dict[str, Scan] = {
        "values": reference_tiles.scan_values(fresh, last, tiles, fmt, 255),
        "exponents": reference_tiles.scan_exponents(fresh, exponents, tiles, fmt),
    }
    changed = torch.ones(tiles.num_blocks, dtype=torch.uint8)
    sizes, ranks = reference_tiles.block_sizes(changed, tiles)
    table = reference_tiles.section_table(torch.full((5,), 1 << 16), 64, TILES)
    room = SectionRoom(torch.zeros(5 << 16, dtype=torch.uint8), table, 64, 0)
    sent: dict[str, Payloads] = {
        kind: sent_payloads(unit, Layout(kind, fixed_bytes=4096), own) for kind in ("values", "exponents", "blocks")
    }
    symbols = reference_tiles.scan_symbols(fresh, tiles, fmt)
    of_symbols = sent_payloads(unit, layout_of(unit, "symbols"), own)
    symbols_at = of_symbols.sections_at - sum(symbol_plane_bytes(unit))
    nibbles = torch.empty(tiles.num_plane_values // 2, dtype=torch.uint8)
    planes = tiles.num_plane_values * fmt.low_bytes
    fixed_at = HEAD_BYTES
    wide = Payloads(torch.zeros(world_size, -(-(fixed_at + 2 * planes) // 16) * 16, dtype=torch.uint8), own,
                    sent["values"].row_ok, HEAD_BYTES, 0, 0)  # fmt: skip
    return {
        "scan_values": lambda: cuda.scan_values(fresh, last, tiles, fmt, 255),
        "scan_exponents": lambda: cuda.scan_exponents(fresh, exponents, tiles, fmt),
        "change_sizes": lambda: cuda.change_sizes(scans["values"], tiles, fmt.item_bytes),
        "pack_values": lambda: cuda.pack_values(fresh, last, tiles, fmt, 255, scans["values"], room),
        "pack_exponents": lambda: cuda.pack_exponents(fresh, exponents, tiles, fmt, scans["exponents"], room),
        "apply_values": lambda: cuda.apply_values(sent["values"], tiles, fmt, 255, rows, damage),
        "apply_exponents": lambda: cuda.apply_exponents(sent["exponents"], tiles, state, damage),
        "split_tiles": lambda: cuda.split_tiles(
            fresh, tiles, fmt, torch.empty(planes, dtype=torch.uint8), None, torch.empty_like(state[0])
        ),
        "split_rows": lambda: cuda.split_rows(shards, own, tiles, fmt, state),
        "merge_rows": lambda: cuda.merge_rows(state, wide, fixed_at, tiles, fmt, out),
        "copy_out": lambda: cuda.copy_out(rows, own, tiles, out),
        "scan_symbols": lambda: cuda.scan_symbols(fresh, tiles, fmt),
        "symbol_sizes": lambda: cuda.symbol_sizes(symbols, tiles),
        "pack_symbols": lambda: cuda.pack_symbols(fresh, tiles, fmt, symbols, room),
        "put_nibbles": lambda: cuda.put_nibbles(fresh, tiles, fmt, symbols.tops, nibbles),
        "merge_symbols": lambda: cuda.merge_symbols(of_symbols, symbols_at, tiles, fmt, out, damage),
        "hash_blocks": lambda: cuda.hash_blocks(fresh, tiles, fmt, None),
        "block_sizes": lambda: cuda.block_sizes(changed, tiles),
        "pack_blocks": lambda: cuda.pack_blocks(fresh, tiles, fmt, changed, ranks, room),
        "put_blocks": lambda: cuda.put_blocks(sent["blocks"], tiles, state, damage),
        "section_table": lambda: cuda.section_table(sizes, 64, TILES),
        "checksum": lambda: cuda.checksum(shards),
        "write_head": lambda: cuda.write_head(sent["values"].data[0], 7, number, number, number),
        "check_heads": lambda: cuda.check_heads(
            sent["values"].data, own, 7, damage, torch.zeros(world_size, dtype=torch.int64)
        ),
    }


def counts_in_child() -> None:
    from fake_cuda.bridge import FakeCuda

    class Counting(FakeCuda):
        """Runs nothing."""

        def _run(self, ptx: str, name: str, dims: tuple[int, ...], *rest: Any) -> None:
            self.counted.append((name, dims[:3]))

    fake = Counting()
    found: dict[str, set[tuple[Any, ...]]] = {}
    for world_size in (2, 8, 64):
        for num_runs in (1, 7):
            runs = tuple((1000 * number, 700 + number) for number in range(num_runs))
            unit = Unit(BF16, runs, 0.05, world_size=world_size, block_size=64)
            for name, call in functions(unit, own=1).items():
                fake.counted: list[tuple[str, tuple[int, ...]]] = []
                with Operations() as operations:
                    call()
                kernels = tuple(kernel for kernel, _ in fake.counted)
                found.setdefault(name, set()).add((kernels, tuple(sorted(operations.names.items()))))
                grids = [grid for _, grid in fake.counted]
                if name.startswith(("apply", "put_blocks", "merge", "copy", "split_rows")):
                    assert [grid[1] for grid in grids] == [world_size - 1], (name, grids)
    assert set(found) == {name for name in vars(TileKernels) if not name.startswith("_")}
    for name, ways in found.items():
        assert len(ways) == 1, f"{name} launches differently for other numbers of peers or runs: {ways}"
        [(kernels, operations)] = ways
        print(name, len(kernels), "launches,", sum(dict(operations).values()), "operations of torch")


def test_launches_depend_neither_on_peers_nor_on_runs() -> None:
    print(run_with_fake_cuda(counts_in_child, env=CUDA))


# ---- the CPU's kernels where the tile kernels are forced


def test_without_a_driver_forcing_the_kernels_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cuda")
    for choose in (lambda: kernels_of(torch.zeros(8)), lambda: tile_kernels_of(CPU)):
        with pytest.raises(CieraPolicyError, match=r"is 'cuda', but .*(no NVIDIA driver|cannot run on a 'cpu' device)"):
            choose()


def cpu_kernels_in_child() -> None:
    from fake_cuda.bridge import FakeCuda

    FakeCuda()
    assert kernels_of(torch.zeros(8)) is reference
    for fmt in FLOATS:
        values = torch.randn(3000).to(fmt.dtype)
        assert len(kernels_of(values).hash_blocks(values, fmt, 64)) == 47


def test_codecs_on_cpu_keep_their_kernels() -> None:
    run_with_fake_cuda(cpu_kernels_in_child, env=CUDA)

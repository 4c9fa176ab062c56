"""Two ranks of FSDP2 on one GPU: losses and parameters with a policy have the bits that stock FSDP2 gives in the same run.

NCCL refuses two ranks on one GPU of one host. Each rank has an NCCL_HOSTID of its own here, so that NCCL takes them for two
hosts and connects them by sockets over loopback. Should a version of NCCL refuse that too, gloo remains.

Stock FSDP2 runs twice first: were it not the same both times, the comparison would say nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_ciera import CieraPolicy, CieraStats, settle_sizes, stats
from places import python_path
from tiny_moe import BY_BYTES, PAPERS_CODEC, Case, Training, bits, local_part

WORLD_SIZE = 2
LIMIT_S = 240
OPERATIONS = ("train", "accumulate", "eval", "inference", "no_sync", "train", "skip", "train", "train")
NCCL_ON_ONE_GPU = {
    "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1", "NCCL_RAS_ENABLE": "0",
}  # fmt: skip
CASES = {
    "bf16 gathers": Case(operations=OPERATIONS),
    "fp32": Case(param_dtype=None, operations=OPERATIONS),
    "bf16 weights, kept after forward": Case(
        param_dtype=None, model_dtype=torch.bfloat16, reshard_after_forward=False, operations=OPERATIONS
    ),
}
POLICIES = {
    "default, a slow link": CieraPolicy(**BY_BYTES),
    "paper's codec": PAPERS_CODEC,
    "value_delta": CieraPolicy(codecs=("value_delta",)),
}


def results(case: Case, policy: CieraPolicy | None, backend: str) -> tuple[list[torch.Tensor], CieraStats | None]:
    """Losses of every operation and this rank's parameters after it."""
    training = Training(case, policy)
    if backend == "gloo":  # which knows no averages
        training.model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    seen: list[torch.Tensor] = []
    for operation in case.operations:
        seen += getattr(training, operation)()
        seen += [local_part(parameter).clone() for parameter in training.model.parameters()]
        if policy is not None:
            settle_sizes(training.model)  # on CUDA gathers are compressed only then
    return seen, stats(training.model) if policy is not None else None


def first_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> str | None:
    """Where two runs differ in a bit, or `None`."""
    assert len(one) == len(other)
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        if not torch.equal(bits(a), bits(b)):
            return f"result {number} of {len(one)}, {tuple(a.shape)}: {int((bits(a) != bits(b)).sum())} bytes differ"
    return None


def compare(backend: str, device_type: str) -> Iterator[dict[str, Any]]:
    """What this rank found, a line for each case."""
    for name, case in CASES.items():
        stock, again = (results(case, None, backend)[0] for _ in range(2))
        assert first_difference(stock, again) is None, f"{name}: stock FSDP2 differs from itself"
        assert all(tensor.device.type == device_type for tensor in stock if tensor.numel())
        notes: list[str] = []
        for policy_name, policy in POLICIES.items():
            seen, report = results(case, policy, backend)
            different = first_difference(stock, seen)
            assert different is None, f"{name}, {policy_name}: {different}"
            assert report is not None and report.num_gathers > 0
            kinds = {phase.partition("/")[0] for phase in report.gathers_by_phase}
            assert len(policy.codecs) > 1 or {"cold", "first", "repeat"} <= kinds, report.gathers_by_phase
            notes += report.notes
        loss = float(next(tensor for tensor in stock if tensor.ndim == 0))
        yield {"case": name, "tensors": len(stock), "first loss": loss, "notes": sorted(set(notes))}


def run_rank(rank: int, backend: str, device_type: str, port: int) -> None:
    """What each process does. On device type cpu it shows that this file itself works."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", CUBLAS_WORKSPACE_CONFIG=":4096:8",
        NCCL_HOSTID=f"one-gpu-rank-{rank}", **NCCL_ON_ONE_GPU,
    )  # fmt: skip
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # memory is to be as it is in training
    options: dict[str, Any] = {"timeout": timedelta(seconds=LIMIT_S / 2)}
    if device_type == "cuda":
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        if backend == "nccl":
            options["device_id"] = torch.device("cuda", 0)
    dist.init_process_group(backend, rank=rank, world_size=WORLD_SIZE, **options)
    about = {"rank": rank, "backend": backend, "torch": torch.__version__}
    if device_type == "cuda":
        about["device"] = torch.cuda.get_device_name()
    if backend == "nccl":
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    print(json.dumps(about), flush=True)
    for line in compare(backend, device_type):
        print(json.dumps(line), flush=True)
    dist.barrier()
    print("done", flush=True)
    dist.destroy_process_group()


def run_two_ranks(backend: str, device_type: str, folder: Path) -> str:
    """What both ranks printed. Fails where one failed, or had not ended after LIMIT_S."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": python_path()}
    logs = [folder / f"rank-{rank}.log" for rank in range(WORLD_SIZE)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-X", "faulthandler", __file__, str(rank), backend, device_type, str(port)]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env))
    deadline, failed = time.monotonic() + LIMIT_S, ""
    try:
        while any(process.poll() is None for process in processes) and not failed:
            if time.monotonic() > deadline:
                failed = f"had not ended after {LIMIT_S} s"
            elif any(process.poll() for process in processes):
                time.sleep(5)  # so that the other one says what it met
                failed = "failed"
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    printed = "\n".join(f"--- rank {rank}\n{log.read_text()[-8000:]}" for rank, log in enumerate(logs))
    codes = [process.returncode for process in processes]
    done = [log.read_text().splitlines().count("done") for log in logs]
    assert not failed and codes == [0] * WORLD_SIZE, f"two ranks on {backend}: {failed or 'failed'}, {codes}\n{printed}"
    assert done == [1] * WORLD_SIZE, printed
    return printed


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_same_bits_as_stock_fsdp2(backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    print("\n" + run_two_ranks(backend, "cuda", tmp_path))


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))

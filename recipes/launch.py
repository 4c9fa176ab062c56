"""Starts a recipe: in this process under torchrun, otherwise in one process per rank on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from fsdp_ciera.processes import free_port, is_rank, meeting_point, rank_environment, sigterm_raises
from fsdp_ciera.recipes.config import load_recipe

if TYPE_CHECKING:
    from fsdp_ciera.recipes.train import Show

_GRACE_SECONDS = 10.0  # for ranks to end on their own, once one has failed or the run was interrupted
_POLL_SECONDS = 0.05


def launch(recipe_path: str | Path, overrides: Sequence[str] = (), show: Show | None = None) -> int:
    """Runs the recipe and returns the exit code: 0, the first failed rank's, or 130 after Ctrl-C.

    With `RANK` and `WORLD_SIZE` in the environment (torchrun) this process is one rank, and `show` makes its display.
    Otherwise `parallel.ranks` processes are started here, and stopped together when one fails. Raises `RecipeError` or
    `CieraPolicyError`, before anything is started as far as that can be known.
    """
    recipe = load_recipe(recipe_path, overrides)
    if is_rank():
        from fsdp_ciera.recipes.train import Silent, train

        train(recipe, show=show or Silent)
        return 0
    from fsdp_ciera.recipes.data import find_files
    from fsdp_ciera.recipes.shard import ciera_policy

    ciera_policy(recipe)
    find_files(recipe.data.files)
    command = [sys.executable, "-m", "fsdp_ciera", "finetune", str(recipe_path)]
    command += [argument for override in overrides for argument in ("--set", override)]
    return run_local_ranks(command, recipe.parallel.ranks)


def run_local_ranks(command: Sequence[str], num_ranks: int, defaults: Mapping[str, str] = MappingProxyType({})) -> int:
    """Runs `command` as ranks 0 to `num_ranks - 1` of one process group on 127.0.0.1, and returns the exit code.

    `defaults` are environment variables for the ranks, unless the caller's environment has them.
    When a rank fails the others are stopped; Ctrl-C and SIGTERM are passed on. No rank outlives the call.
    """
    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    with sigterm_raises(KeyboardInterrupt):
        try:
            for rank in range(num_ranks):
                # A session of its own, or a terminal's Ctrl-C would reach the ranks twice: from it and from us.
                environment = {**defaults, **_environment(rank, num_ranks, port)}
                ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
            return _wait(ranks)
        except KeyboardInterrupt:
            for process in ranks:
                process.send_signal(signal.SIGINT)
            _await_end(ranks)
            return 128 + signal.SIGINT
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun would make, for ranks of one machine; variables that the caller has set stay."""
    meeting = meeting_point(port)
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS is not deterministic
        "GLOO_SOCKET_IFNAME": meeting.pop("GLOO_SOCKET_IFNAME"),
    }
    return {**defaults, **os.environ, **rank_environment(rank, num_ranks), **meeting}


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """0 once all ranks have ended well; otherwise the code of the first that did not, after the others' grace."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [code for code in codes if code]
        if failed:
            _await_end(ranks)
            return failed[0] if failed[0] > 0 else 128 - failed[0]  # Popen reports death by signal N as -N
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_SECONDS)


def _await_end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))

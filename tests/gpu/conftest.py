"""Everything in this folder needs a GPU; without one it is skipped, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_ciera.kernels.launch import why_not_available


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return why_not_available(torch.device("cuda", torch.cuda.current_device()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks this folder's tests (the hook sees those of all folders) when they cannot run."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = _why_not() if ours else None
    if reason is not None:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))

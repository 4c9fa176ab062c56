"""Where things lie in the repository."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
BENCHMARKS = ROOT / "benchmarks"
NATIVE = ROOT / "kernels" / "native"
SHIM = HELPERS / "shim"


def python_path() -> str:
    """`PYTHONPATH` for a child that must find what this process finds."""
    return os.pathsep.join(filter(None, sys.path))

"""Which tests of kernels need not run again: those that interpret PTX or compile the CUDA source for the CPU take minutes, and
depend on nothing but the kernels, on these tests and on what both use.

    python tests/helpers/kernel_digest.py            what the digest is, and what the one that passed was
    python tests/helpers/kernel_digest.py --write    the tests have passed: `make test` leaves them out from now on
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from places import HELPERS, ROOT

LANE = ("test_emulator.py", "test_emulator_fuzz.py", "test_kernels_ptx.py", "test_kernels_shim.py")
"""Files that are left out as a whole."""
LANE_IN_PART = ("test_host_build.py", "test_shim_device.py")
"""Those of which the tests that are marked `kernels_only` are."""
PASSED = ROOT / "tests" / "kernels" / "passed.digest"
_CODE = {".py", ".cu", ".cuh", ".hpp", ".cpp", ".h", ".ptx"}


def inputs() -> list[Path]:
    """Every file that these tests depend on, in order."""
    folders = [ROOT / "kernels", HELPERS / "emulator", HELPERS / "shim"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in _CODE]
    files += [HELPERS / name for name in ("kernel_cases.py", "shim_device.py")]
    tests = (*LANE, *LANE_IN_PART, "test_kernels_reference.py")  # the last one has cases of the others
    files += [ROOT / "tests" / "kernels" / name for name in tests]
    return sorted(files)


def digest() -> str:
    """Of their names and contents."""
    found = hashlib.blake2b(digest_size=16)
    for path in inputs():
        found.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def has_passed() -> bool:
    """Whether all of this has passed as it is."""
    return PASSED.exists() and PASSED.read_text().strip() == digest()


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PASSED.write_text(digest() + "\n")
    print(f"now {digest()}, passed {PASSED.read_text().strip() if PASSED.exists() else 'never'}")

"""Compiles the host build of the kernels when the package is installed. Everything else is in pyproject.toml.

Without a C++ compiler the package installs all the same: the torch reference of the kernels then serves, with one warning.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

NATIVE = Path("fsdp_ciera/kernels/native")
HEADERS = sorted(str(path) for pattern in ("*.cuh", "*.hpp") for path in NATIVE.glob(pattern))
SOURCES = sorted(str(path) for path in NATIVE.glob("*.cpp"))


def source_digest() -> str:
    """What kernels/host.py computes of the same files, so that it can tell a stale build."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES, *HEADERS]):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


class BuildHost(build_ext):
    """Compiles with OpenMP, and without where that fails."""

    def build_extension(self, ext: Extension) -> None:
        """One of the two, or the error of the second."""
        self.force = True  # setuptools goes by dates of files; kernels/host.py goes by what is in them
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildHost},
    ext_modules=[
        Extension(
            "fsdp_ciera.kernels._host",
            sources=SOURCES,
            depends=HEADERS,
            include_dirs=[str(NATIVE)],
            language="c++",
            extra_compile_args=[
                "-O3", "-std=c++17", "-fopenmp", "-fvisibility=hidden", f'-DCIERA_SOURCE="{source_digest()}"',
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ],
)  # fmt: skip

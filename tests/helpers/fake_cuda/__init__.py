"""A CUDA driver for machines without one: launches go through the real cuda.core and run in the PTX interpreter.

    run_with_fake_cuda(function, *args)   calls a test's function in a process that finds the stand-in driver
    FakeCuda                              in that process: lends tensors in host memory to the kernels, and keeps a log

`libcuda.c` is the driver; it is compiled when a test first needs it.
"""

from __future__ import annotations

from fake_cuda.run import run_with_fake_cuda

__all__ = ["run_with_fake_cuda"]

"""The PTX emulator against g++: random integer kernels, through nvcc and the emulator on one side, g++ on the other.

The programs have no undefined behaviour: products, sums and left shifts are unsigned, divisors are neither 0 nor -1, and
shift amounts are below the width. EMULATOR_FUZZ_KERNELS asks for more kernels than the tests', EMULATOR_FUZZ_SEED for
others.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from emulator import Machine, Module
from emulator.toolchain import NVCC, NVCC_MISSING, compile_ptx

KERNELS = int(os.environ.get("EMULATOR_FUZZ_KERNELS", "40"))
SEED = int(os.environ.get("EMULATOR_FUZZ_SEED", "1"))
THREADS = 257
BLOCK = 64

pytestmark = [
    pytest.mark.skipif(NVCC is None, reason=NVCC_MISSING),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the path"),
]

TYPES = {"u8": 8, "u16": 16, "u32": 32, "u64": 64, "s8": 8, "s16": 16, "s32": 32, "s64": 64}
TYPEDEFS = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef signed char s8; typedef short s16; typedef int s32; typedef long long s64;
"""
ON_DEVICE = """
#define HERE static __device__ __forceinline__
HERE u32 popcount(u64 x) { return __popcll(x); }
HERE u32 leading(u32 x) { return __clz((int)x); }
HERE u32 leading(u64 x) { return __clzll((long long)x); }
HERE u32 reverse(u32 x) { return __brev(x); }
HERE u32 high(u32 x, u32 y) { return __umulhi(x, y); }
HERE u64 high(u64 x, u64 y) { return __umul64hi(x, y); }
HERE s32 high(s32 x, s32 y) { return __mulhi(x, y); }
HERE s64 high(s64 x, s64 y) { return __mul64hi(x, y); }
HERE u32 bytes(u32 x, u32 y, u32 s) { return __byte_perm(x, y, s); }
HERE u32 funnel(u32 x, u32 y, u32 n) { return __funnelshift_l(x, y, n); }
"""
ON_HOST = """
#define HERE static inline
HERE u32 popcount(u64 x) { u32 n = 0; for (; x; x &= x - 1) n++; return n; }
HERE u32 leading(u32 x) { u32 n = 0; while (n < 32 && !(x >> (31 - n) & 1)) n++; return n; }
HERE u32 leading(u64 x) { u32 n = 0; while (n < 64 && !(x >> (63 - n) & 1)) n++; return n; }
HERE u32 reverse(u32 x) { u32 r = 0; for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i); return r; }
HERE u32 high(u32 x, u32 y) { return (u64)x * y >> 32; }
HERE u64 high(u64 x, u64 y) { return (unsigned __int128)x * y >> 64; }
HERE s32 high(s32 x, s32 y) { return (s64)x * y >> 32; }
HERE s64 high(s64 x, s64 y) { return (__int128)x * y >> 64; }
HERE u32 bytes(u32 x, u32 y, u32 s) {
    u64 both = (u64)y << 32 | x; u32 r = 0;
    for (int i = 0; i < 4; i++) r |= (u32)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
HERE u32 funnel(u32 x, u32 y, u32 n) { return ((u64)y << 32 | x) << (n & 31) >> 32; }
"""


class Generator:
    """Random C functions of five inputs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def leaf(self, names: list[str]) -> str:
        r = self.random
        if r.random() < 0.75:
            return r.choice(names)
        number = f"0x{r.getrandbits(r.choice([3, 8, 16, 32, 64])):x}ull"
        return r.choice([number, f"{r.getrandbits(8)}u", f"(s32){r.randint(-300, 300)}"])

    def expression(self, depth: int, names: list[str]) -> str:
        r = self.random
        if depth == 0 or r.random() < 0.12:
            return self.leaf(names)

        def part() -> str:
            return f"({self.expression(depth - 1, names)})"

        word, wide = r.choice(["u32", "u64"]), r.choice(["32", "64"])
        narrow, signed = r.choice(["u16", "u32", "u64"]), r.choice(["s16", "s32", "s64"])
        shifted = r.choice([f"u{wide}", f"s{wide}"])
        form = r.randrange(17)
        if form < 4:
            return f"({word}){part()} {r.choice('+-*')} ({word}){part()}"
        if form == 4:
            return f"{part()} {r.choice('&|^')} {part()}"
        if form == 5:
            return f"(u{wide}){part()} << ({part()} & {int(wide) - 1})"
        if form == 6:
            return f"({shifted}){part()} >> ({part()} & {int(wide) - 1})"
        if form == 7:
            return f"({narrow}){part()} {r.choice('/%')} ((({narrow}){part()}) | 1)"
        if form == 8:
            sign, offset = r.choice([("", 1), ("-", 2)])
            return f"({signed}){part()} {r.choice('/%')} ({sign}(s32)(((u32){part()} & 0x7fff) + {offset}))"
        if form == 9:
            comparison = r.choice(["<", ">", "<=", ">=", "==", "!="])
            return f"{part()} {comparison} ({r.choice(list(TYPES))}){part()} ? {part()} : {part()}"
        if form == 10:
            return f"({r.choice(list(TYPES))}){part()}"
        if form == 11:
            return r.choice([f"popcount((u64){part()})", f"leading(({word}){part()})", f"reverse((u32){part()})"])
        if form == 12:
            kind = r.choice(["u32", "u64", "s32", "s64"])
            return f"high(({kind}){part()}, ({kind}){part()})"
        if form == 13:
            function = r.choice(["bytes", "funnel"])
            return f"{function}((u32){part()}, (u32){part()}, (u32){part()})"
        if form == 14:
            return f"~{part()}"
        if form == 15:
            return f"({word})(0u - ({word}){part()})"
        return r.choice([f"(u64)(u32){part()} * (u32){part()}", f"(u64)((s64)(s32){part()} * (s64)(s32)(s16){part()})"])

    def function(self, number: int) -> str:
        """Five variables, a loop with a branch and an early way out, and all variables in the result."""
        names = [*"abcde"]
        lines = [f"HERE u64 f{number}(u64 a, u32 b, s32 c, u8 d, s16 e) {{"]
        for i in range(5):
            lines.append(f"    {self.random.choice(list(TYPES))} v{i} = {self.expression(3, names)};")
            names.append(f"v{i}")
        condition, added, mixed, last = (self.expression(2, names) for _ in range(4))
        lines += [
            "    for (u32 q = 0; q < (u32)(v0 & 7); q++) {",
            f"        if ({condition}) v1 += {added}; else v2 ^= {mixed};",
            f"        if (q == (u32)(v3 & 3)) {self.random.choice(['break', 'continue'])};",
            f"        v4 = {last};",
            "    }",
            "    return (u64)v0 ^ (u64)v1 * 3 ^ (u64)v2 * 5 ^ (u64)v3 * 7 ^ (u64)v4 * 11;",
            "}",
        ]
        return "\n".join(lines)


def programs(seed: int, number: int) -> tuple[str, str]:
    """(CUDA source, C++ source) of the same functions."""
    generator = Generator(seed)
    functions = "\n".join(generator.function(i) for i in range(number))
    arguments = "const u64* x, const u32* y, const u8* z, u64* out, int n"
    call = "out[i] = f{0}(x[i], y[i], (s32)y[n - 1 - i], z[i], (s16)y[i]);"
    kernel = f'extern "C" __global__ void k{{0}}({arguments}) {{{{\n'
    kernel += f"    int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) {call}\n}}}}\n"
    host = f'extern "C" void k{{0}}({arguments}) {{{{ for (int i = 0; i < n; i++) {call} }}}}\n'
    cuda, cpp = ("".join(form.format(i) for i in range(number)) for form in (kernel, host))
    return TYPEDEFS + ON_DEVICE + functions + "\n" + cuda, TYPEDEFS + ON_HOST + functions + "\n" + cpp


def inputs(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of all magnitudes."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**64, THREADS, dtype=np.uint64) >> rng.integers(0, 64, THREADS).astype(np.uint64)
    y = rng.integers(0, 2**32, THREADS, dtype=np.uint32) >> rng.integers(0, 32, THREADS).astype(np.uint32)
    return x, y, rng.integers(0, 256, THREADS, dtype=np.uint8)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """[kernel, thread] by g++."""
    directory = tmp_path_factory.mktemp("fuzz")
    source, library = Path(directory, "fuzz.cpp"), Path(directory, "fuzz.so")
    source.write_text(programs(SEED, KERNELS)[1])
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    functions = ctypes.CDLL(str(library))
    data = inputs(SEED)
    arrays = [a.ctypes.data_as(ctypes.c_void_p) for a in data]
    results = np.zeros((KERNELS, THREADS), np.uint64)
    for number in range(KERNELS):
        getattr(functions, f"k{number}")(*arrays, results[number].ctypes.data_as(ctypes.c_void_p), THREADS)
    return results


@pytest.mark.parametrize("architecture", ["compute_80", "compute_100"])
def test_random_kernels_agree_with_gcc(architecture: str, expected: np.ndarray) -> None:
    machine = Machine(Module(compile_ptx(programs(SEED, KERNELS)[0], architecture)))
    x, y, z = (machine.upload(a) for a in inputs(SEED))
    differing = []
    for number in range(KERNELS):
        out = machine.alloc(8 * THREADS)
        machine.launch(f"k{number}", -(-THREADS // BLOCK), BLOCK, x, y, z, out, THREADS)
        wrong = np.flatnonzero(machine.download(out, np.uint64, THREADS) != expected[number])
        if len(wrong):
            differing.append((number, wrong[:5].tolist()))
    assert not differing
    executed = {i.opcode for c in machine.coverage.values() for i in c.instructions}
    assert {"ld", "st", "mul", "setp", "selp", "cvt", "shr", "bra"} <= executed

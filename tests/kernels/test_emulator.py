"""The PTX emulator: opcodes against PTX's definitions in plain integers, CUDA kernels against NumPy, and planted bugs,
each of which has to be reported as what it is, whatever the schedule."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from emulator import (
    Deadlock,
    DivergentBarrier,
    DivisionByZero,
    EmulatorError,
    Fault,
    InvalidMask,
    LaunchError,
    Machine,
    Misaligned,
    Module,
    NonCoherentRead,
    OutOfBounds,
    ParseError,
    Race,
    ReadOnlyWrite,
    StepLimit,
    Trap,
    UninitialisedRead,
    UnknownOpcode,
    mutants,
)
from emulator.races import Clocks, RaceShadow
from emulator.toolchain import NVCC, NVCC_MISSING, compile_ptx

needs_nvcc = pytest.mark.skipif(NVCC is None, reason=NVCC_MISSING)
ARCHITECTURES = ["compute_80", "compute_100"]
SEEDS = [None, 1, 2, 3]
HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"


# --- single opcodes -----------------------------------------------------------------------------------------------------

Reference = Callable[..., int]  # (width, sources as unsigned integers) -> result, of which the low bits count


def signed(bits: int, value: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    """a / b, rounded towards zero."""
    return abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


def extract(bits: int, a: int, b: int, c: int, sign: bool) -> int:
    """bfe as in the PTX manual."""
    top, position, length = bits - 1, b & 255, c & 255
    fill = 0 if not sign or length == 0 else a >> min(position + length - 1, top) & 1
    inside = [a >> (position + i) & 1 if i < length and position + i <= top else fill for i in range(bits)]
    return sum(bit << i for i, bit in enumerate(inside))


def insert(bits: int, a: int, b: int, c: int, d: int) -> int:
    """bfi as in the PTX manual."""
    position, length, result = c & 255, d & 255, b
    for i in range(length):
        if position + i < bits:
            result = result & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return result


def leading(bits: int, a: int, sign: bool, shift: bool = False) -> int:
    """bfind as in the PTX manual."""
    if sign and a >> (bits - 1):
        a = ~a & ((1 << bits) - 1)
    found = a.bit_length() - 1
    return bits - 1 - found if shift and found >= 0 else found


def permute(bits: int, a: int, b: int, c: int) -> int:
    """prmt as in the PTX manual."""
    source = (a | b << 32).to_bytes(8, "little")
    result = []
    for i in range(4):
        nibble = c >> 4 * i & 15
        byte = source[nibble & 7]
        result.append((255 if byte >> 7 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def lookup(table: int) -> Reference:
    def lop3(bits: int, a: int, b: int, c: int) -> int:
        index = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(bits)]
        return sum((table >> n & 1) << i for i, n in enumerate(index))

    return lop3


def saturated(bits: int, value: int, is_signed: bool) -> int:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    return min(max(value, low), high)


# Opcode with its width as {w}, widths, sources (w: of the width, W: of twice the width, i: 32 bits), result, reference.
Opcode = tuple[str, tuple[int, ...], str, str, Reference]
ALL, WORDS, NARROW = (16, 32, 64), (32, 64), (16, 32)
OPCODES: list[Opcode] = [
    ("add.s{w}", ALL, "ww", "w", lambda w, a, b: a + b),
    ("sub.u{w}", ALL, "ww", "w", lambda w, a, b: a - b),
    ("add.sat.s{w}", (32,), "ww", "w", lambda w, a, b: saturated(w, signed(w, a) + signed(w, b), True)),
    ("sub.sat.s{w}", (32,), "ww", "w", lambda w, a, b: saturated(w, signed(w, a) - signed(w, b), True)),
    ("mul.lo.s{w}", ALL, "ww", "w", lambda w, a, b: a * b),
    ("mul.hi.u{w}", ALL, "ww", "w", lambda w, a, b: a * b >> w),
    ("mul.hi.s{w}", ALL, "ww", "w", lambda w, a, b: signed(w, a) * signed(w, b) >> w),
    ("mul.wide.u{w}", NARROW, "ww", "W", lambda w, a, b: a * b),
    ("mul.wide.s{w}", NARROW, "ww", "W", lambda w, a, b: signed(w, a) * signed(w, b)),
    ("mad.lo.u{w}", ALL, "www", "w", lambda w, a, b, c: a * b + c),
    ("mad.hi.s{w}", WORDS, "www", "w", lambda w, a, b, c: (signed(w, a) * signed(w, b) >> w) + c),
    ("mad.wide.s{w}", NARROW, "wwW", "W", lambda w, a, b, c: signed(w, a) * signed(w, b) + c),
    ("div.u{w}", ALL, "wd", "w", lambda w, a, b: a // b),
    ("div.s{w}", ALL, "wd", "w", lambda w, a, b: truncated(signed(w, a), signed(w, b))),
    ("rem.u{w}", ALL, "wd", "w", lambda w, a, b: a % b),
    ("rem.s{w}", ALL, "wd", "w", lambda w, a, b: a - truncated(signed(w, a), signed(w, b)) * b),
    ("min.s{w}", ALL, "ww", "w", lambda w, a, b: min(signed(w, a), signed(w, b))),
    ("max.u{w}", ALL, "ww", "w", lambda w, a, b: max(a, b)),
    ("and.b{w}", ALL, "ww", "w", lambda w, a, b: a & b),
    ("or.b{w}", ALL, "ww", "w", lambda w, a, b: a | b),
    ("xor.b{w}", ALL, "ww", "w", lambda w, a, b: a ^ b),
    ("not.b{w}", ALL, "w", "w", lambda w, a: ~a),
    ("neg.s{w}", ALL, "w", "w", lambda w, a: -a),
    ("abs.s{w}", ALL, "w", "w", lambda w, a: abs(signed(w, a))),
    ("shl.b{w}", ALL, "wi", "w", lambda w, a, b: a << min(b, w)),
    ("shr.u{w}", ALL, "wi", "w", lambda w, a, b: a >> min(b, w)),
    ("shr.s{w}", ALL, "wi", "w", lambda w, a, b: signed(w, a) >> min(b, w)),
    ("bfe.u{w}", WORDS, "wii", "w", lambda w, a, b, c: extract(w, a, b, c, False)),
    ("bfe.s{w}", WORDS, "wii", "w", lambda w, a, b, c: extract(w, a, b, c, True)),
    ("bfi.b{w}", WORDS, "wwii", "w", insert),
    ("bfind.u{w}", WORDS, "w", "i", lambda w, a: leading(w, a, False)),
    ("bfind.s{w}", WORDS, "w", "i", lambda w, a: leading(w, a, True)),
    ("bfind.shiftamt.u{w}", WORDS, "w", "i", lambda w, a: leading(w, a, False, True)),
    ("bfind.shiftamt.s{w}", WORDS, "w", "i", lambda w, a: leading(w, a, True, True)),
    ("clz.b{w}", WORDS, "w", "i", lambda w, a: w - a.bit_length()),
    ("popc.b{w}", WORDS, "w", "i", lambda w, a: a.bit_count()),
    ("brev.b{w}", WORDS, "w", "w", lambda w, a: int(f"{a:0{w}b}"[::-1], 2)),
    ("prmt.b{w}", (32,), "www", "w", permute),
    ("shf.l.wrap.b{w}", (32,), "wwi", "w", lambda w, a, b, c: (b << 32 | a) << (c & 31) >> 32),
    ("shf.l.clamp.b{w}", (32,), "wwi", "w", lambda w, a, b, c: (b << 32 | a) << min(c, 32) >> 32),
    ("shf.r.wrap.b{w}", (32,), "wwi", "w", lambda w, a, b, c: (b << 32 | a) >> (c & 31)),
    ("shf.r.clamp.b{w}", (32,), "wwi", "w", lambda w, a, b, c: (b << 32 | a) >> min(c, 32)),
    ("cvt.u64.u{w}", NARROW, "w", "l", lambda w, a: a),
    ("cvt.s64.s{w}", NARROW, "w", "l", signed),
    ("cvt.s{w}.s8", (16, 32, 64), "w", "w", lambda w, a: signed(8, a & 255)),
    ("cvt.u{w}.u8", (16, 32, 64), "w", "w", lambda w, a: a & 255),
    ("cvt.u16.u{w}", (32, 64), "w", "s", lambda w, a: a),
    ("cvt.s8.s{w}", (32,), "w", "w", lambda w, a: signed(8, a & 255)),
    ("cvt.sat.u8.s{w}", (32, 64), "w", "w", lambda w, a: saturated(8, signed(w, a), False)),
    ("cvt.sat.s16.u{w}", (32, 64), "w", "s", lambda w, a: saturated(16, a, True)),
    ("cvt.sat.s32.s{w}", (64,), "w", "i", lambda w, a: saturated(32, signed(w, a), True)),
    ("cvt.sat.u64.s{w}", (32,), "w", "l", lambda w, a: saturated(64, signed(w, a), False)),
    *(("lop3.b{w}", (32,), f"www{t}", "w", lookup(t)) for t in (0x00, 0x80, 0x96, 0xCA, 0xE8, 0xFF)),
]  # fmt: skip
COUNT = 320


def source_values(bits: int, kind: str, seed: int) -> list[int]:
    """Edges first, in all combinations with another source that has another seed; then anything."""
    rng = random.Random(f"{bits} {kind} {seed}")
    if kind == "i":
        edges = [0, 1, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0x80000000]
    else:
        top = 1 << (bits - 1)
        edges = [0, 1, 2, 3, 7, 0x80, 0x7F, 255, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 2 * top - 128]
    size = len(edges)
    ordered = [edges[(n // size if seed % 2 else n) % size] for n in range(size * size)]
    values = ordered + [rng.getrandbits(rng.randint(1, bits)) for _ in range(COUNT - len(ordered))]
    if seed >= 2:
        rng.shuffle(values)
    return [v or 1 for v in values] if kind == "d" else values


def run_opcode(text: str, widths: list[int], result_bits: int, sources: list[list[int]]) -> list[int]:
    """A kernel of this instruction alone: sources %a0, %a1, ..., result %d. One thread per value."""
    names = [f"in{i}" for i in range(len(sources))]
    body = [f".reg .b64 %x<{2 * len(sources) + 4}>; .reg .b32 %t; .reg .pred %p<4>; .reg .b{result_bits} %d;"]
    body += [f".reg .b{bits} %a{i};" for i, bits in enumerate(widths)] + ["mov.u32 %t, %tid.x;"]
    for i, bits in enumerate([*widths, result_bits]):
        name = [*names, "out"][i]
        body += [f"ld.param.u64 %x{2 * i}, [{name}];", f"mul.wide.u32 %x{2 * i + 1}, %t, {bits // 8};"]
        body += [f"add.s64 %x{2 * i}, %x{2 * i}, %x{2 * i + 1};"]
        if i < len(widths):
            body.append(f"ld.global.u{bits} %a{i}, [%x{2 * i}];")
    body += [text, f"st.global.u{result_bits} [%x{2 * len(widths)}], %d;", "ret;"]
    params = ", ".join(f".param .u64 {name}" for name in [*names, "out"])
    machine = Machine(Module(f"{HEADER}.visible .entry k({params})\n{{\n" + "\n".join(body) + "\n}"))
    values = zip(sources, widths, strict=True)
    arrays = [machine.upload(np.array(v, dtype=object).astype(f"u{bits // 8}")) for v, bits in values]
    out = machine.alloc(COUNT * result_bits // 8)
    machine.launch("k", 1, COUNT, *arrays, out)
    return [int(v) for v in machine.download(out, f"u{result_bits // 8}", COUNT)]


@pytest.mark.parametrize(
    ("opcode", "width", "kinds", "result", "reference"),
    [(o, w, k, r, f) for o, widths, k, r, f in OPCODES for w in widths],
    ids=[f"{o.format(w=w)}-{k}" for o, widths, k, _, _ in OPCODES for w in widths],
)
def test_opcode_by_definition(opcode: str, width: int, kinds: str, result: str, reference: Reference) -> None:
    sizes = {"w": width, "d": width, "W": 2 * width, "i": 32, "l": 64, "s": 16}
    letters = kinds.rstrip("0123456789")
    widths = [sizes[k] for k in letters]
    sources = [source_values(bits, kind, i) for i, (bits, kind) in enumerate(zip(widths, letters, strict=True))]
    operands = ["%d", *(f"%a{i}" for i in range(len(widths))), *([kinds[len(letters) :]] if kinds != letters else [])]
    got = run_opcode(f"{opcode.format(w=width)} {', '.join(operands)};", widths, sizes[result], sources)
    mask = (1 << sizes[result]) - 1
    assert got == [reference(width, *values) & mask for values in zip(*sources, strict=True)]


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
}  # fmt: skip
COMBINE: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a != b,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("combine", ["", "and", "or", "xor"])
def test_setp_and_selp(kind: str, combine: str) -> None:
    """Both predicates of setp, combined with a third (whether b is odd), as bits of a number built by selp."""
    bits = int(kind[1:])
    a, b = (source_values(bits, "w", i) for i in (0, 1))
    for name in ["eq", "ne", "lt", "le", "gt", "ge", *(["lo", "ls", "hi", "hs"] if kind[0] == "u" else [])]:
        third = f", {'!' if name == 'lt' else ''}%p3" if combine else ""
        setp = f"setp.{name}{'.' + combine if combine else ''}.{kind} %p1|%p2, %a0, %a1{third};"
        one = [f".reg .b{bits} %o<5>; and.b{bits} %o1, %a1, 1; setp.ne.u{bits} %p3, %o1, 0;", setp]
        one += [f"selp.b{bits} %o2, 1, 0, %p1; selp.b{bits} %o3, 2, 0, %p2; or.b{bits} %d, %o2, %o3;"]
        expected = []
        for x, y in zip(a, b, strict=True):
            odd = bool(y & 1) != (name == "lt")
            holds = COMPARISONS[name](*((signed(bits, x), signed(bits, y)) if kind[0] == "s" else (x, y)))
            both = [COMBINE[combine](v, odd) if combine else v for v in (holds, not holds)]
            expected.append(both[0] + 2 * both[1])
        assert run_opcode(" ".join(one), [bits, bits], bits, [a, b]) == expected, name


def test_vectors_are_packed_and_unpacked() -> None:
    a, b = (source_values(32, "w", i) for i in (0, 1))
    swap = ".reg .b64 %y; .reg .b32 %u; mov.b64 %y, {%a0, %a1}; mov.b64 {%u, _}, %y; "
    assert run_opcode(swap + "mov.b64 %d, {%a1, %u};", [32, 32], 64, [a, b]) == [
        y | x << 32 for x, y in zip(a, b, strict=True)
    ]
    halves = ".reg .b16 %h, %l; mov.b32 {%l, %h}, %a0; mov.b32 %d, {%h, %l};"
    assert run_opcode(halves, [32], 32, [a]) == [x >> 16 | (x & 0xFFFF) << 16 for x in a]


def test_threads_with_a_false_guard_go_on_without_the_others() -> None:
    """A guarded vote, shuffle and exit. Lanes that vote are the odd ones; every third thread leaves before the store."""
    lanes = list(range(COUNT))
    odd = ".reg .b32 %o, %m; .reg .pred %q; and.b32 %o, %a0, 1; setp.eq.u32 %q, %o, 1; mov.u32 %d, 5; "
    vote = "@%q vote.sync.ballot.b32 %d, %q, 0xaaaaaaaa; @!%q shfl.sync.idx.b32 %d, %a0, 2, 31, 0x55555555;"
    assert run_opcode(odd + vote, [32], 32, [lanes]) == [0xAAAAAAAA if n % 2 else n // 32 * 32 + 2 for n in lanes]
    leave = "rem.u32 %m, %a0, 3; setp.eq.u32 %p1, %m, 0; @%p1 ret;"
    with pytest.raises(UninitialisedRead, match=f"{4 * 107} of {4 * COUNT} bytes"):
        run_opcode(odd + leave, [32], 32, [lanes])
    with pytest.raises(DivergentBarrier):
        run_opcode(odd + "@%q bar.sync 0;", [32], 32, [lanes])


def test_registers_of_an_inner_scope_hide_outer_ones() -> None:
    text = "add.u32 %d, %a0, 1; { .reg .b32 %d; mov.u32 %d, 7; { .reg .pred %d; setp.eq.u32 %d, 0, 0; } }"
    assert run_opcode(text, [32], 32, [list(range(COUNT))]) == [x + 1 for x in range(COUNT)]


# --- CUDA kernels -------------------------------------------------------------------------------------------------------

KERNELS = r"""
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16; typedef unsigned char u8;
#define FULL 0xffffffffu
#define KERNEL extern "C" __global__ void

KERNEL shuffles(const u32* in, u32* out) {
    u32 t = threadIdx.x + blockIdx.x * blockDim.x, lane = threadIdx.x % 32, v = in[t], *o = out + 8 * t;
    o[0] = __shfl_sync(FULL, v, lane * 5 + 3);
    o[1] = __shfl_sync(FULL, v, lane * 3, 8);
    o[2] = __shfl_up_sync(FULL, v, 3);
    o[3] = __shfl_up_sync(FULL, v, 2, 16);
    o[4] = __shfl_down_sync(FULL, v, 5);
    o[5] = __shfl_down_sync(FULL, v, 1, 4);
    o[6] = __shfl_xor_sync(FULL, v, 9);
    o[7] = __shfl_xor_sync(FULL, v, 6, 8);
}
KERNEL votes(const u32* in, u32* out) {
    u32 t = threadIdx.x, lane = t % 32, v = in[t], *o = out + 8 * t;
    u32 half = lane & 1 ? 0xaaaaaaaau : 0x55555555u;
    o[0] = __ballot_sync(half, v & 1);
    o[1] = __any_sync(half, v % 7 == 0);
    o[2] = __all_sync(half, v % 16 != 0);
    if (lane < 16) { o[3] = __ballot_sync(0xffffu, v & 2); o[4] = __shfl_down_sync(0xffffu, v, 1, 16); }
    else { o[3] = __ballot_sync(0xffff0000u, v & 4); o[4] = __any_sync(0xffff0000u, v % 9 == 0); }
    o[5] = __reduce_add_sync(half, v);
    o[6] = __reduce_min_sync(half, v) ^ __reduce_max_sync(half, v);
    o[7] = __reduce_and_sync(half, v | 0xff) ^ __reduce_xor_sync(half, v);
}
KERNEL scan(const u32* in, u32* out, int n) {  // inclusive, of one CTA; the threads beyond n take part with zeros
    __shared__ u32 sums[32];
    u32 t = threadIdx.x, lane = t & 31, warp = t >> 5, v = t < n ? in[t] : 0, s = v;
    for (int d = 1; d < 32; d <<= 1) { u32 w = __shfl_up_sync(FULL, s, d); if (lane >= d) s += w; }
    if (lane == 31) sums[warp] = s;
    __syncthreads();
    if (warp == 0) {
        u32 w = lane < blockDim.x / 32 ? sums[lane] : 0, r = w;
        for (int d = 1; d < 32; d <<= 1) { u32 x = __shfl_up_sync(FULL, r, d); if (lane >= d) r += x; }
        sums[lane] = r - w;
    }
    __syncthreads();
    if (t < n) out[t] = s + sums[warp];
}
extern __shared__ u32 bins[];
KERNEL histogram(const u8* in, u32* out, int n, int buckets) {
    for (int b = threadIdx.x; b < buckets; b += blockDim.x) bins[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[in[i] % buckets], 1u);
    __syncthreads();
    for (int b = threadIdx.x; b < buckets; b += blockDim.x) if (bins[b]) atomicAdd(&out[b], bins[b]);
}
KERNEL atomics(const u32* in, u32* out, u64* wide) {
    u32 t = blockIdx.x * blockDim.x + threadIdx.x, v = in[t];
    atomicMax(&out[0], v); atomicMin(&out[1], v); atomicAnd(&out[2], v | 0xffu); atomicOr(&out[3], v & 0xf0f0u);
    atomicXor(&out[4], v); atomicMax((int*)&out[5], (int)v); atomicMin((int*)&out[6], (int)v);
    atomicAdd(&wide[0], (u64)v << 20);
    u64 seen = 0, old;  // a product by compare-and-swap
    while ((old = atomicCAS(&wide[1], seen, seen * 3 + 1)) != seen) seen = old;
    out[8 + t] = atomicExch(&out[7], t);
    atomicInc(&out[600], 10u);
}
KERNEL vectors(const uint4* a, const ushort4* b, const uchar4* c, ulonglong2* out) {
    u32 t = blockIdx.x * blockDim.x + threadIdx.x;
    uint4 x = a[t]; ushort4 y = b[t]; uchar4 z = c[t];
    out[t] = make_ulonglong2((u64)x.x << 32 | (x.y ^ x.z), x.w + ((u64)y.x << 48 | (u64)y.w << 32) + z.y + (z.z << 8));
}
__constant__ u32 squares[8] = {0, 1, 4, 9, 16, 25, 36, 49};
__device__ u64 offsets[4] = {1ull << 40, 5, 7};
__device__ u32 counter;
struct Pair { u8 small; u64 large; u16 last; };
KERNEL tables(u32* out, Pair pair, int key) {
    u32 t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    u32 local[8];
    for (int i = 0; i < 8; i++) local[(i * 5 + t) & 7] = squares[i] + i * block;
    u64 sum = offsets[t & 3] + pair.large * pair.small + pair.last;
    out[block * 64 + t] = local[key & 7] + (u32)(sum ^ sum >> 32);
    atomicAdd(&counter, t);
}
KERNEL counts(const u32* in, u32* out) {
    u32 t = threadIdx.x, i = blockIdx.x * blockDim.x + t, v = in[i];
    u32 all = __syncthreads_and(v % 64 != 0), any = __syncthreads_or(v % 97 == 0);
    out[i] = __syncthreads_count(v & 1) + 1000 * (all != 0) + 2000 * (any != 0);
}
KERNEL generic(u32* out, u32* scratch) {  // a pointer to shared or to global memory, by thread
    __shared__ u32 here[64];
    u32 t = threadIdx.x, *p = t % 3 ? here + t : scratch + t;
    *p = 5 * t;
    __syncthreads();
    u32 o = t ^ 1, *q = o % 3 ? here + o : scratch + o;
    out[t] = *q + 1;
}
"""

Run = tuple[str, int | None]  # architecture, seed


@functools.cache
def module_of(source: str, architecture: str) -> Module:
    return Module(compile_ptx(source, architecture))


def machine_of(source: str, run: Run, **options: int) -> Machine:
    return Machine(module_of(source, run[0]), seed=run[1], **options)


@pytest.fixture(params=list(itertools.product(ARCHITECTURES, SEEDS)), ids=lambda run: f"{run[0]}-seed{run[1]}")
def run(request: pytest.FixtureRequest) -> Run:
    if NVCC is None:
        pytest.skip(NVCC_MISSING)
    chosen: Run = request.param
    return chosen


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def test_shuffles(run: Run) -> None:
    machine, values = machine_of(KERNELS, run, num_threads_at_once=128), numbers(192)
    out = machine.alloc(192 * 32)
    machine.launch("shuffles", 2, 96, machine.upload(values), out)
    lane, base = np.arange(192) % 32, np.arange(192) // 32 * 32

    def valid(source: np.ndarray, width: int) -> np.ndarray:
        """Lanes outside the segment stand for the own lane."""
        return np.where(source // width == lane // width, source, lane)

    sources = [
        (lane * 5 + 3) % 32, lane // 8 * 8 + lane * 3 % 8, valid(lane - 3, 32), valid(lane - 2, 16),
        valid(lane + 5, 32), valid(lane + 1, 4), lane ^ 9, lane ^ 6,
    ]  # fmt: skip
    expected = np.stack([values[base + source] for source in sources], 1)
    np.testing.assert_array_equal(machine.download(out, np.uint32, 192 * 8).reshape(192, 8), expected)


def test_votes_and_reductions_of_whole_and_part_warps(run: Run) -> None:
    machine, values = machine_of(KERNELS, run), numbers(64)
    out = machine.alloc(64 * 32)
    machine.launch("votes", 1, 64, machine.upload(values), out)
    got = machine.download(out, np.uint32, 64 * 8).reshape(2, 32, 8)
    for warp, lane in itertools.product(range(2), range(32)):
        v = [int(x) for x in values[warp * 32 : warp * 32 + 32]]
        low = lane < 16
        part, parity = range(16) if low else range(16, 32), v[lane % 2 :: 2]
        both = np.array(parity, np.uint32)
        expected = [
            sum((x & 1) << i for i, x in enumerate(v) if i % 2 == lane % 2),
            any(x % 7 == 0 for x in parity),
            all(x % 16 for x in parity),
            sum(bool(v[i] & (2 if low else 4)) << i for i in part),
            (v[lane + 1] if lane < 15 else v[lane]) if low else any(v[i] % 9 == 0 for i in part),
            sum(parity) % 2**32,
            min(parity) ^ max(parity),
            int(np.bitwise_and.reduce(both | 0xFF) ^ np.bitwise_xor.reduce(both)),
        ]
        assert got[warp, lane].tolist() == expected


@pytest.mark.parametrize(("count", "block"), [(1, 32), (100, 128), (256, 256), (1000, 1024)])
def test_scan_through_shared_memory(count: int, block: int, run: Run) -> None:
    machine, values = machine_of(KERNELS, run), numbers(count)
    out = machine.alloc(4 * count + 4)
    machine.launch("scan", 1, block, machine.upload(values), out, count)
    np.testing.assert_array_equal(machine.download(out, np.uint32, count), np.cumsum(values, dtype=np.uint32))
    assert not machine.written(out + 4 * count, 4).any()


def test_histogram_in_dynamic_shared_memory(run: Run) -> None:
    machine = machine_of(KERNELS, run, num_threads_at_once=256)
    values = (numbers(1500) >> 24).astype(np.uint8)
    out = machine.upload(np.zeros(100, np.uint32))
    machine.launch("histogram", 5, 96, machine.upload(values), out, 1500, 100, shared_bytes=400)
    np.testing.assert_array_equal(machine.download(out, np.uint32, 100), np.bincount(values % 100, minlength=100))
    with pytest.raises(OutOfBounds):
        machine.launch("histogram", 5, 96, machine.upload(values), out, 1500, 100, shared_bytes=380)


def test_atomics(run: Run) -> None:
    machine, values = machine_of(KERNELS, run, num_threads_at_once=64), numbers(96)
    start = np.zeros(601, np.uint32)
    start[[1, 2, 6, 7]] = 0xFFFFFFFF, 0xFFFFFFFF, 0x7FFFFFFF, 999
    out, wide = machine.upload(start), machine.upload(np.zeros(2, np.uint64))
    machine.launch("atomics", 3, 32, machine.upload(values), out, wide)
    got = machine.download(out, np.uint32, 601)
    each = np.bitwise_and.reduce(values | 0xFF), np.bitwise_or.reduce(values & 0xF0F0), np.bitwise_xor.reduce(values)
    assert got[:5].tolist() == [values.max(), values.min(), *each]
    assert got[5:7].view(np.int32).tolist() == [max(0, values.view(np.int32).max()), values.view(np.int32).min()]
    assert sorted([*got[8:104].tolist(), int(got[7])]) == sorted([*range(96), 999])  # exchanges lose nobody
    assert got[600] == 96 % 11
    power = 0
    for _ in range(96):
        power = (power * 3 + 1) % 2**64
    sums = machine.download(wide, np.uint64, 2).tolist()
    assert sums == [(int(values.sum(dtype=np.uint64)) << 20) % 2**64, power]


def test_vector_loads_and_stores(run: Run) -> None:
    machine, count = machine_of(KERNELS, run), 96
    a, b = numbers(4 * count).reshape(-1, 4), numbers(4 * count, 1).astype(np.uint16).reshape(-1, 4)
    c = numbers(4 * count, 2).astype(np.uint8).reshape(-1, 4)
    out = machine.alloc(16 * count)
    machine.launch("vectors", 3, 32, *(machine.upload(v) for v in (a, b, c)), out)
    x, y, z = (v.astype(np.uint64) for v in (a, b, c))
    low = x[:, 3] + (y[:, 0] << np.uint64(48) | y[:, 3] << np.uint64(32)) + z[:, 1] + (z[:, 2] << np.uint64(8))
    expected = np.stack([x[:, 0] << np.uint64(32) | (x[:, 1] ^ x[:, 2]), low], 1)
    np.testing.assert_array_equal(machine.download(out, np.uint64, 2 * count).reshape(-1, 2), expected)
    coverage = machine.coverage["vectors"]
    widest = next(
        i for i, each in enumerate(coverage.instructions) if "v4" in each.modifiers and "u32" in each.modifiers
    )
    assert coverage.requests[widest] == 3
    assert coverage.sectors[widest] == 3 * 16 and coverage.efficiency(widest) == 1.0


def test_tables_structs_local_arrays_and_grids_of_three_dimensions(run: Run) -> None:
    machine = machine_of(KERNELS, run, num_threads_at_once=100)
    out = machine.alloc(4 * 64 * 12)
    pair = np.zeros(1, np.dtype({"names": ["small", "large", "last"], "formats": ["u1", "u8", "u2"],
                                 "offsets": [0, 8, 16], "itemsize": 24}))  # fmt: skip
    pair["small"], pair["large"], pair["last"] = 3, 1 << 50 | 12345, 77
    machine.launch("tables", (2, 3, 2), (4, 4, 4), out, pair.tobytes(), -3)
    expected = np.zeros((12, 64), np.uint32)
    for block, t in itertools.product(range(12), range(64)):
        i = next(i for i in range(8) if (i * 5 + t) % 8 == -3 % 8)
        total = ((1 << 40, 5, 7, 0)[t % 4] + (1 << 50 | 12345) * 3 + 77) % 2**64
        expected[block, t] = (i * i + i * block + ((total ^ total >> 32) & 0xFFFFFFFF)) % 2**32
    np.testing.assert_array_equal(machine.download(out, np.uint32, 12 * 64).reshape(12, 64), expected)
    assert machine.download(machine.symbol("counter"), np.uint32, 1)[0] == 12 * sum(range(64))


def test_barriers_that_count(run: Run) -> None:
    machine, values = machine_of(KERNELS, run), numbers(4 * 96) >> 22
    out = machine.alloc(values.nbytes)
    machine.launch("counts", 4, 96, machine.upload(values), out)
    v = values.reshape(4, 96)
    each = (v & 1).sum(1) + 1000 * (v % 64 != 0).all(1) + 2000 * (v % 97 == 0).any(1)
    np.testing.assert_array_equal(machine.download(out, np.uint32, 4 * 96), each.repeat(96))


def test_generic_addresses(run: Run) -> None:
    machine = machine_of(KERNELS, run)
    out = machine.alloc(4 * 64)
    machine.launch("generic", 1, 64, out, machine.alloc(4 * 64))
    np.testing.assert_array_equal(machine.download(out, np.uint32, 64), 5 * (np.arange(64) ^ 1) + 1)


# --- planted bugs -------------------------------------------------------------------------------------------------------

BUGS = r"""
typedef unsigned int u32;
#define FULL 0xffffffffu
#define KERNEL(name) extern "C" __global__ void name(u32* out, const u32* in, int n)
#define T u32 t = threadIdx.x, i = blockIdx.x * blockDim.x + t; (void)i;

KERNEL(missing_syncthreads) { T __shared__ u32 s[64]; s[t] = in[t]; out[t] = s[63 - t]; }
KERNEL(missing_syncwarp) { T __shared__ u32 s[32]; s[t] = t * 3; out[t] = s[t ^ 1]; }
KERNEL(vote_for_a_fence) { T __shared__ u32 s[32]; s[t] = t * 3; u32 b = __ballot_sync(FULL, t & 1); out[t] = s[t ^ 1] + b; }
KERNEL(syncwarp_across_warps) { T __shared__ u32 s[64]; s[t] = in[t]; __syncwarp(); out[t] = s[63 - t]; }
KERNEL(syncwarp_of_halves) { T __shared__ u32 s[32]; s[t] = in[t]; __syncwarp(t < 16 ? 0xffffu : 0xffff0000u); out[t] = s[31 -
t]; } KERNEL(write_after_read) { T __shared__ u32 s[64]; s[t] = t; __syncthreads(); u32 v = s[63 - t]; s[t] = v; out[t] = v; }
KERNEL(two_ctas_one_word) { if (threadIdx.x == 0) out[0] = blockIdx.x; } KERNEL(neighbour_cta) { T out[i] = i; if (i) out[i +
1024] = out[i - 1]; } KERNEL(atomic_and_read) { T atomicAdd(out, 1u); if (t == 5) out[1] = out[0]; } KERNEL(atomic_and_write)
{ T if (t == 5) out[0] = 9; else atomicAdd(out, 1u); } KERNEL(atomic_read_by_next_cta) { T atomicAdd(out, 1u);
__syncthreads(); if (t == 0) out[1 + blockIdx.x] = out[0]; } KERNEL(bytes_of_one_thread_each_but_one) { T ((unsigned
char*)out)[t == 7 ? 6 : t] = 1; } KERNEL(tail) { T out[i] = 1; } KERNEL(before_the_start) { T out[i] = in[(int)i - 1]; }
KERNEL(shared_overrun) { T __shared__ u32 a[64]; __shared__ u32 b[64]; a[t] = t; b[t] = in[t]; __syncthreads();
    out[t] = a[t + n] + b[63 - t]; }
KERNEL(misaligned_vector) { T uint4 v = *(const uint4*)(in + 4 * t + n); out[t] = v.x + v.w; }
KERNEL(unwritten_shared) { T __shared__ u32 s[64]; if (t & 1) s[t] = t; __syncthreads(); out[t] = s[63 - t] + s[t ^ 1]; }
KERNEL(unwritten_local) { T u32 a[16]; for (int k = 0; k < n; k++) a[k * 2 % 16] = in[k]; out[t] = a[t % 16]; }
KERNEL(divergent_syncwarp) { T if (t < 16) { out[t] = 1; __syncwarp(); out[t + 64] = 2; } else out[t] = 3; }
KERNEL(barrier_and_shuffle) { T if (t < 16) { out[t] = 1; __syncthreads(); } else out[t] = __shfl_sync(FULL, t, 20); }
KERNEL(divergent_syncthreads) { T __shared__ u32 s[64]; if (t < 32) { s[t] = in[t]; __syncthreads(); out[t] = s[t + 32]; }
    else { s[t] = 7 * in[t]; __syncthreads(); out[t] = s[t - 32] * 2; } }
KERNEL(exited_at_barrier) { T if (t >= 40) return; out[t] = 1; __syncthreads(); out[t + 64] = 2; }
KERNEL(read_only_path) { T out[t] = __ldg(in + t) + 1; }
KERNEL(read_only_path_backwards) { T out[t] = t; if (t == 3) out[100] = __ldg(in + 3); }
KERNEL(shuffle_from_outside) { T if (t < 16) out[t] = __shfl_down_sync(0xffffu, t, 8); }
KERNEL(shuffle_from_beyond_the_block) { T out[t] = __shfl_down_sync(FULL, t, 16); }
KERNEL(not_in_own_mask) { T out[t] = __ballot_sync(n ? 0xffffu : FULL, t & 1); }
KERNEL(masks_differ) { T out[t] = __ballot_sync(t < 16 ? FULL : FULL << 1, t & 1); }
KERNEL(division) { T out[t] = in[t] / (t % 8 + n - 4); }
KERNEL(trap) { T if (in[t] == 77) __trap(); out[t] = 1; }

KERNEL(clean_barrier) { T __shared__ u32 s[64]; s[t] = in[t]; __syncthreads(); u32 v = s[63 - t]; __syncthreads(); s[t] = v;
out[i] = v; } KERNEL(clean_syncwarp) { T __shared__ u32 s[64]; s[t] = in[t]; __syncwarp(); u32 v = s[t ^ 1]; __syncwarp();
s[t] = v; out[i] = v; } KERNEL(clean_halves) { T __shared__ u32 s[64]; s[t] = in[t]; u32 m = t % 32 < 16 ? 0xffffu :
0xffff0000u; __syncwarp(m);
    u32 v = s[t ^ 15] + s[t & 48]; __syncwarp(m); s[t] = v; out[i] = v; }
KERNEL(clean_one_half) { T __shared__ u32 s[64]; s[t] = in[t]; if (t % 32 < 16) { __syncwarp(0xffffu); out[i] = s[t ^ 15]; }
else out[i] = 1; } KERNEL(clean_atomics) { T atomicAdd(out, 1u); atomicMax(out + 1, t); } KERNEL(clean_atomic_then_read) { T
__shared__ u32 s; if (t == 0) s = 0; __syncthreads(); atomicAdd(&s, t); __syncthreads(); out[i] = s; } KERNEL(clean_bytes) { T
((unsigned char*)out)[i] = t; } KERNEL(clean_read_only_path) { T out[i] = __ldg(in + 1023 - i) + in[i]; } KERNEL(clean_loop) {
T __shared__ u32 s[64]; s[t] = in[t]; __syncthreads(); for (int d = 1; d < 64; d *= 2) {
    u32 v = s[(t + d) % 64]; __syncthreads(); s[t] += v; __syncthreads(); } out[i] = s[t]; }
KERNEL(clean_shared_table) { T __shared__ u32 s; u32 sum = 0; for (int k = 0; k < 8; k++) { if (t == k * 8) s = in[k];
    __syncthreads(); sum += s; __syncthreads(); } out[i] = sum; }
"""

Planted = tuple[type[Fault], int, int]  # what has to be reported, CTAs, threads of a CTA
PLANTED: dict[str, Planted] = {
    "missing_syncthreads": (Race, 1, 64),
    "missing_syncwarp": (Race, 1, 32),
    "vote_for_a_fence": (Race, 1, 32),
    "syncwarp_across_warps": (Race, 1, 64),
    "syncwarp_of_halves": (Race, 1, 32),
    "write_after_read": (Race, 1, 64),
    "two_ctas_one_word": (Race, 2, 32),
    "neighbour_cta": (Race, 2, 64),
    "atomic_and_read": (Race, 1, 64),
    "atomic_and_write": (Race, 1, 64),
    "atomic_read_by_next_cta": (Race, 2, 32),
    "bytes_of_one_thread_each_but_one": (Race, 1, 32),
    "tail": (OutOfBounds, 33, 128),
    "before_the_start": (OutOfBounds, 1, 32),
    "shared_overrun": (OutOfBounds, 1, 64),
    "misaligned_vector": (Misaligned, 1, 32),
    "unwritten_shared": (UninitialisedRead, 1, 64),
    "unwritten_local": (UninitialisedRead, 1, 32),
    "divergent_syncwarp": (Deadlock, 1, 32),
    "barrier_and_shuffle": (Deadlock, 1, 32),
    "divergent_syncthreads": (DivergentBarrier, 1, 64),
    "exited_at_barrier": (DivergentBarrier, 1, 64),
    "shuffle_from_outside": (InvalidMask, 1, 32),
    "shuffle_from_beyond_the_block": (InvalidMask, 1, 40),
    "not_in_own_mask": (InvalidMask, 1, 32),
    "masks_differ": (InvalidMask, 1, 32),
    "division": (DivisionByZero, 1, 32),
    "trap": (Trap, 1, 64),
}
CLEAN = [name.split(")")[0] for name in BUGS.split("KERNEL(")[1:] if name.startswith("clean_")]
WORDS_THERE = 4096


def launch_planted(name: str, run: Run, ctas: int, threads: int, n: int = 3, at_once: int = 8192) -> Machine:
    machine = machine_of(BUGS, run, num_threads_at_once=at_once)
    data = numbers(WORDS_THERE)
    data[60] = 77
    machine.launch(name, ctas, threads, machine.upload(np.zeros(WORDS_THERE, np.uint32)), machine.upload(data), n)
    return machine


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_reported(name: str, run: Run) -> None:
    kind, ctas, threads = PLANTED[name]
    with pytest.raises(Fault) as caught:
        launch_planted(name, run, ctas, threads)
    fault = caught.value
    assert type(fault) is kind
    assert fault.kernel == name and fault.cta in range(ctas) and fault.thread in range(threads)
    assert fault.line is not None and fault.text is not None
    line = compile_ptx(BUGS, run[0]).split("\n")[fault.line - 1]
    assert " ".join(line.split()) == f"{fault.text};"
    assert all(part in str(fault) for part in (name, f"line {fault.line}", fault.text, f"thread {fault.thread}"))
    memory_findings = (Race, OutOfBounds, Misaligned, UninitialisedRead)
    assert (fault.address is not None) == isinstance(fault, memory_findings)


@pytest.mark.parametrize("name", [n for n, (kind, ctas, _) in PLANTED.items() if kind is Race and ctas > 1])
def test_races_between_ctas_that_never_run_together(name: str, run: Run) -> None:
    _, ctas, threads = PLANTED[name]
    with pytest.raises(Race):
        launch_planted(name, run, ctas, threads, at_once=1)


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("at_once", [1, 8192])
def test_clean_control(name: str, at_once: int, run: Run) -> None:
    launch_planted(name, run, 4, 64, at_once=at_once)


def test_without_race_checks_a_race_goes_unseen(run: Run) -> None:
    machine = machine_of(BUGS, run, check_races=False)
    out, data = machine.upload(np.zeros(WORDS_THERE, np.uint32)), machine.upload(numbers(WORDS_THERE))
    machine.launch("two_ctas_one_word", 2, 32, out, data, 3)


@pytest.mark.parametrize("name", ["read_only_path", "read_only_path_backwards"])
def test_read_only_path_to_bytes_that_are_written(name: str, run: Run) -> None:
    machine = machine_of(BUGS, run)
    buffer = machine.upload(np.arange(256, dtype=np.uint32))
    with pytest.raises((NonCoherentRead, Race)) as caught:
        machine.launch(name, 1, 32, buffer, buffer, 3)
    if name == "read_only_path":  # each thread reads and writes its own word: no race, but the cache may be stale
        assert type(caught.value) is NonCoherentRead


def test_reads_of_unwritten_global_memory_and_downloads(run: Run) -> None:
    machine = machine_of(BUGS, run)
    out, scratch = machine.alloc(4096), machine.alloc(4096)
    with pytest.raises(UninitialisedRead):
        machine.launch("read_only_path", 1, 64, out, scratch, 3)
    machine.launch("read_only_path", 1, 64, out, machine.upload(numbers(64)), 3)
    machine.download(out, np.uint32, 64)
    with pytest.raises(UninitialisedRead, match="4 of 260 bytes"):
        machine.download(out, np.uint32, 65)
    with pytest.raises(OutOfBounds):
        machine.download(out, np.uint32, 1025)


# --- races against full histories ---------------------------------------------------------------------------------------

BLOCK, CTAS = 64, 2


class Histories:
    """Happens-before with a full vector clock per thread and every access kept."""

    def __init__(self) -> None:
        self.clocks = np.eye(BLOCK * CTAS, dtype=np.int64)
        self.accesses: dict[int, list[tuple[int, int, str]]] = {}  # byte: (thread, its time, kind)

    def meet(self, threads: list[int]) -> None:
        self.clocks[threads] = self.clocks[threads].max(0)
        self.clocks[threads, threads] += 1

    def races(self, kind: str, thread: int, byte: int) -> bool:
        for other, time, earlier in self.accesses.get(byte, []):
            conflict = "write" in (kind, earlier) or {kind, earlier} == {"read", "atomic"}
            if conflict and other != thread and time > self.clocks[thread, other]:
                return True
        return False

    def record(self, kind: str, thread: int, byte: int) -> None:
        self.accesses.setdefault(byte, []).append((thread, int(self.clocks[thread, thread]), kind))


@pytest.mark.parametrize("part_warps", [False, True])
def test_race_records_against_full_histories(part_warps: bool) -> None:
    """Random accesses and barriers: every access gets the same verdict from the records; one that races is not made."""
    races = checks = 0
    for seed in range(200):
        rng = random.Random(seed)
        thread = np.arange(BLOCK * CTAS)
        clocks = Clocks(thread, thread // BLOCK, thread // 32, (thread % 32).astype(np.uint32), BLOCK)
        shadow, histories = RaceShadow(16), Histories()
        likely, reads = rng.choice([0.2, 0.4, 0.6]), rng.choice([1, 4])
        for _ in range(60):
            warp = rng.choice([0, 0, 1, 2])
            if rng.random() < likely:
                if rng.random() < 0.2:
                    cta = warp // 2
                    clocks.cta_barrier(np.array([cta]))
                    histories.meet(list(range(cta * BLOCK, (cta + 1) * BLOCK)))
                    continue
                lanes = [i for i in range(32) if not part_warps or rng.random() < 0.6] or [0]
                threads = [warp * 32 + i for i in lanes]
                mask = sum(1 << i for i in lanes)
                clocks.warp_barrier(np.array(threads), np.full(len(threads), mask, np.uint32))
                histories.meet(threads)
                continue
            kind, size = rng.choice([*["read"] * reads, "write", "atomic"]), rng.choice([1, 4, 8])
            threads = sorted(rng.sample(range(32 * warp, 32 * warp + 4), rng.choice([1, 1, 2])))
            positions = [rng.randrange(0, 8, size) for _ in threads]
            if kind == "write":
                positions = [p + 8 * n for n, p in enumerate(positions)]  # not to one place in one instruction
            accesses = [(t, b) for t, p in zip(threads, positions, strict=True) for b in range(p, p + size)]
            expected = any(histories.races(kind, t, b) for t, b in accesses)
            found = shadow.check(kind, clocks, np.array(positions), size, np.array(threads)) is not None
            races, checks = races + expected, checks + 1
            assert found == expected
            for t, b in [] if found else accesses:
                histories.record(kind, t, b)
    assert checks > 3000 and checks // 10 < races < checks * 9 // 10


# --- loading, launching, memory of the host, coverage, mutants ----------------------------------------------------------

TOUCH = (
    HEADER
    + """
.const .align 4 .u32 constant = 7;
.visible .entry touch(.param .u64 data, .param .u32 count, .param .u8 value) .maxntid 128, 1, 1
{
    .reg .b64 %x<3>; .reg .b32 %r<4>; .reg .b16 %v; .reg .pred %p;
    ld.param.u64 %x0, [data]; ld.param.u32 %r0, [count]; ld.param.u8 %v, [value];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    setp.ge.u32 %p, %r1, %r0;
    @%p bra $end;
    cvt.u64.u32 %x1, %r1;
    add.u64 %x0, %x0, %x1;
    st.global.u8 [%x0], %v;
$end:
    ret;
}
.visible .entry forever(.param .u64 data) { $again: bra.uni $again; }
.visible .entry spoil(.param .u64 data)
{
    .reg .b64 %x; mov.u64 %x, constant; st.global.u32 [%x], 1; ret;
}
"""
)


def touch_machine(**options: int) -> Machine:
    return Machine(Module(TOUCH), **options)


def test_parameters_of_kernels() -> None:
    kernel = Module(TOUCH).kernels["touch"]
    listed = [(p.name, p.type, p.num_bytes, p.offset) for p in kernel.params]
    assert listed == [("data", "u64", 8, 0), ("count", "u32", 4, 8), ("value", "u8", 1, 12)]
    assert kernel.max_threads == 128 and kernel.static_shared_bytes == 0
    given = ".param .u8 a, .param .align 8 .b8 b[12], .param .u16 c, .param .u64 .ptr .align 1 d"
    params = Module(f"{HEADER}.visible .entry k({given}) {{ ret; }}").kernels["k"].params
    assert [(p.name, p.num_bytes, p.offset) for p in params] == [("a", 1, 0), ("b", 12, 8), ("c", 2, 20), ("d", 8, 24)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": (0, 1)}, "takes 3 arguments, got 2"),
        ({"args": (1 << 64, 1, 1)}, "argument 0 .* does not fit"),
        ({"args": (0, 1 << 32, 1)}, "argument 1 .* does not fit"),
        ({"args": (0, -(1 << 31) - 1, 1)}, "argument 1 .* does not fit"),
        ({"args": (0, 1, 256)}, "argument 2 .* does not fit"),
        ({"args": (0, np.int64(1), 1)}, "argument 1 .* int64 has 8 bytes"),
        ({"args": (np.int32(0), 1, 1)}, "argument 0 .* int32 has 4 bytes"),
        ({"args": (0, 1, b"ab")}, "argument 2 .* bytes has 2 bytes"),
        ({"args": (np.zeros(3), 1, 1)}, "argument 0 .* ndarray is not"),
        ({"args": (0, 1.0, 1)}, "argument 1 .* float is not"),
        ({"block": 129}, "block of 129 threads, at most 128"),
        ({"block": (1, 1, 65)}, "block"),
        ({"grid": 0}, "grid 0"),
        ({"grid": (1, 65536)}, "grid"),
        ({"shared_bytes": 1 << 18}, "shared memory"),
        ({"name": "tuch"}, "no kernel tuch"),
    ],
)
def test_launches_that_do_not_fit(change: dict, message: str) -> None:
    given = {"name": "touch", "grid": 1, "block": 32, "args": (0, 0, 0), "shared_bytes": 0} | change
    arguments = given.pop("args")
    with pytest.raises(LaunchError, match=message):
        touch_machine().launch(
            given["name"], given["grid"], given["block"], *arguments, shared_bytes=given["shared_bytes"]
        )


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_mapped_host_memory_is_worked_on_in_place(offset: int) -> None:
    machine, whole = touch_machine(seed=1), np.full(300, 5, np.uint8)
    view = whole[offset : offset + 200]
    address = view.ctypes.data
    machine.map_host(view, address)
    machine.launch("touch", 2, 128, address + 3, 190, np.uint8(9))
    expected = np.full(300, 5)
    expected[offset + 3 : offset + 193] = 9
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(machine.download(address, np.uint8, 200), view)
    machine.launch("touch", 2, 128, address, 200, 8)
    for start, count, where in ((address, 201, address + 200), (address - 1, 5, address - 1), (1 << 40, 1, 1 << 40)):
        with pytest.raises(OutOfBounds) as caught:
            machine.launch("touch", 2, 128, start, count, 1)
        assert caught.value.address == where
    with pytest.raises(EmulatorError, match="overlaps"):
        machine.map_host(view[10:], address + 10)
    machine.release(address)
    with pytest.raises(OutOfBounds):
        machine.launch("touch", 1, 32, address, 1, 1)


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("offset", [0, 4])
def test_kernels_on_host_memory(architecture: str, offset: int) -> None:
    """Accesses of several sizes, and atomics, on buffers that are aligned to no more than what they hold."""
    machine = Machine(module_of(KERNELS, architecture))
    raw = np.zeros(4 * 1100 + 64, np.uint8)
    start = -raw.ctypes.data % 16 + offset
    values, out = raw[start : start + 400], raw[start + 400 : start + 820]
    values.view(np.uint32)[:] = numbers(100)
    for view in (values, out):  # one ends where the other begins
        machine.map_host(view, view.ctypes.data)
    machine.launch("scan", 1, 128, values.ctypes.data, out.ctypes.data, 100)
    np.testing.assert_array_equal(out.view(np.uint32)[:100], np.cumsum(numbers(100), dtype=np.uint32))
    before = out.view(np.uint32)[:100].copy()
    machine.launch("histogram", 3, 64, values.ctypes.data, out.ctypes.data, 400, 100, shared_bytes=400)
    counts = np.bincount(values % 100, minlength=100).astype(np.uint32)
    np.testing.assert_array_equal(out.view(np.uint32)[:100], before + counts)


def test_coverage_of_instructions_and_branches() -> None:
    machine = touch_machine()
    out = machine.alloc(100)
    coverage = machine.coverage["touch"]
    assert coverage.executed == 0 and len(coverage.missed) == coverage.total == 13
    machine.launch("touch", 1, 64, out, 0, 1)
    assert [i.opcode for i in coverage.missed] == ["cvt", "add", "st"]
    machine.launch("touch", 1, 64, out, 64, 1)
    assert [i.text for i in coverage.one_sided] == []
    assert coverage.executed == coverage.total and not coverage.missed
    branch = next(n for n, i in enumerate(coverage.instructions) if i.opcode == "bra")
    assert (coverage.taken[branch], coverage.not_taken[branch]) == (64, 64)
    assert coverage.sectors.sum() == 2 and coverage.requests.sum() == 2
    assert "forever: 0 of 1 instructions" in machine.report()
    assert "touch: 13 of 13 instructions" in machine.report()


def test_endless_loops_and_writes_to_constants() -> None:
    machine = touch_machine(max_steps=1000)
    with pytest.raises(StepLimit, match=r"forever: .* line"):
        machine.launch("forever", 1, 32, 0)
    with pytest.raises(ReadOnlyWrite):
        machine.launch("spoil", 1, 1, 0)


def body_of(text: str) -> str:
    registers = ".reg .b32 %r<9>; .reg .b64 %x<9>; .reg .pred %p<9>; .reg .f32 %f<9>; .reg .b16 %h<9>;"
    return f"{HEADER}.visible .entry k(.param .u64 a)\n{{\n{registers}\n{text}\nret;\n}}"


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.u32 %r1, %r2;", "add.f32 %f1, %f2, %f3;", "add.cc.u32 %r1, %r2, %r3;", "addc.u32 %r1, %r2, %r3;",
        "add.u32 %r1, %r2;", "add.u32 %r1, %r2, %q;", "add.u32 %q, %r1, %r2;", "add.u32 %r1, %r2, %p1;",
        "cvt.rn.f32.u32 %f1, %r1;", "mov.u32 %r1, %clock;", "mov.u64 %x1, elsewhere;", "prmt.b32.f4e %r1, %r2, %r3, 0;",
        "ld.relaxed.gpu.global.u32 %r1, [%x1];", "ld.acquire.gpu.global.u32 %r1, [%x1];", "ld.param.u64 %x1, [b];",
        "ld.param.u64 %x1, [a+8];", "ld.global.v8.u32 %r1, [%x1];", "ld.global.v4.u64 {%x1,%x2,%x3,%x4}, [%x1];",
        "st.release.gpu.global.u32 [%x1], %r1;", "ld.global.u32 %r1, %x1;", "atom.global.add.f32 %f1, [%x1], %f2;",
        "atom.global.cas.b32 %r1, [%x1], %r2;", "red.async.add.u32 [%x1], %r2;", "bar.sync 1;", "bar.sync 0, 64;",
        "bar.arrive 0, 64;", "bar.sync %r1;", "match.any.sync.b32 %r1, %r2, -1;", "shfl.up.b32 %r1, %r2, 1, 0;",
        "shfl.sync.left.b32 %r1, %r2, 1, 0, -1;", "vote.sync.most.pred %p1, %p2, -1;", "call foo;", "bra nowhere;",
        "call.uni (%r1), foo, (%r2);", "cp.async.ca.shared.global [%r1], [%x1], 16;", "setp.lt.b32 %p1, %r1, %r2;",
        "setp.lt.nor.s32 %p1, %r1, %r2, %p2;", "@%r1 mov.u32 %r1, 1;", "mul.u32 %r1, %r2, %r3;", "brx.idx %r1, $t;",
        "dp4a.u32.u32 %r1, %r2, %r3, %r4;", "elect.sync %r1|%p1, -1;", "mov.b32 {%r1, %r2, %r3}, %r4;", "tex.1d %r1;",
        "mbarrier.init.shared.b64 [%r1], 1;", "cvta.param.u64 %x1, %x2;",
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_when_loading(text: str) -> None:
    with pytest.raises(UnknownOpcode) as caught:
        Module(body_of("mov.u32 %r0, 0;\n" + text))
    assert "k: PTX line 8:" in str(caught.value) and text.rstrip(";") in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        body_of(".reg .b128 %y;"), body_of(".shared .b7 %y;"), body_of("twice: twice: ret;"), body_of("{"), "nonsense;",
        HEADER + ".global .u64 pointer = other;", HEADER + ".visible .entry k(.param .texref t) { ret; }",
    ],
)  # fmt: skip
def test_text_that_is_no_ptx(text: str) -> None:
    with pytest.raises(ParseError):
        Module(text)


@needs_nvcc
def test_debug_lines_and_comments_change_nothing() -> None:
    plain, lines = (compile_ptx(KERNELS, "compute_80", flags) for flags in ((), ("-lineinfo",)))
    assert ".loc" in lines and ".section" in lines
    codes = [[[i.text for i in c.kernel.instructions] for c in Module(t).code.values()] for t in (plain, lines)]
    assert codes[0] == codes[1]
    assert (
        Module("/* first\nsecond */ // third\n" + TOUCH).code["touch"].instruction(0).line
        == TOUCH.count("\n", 0, TOUCH.index("ld.param")) + 3
    )


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mutants_load_and_differ(architecture: str) -> None:
    text = compile_ptx(KERNELS, architecture)
    of_scan = mutants(text, "scan")
    first, last = (
        next(n for n, line in enumerate(text.split("\n"), 1) if f"entry {name}(" in line)
        for name in ("scan", "histogram")
    )
    assert len(of_scan) > 50 and all(first < m.line < last for m in of_scan)
    assert set(of_scan) < set(mutants(text)) and len(set(of_scan)) == len(of_scan)
    for mutant in of_scan:
        assert mutant.before != mutant.after
        Module(mutant.apply(text))
    values = numbers(128)
    for mutant in (m for m in of_scan if "bar.sync" in m.before and not m.after):
        machine = Machine(Module(mutant.apply(text)))
        with pytest.raises(Race):
            machine.launch("scan", 1, 128, machine.upload(values), machine.alloc(512), 128)
    with pytest.raises(ValueError):
        of_scan[0].apply("// one line more\n" + text)

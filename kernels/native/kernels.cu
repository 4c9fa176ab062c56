// The CUDA kernels: thin wrappers that give tiles to threads. `make ptx` compiles them to ../ptx/, launch.py launches them.
//
// kThreads threads of a CTA handle kThreads * kTile consecutive values, a tile each; blocks of exponents have a warp
// each. All counts and offsets are 64-bit. Nothing here waits for another CTA.
//
// [Note: Tails] Behind the last value tiles are filled with zeros and nothing is stored, so that a tail needs no code of its own.
// Tests: test_kernels_ptx.py, every length around a tile, a warp and a CTA.
#ifdef CIERA_SHIM
#include "shim.h"
#endif
#include "changes.cuh"
#include "checksum.cuh"
#include "hash.cuh"
#include "planes.cuh"

namespace ciera {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr u32 kAllLanes = 0xffffffffu;

__device__ __forceinline__ i64 cta_number() { return (i64)blockIdx.x; }
__device__ __forceinline__ i64 tile_number() { return cta_number() * kThreads + threadIdx.x; }
__device__ __forceinline__ i64 warp_number() { return cta_number() * kWarps + threadIdx.x / 32; }

// A sum over the 32 lanes of a warp, for all of them.
template <class T>
__device__ __forceinline__ T sum_over_warp(T value) {
  CIERA_UNROLL
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// The sum of `value` over the threads before this one in the CTA, and over all of them. `warp_sums` is shared, [kWarps].
__device__ __forceinline__ u32 sum_before(u32 value, u32* warp_sums, u32& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 up_to = value;
  CIERA_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(kAllLanes, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == 31) warp_sums[warp] = up_to;
  __syncthreads();
  u32 before = 0;
  total = 0;
  CIERA_UNROLL
  for (int k = 0; k < kWarps; k++) {
    before += k < warp ? warp_sums[k] : 0;
    total += warp_sums[k];
  }
  return before + up_to - value;
}

// The bits of a tile of n values; those behind the last value do not count.
__device__ __forceinline__ u32 chosen_bits(const u8* bitmap, i64 tile, i64 n) {
  const i64 left = n - tile * kTile;
  return left <= 0 ? 0 : bitmap[tile] & (left < kTile ? (1u << left) - 1 : 0xffu);
}

// values [n] -> exponents [n], low [n * kLowBytes], top [n * kTopBits / 8, rounded up]. Null: not wanted.
template <class F>
__device__ __forceinline__ void split(const typename F::Word* values, i64 n, u8* exponents, u8* low, u8* top) {
  const i64 tile = tile_number(), start = tile * kTile, left = n - start;
  if (left <= 0) return;
  alignas(16) typename F::Word in[kTile];
  load_tile<kTile>(in, values + start, left);
  if (exponents) {
    alignas(16) u8 out[kTile];
    split_exponents<F, kTile>(in, out);
    store_tile<kTile>(out, exponents + start, left);
  }
  if (low) {
    alignas(16) u8 out[kTile * F::kLowBytes];
    split_low<F, kTile>(in, out);
    store_tile<kTile * F::kLowBytes>(out, low + start * F::kLowBytes, left * F::kLowBytes);
  }
  if (F::kTopBits && top) {
    u8 out[F::kTopBits + 1];
    split_top<F, kTile>(in, out);
    const i64 num_bytes = (left * F::kTopBits + 7) / 8;
    CIERA_UNROLL
    for (int k = 0; k < F::kTopBits; k++)
      if (k < num_bytes) top[tile * F::kTopBits + k] = out[k];
  }
}

// Rows of planes -> rows of values [n]; strides are in bytes, of `out` in values. Row number: blockIdx.y.
template <class F>
__device__ __forceinline__ void merge(const u8* exponents, i64 exponents_stride, const u8* low, const u8* top,
                                      i64 planes_stride, i64 n, typename F::Word* out, i64 out_stride) {
  const i64 tile = tile_number(), start = tile * kTile, left = n - start, row = blockIdx.y;
  if (left <= 0) return;
  alignas(16) u8 exponent[kTile], lows[kTile * F::kLowBytes];
  u8 tops[F::kTopBits + 1];
  load_tile<kTile>(exponent, exponents + row * exponents_stride + start, left);
  load_tile<kTile * F::kLowBytes>(lows, low + row * planes_stride + start * F::kLowBytes, left * F::kLowBytes);
  if (F::kTopBits) {
    const i64 num_bytes = (left * F::kTopBits + 7) / 8;
    CIERA_UNROLL
    for (int k = 0; k < F::kTopBits; k++)
      tops[k] = k < num_bytes ? top[row * planes_stride + tile * F::kTopBits + k] : 0;
  }
  alignas(16) typename F::Word values[kTile];
  merge_values<F, kTile>(exponent, lows, tops, values);
  store_tile<kTile>(values, out + row * out_stride + start, left);
}

// values [n] -> hashes [num_blocks, 2] of the exponents of each block; behind the last value exponents are 0. A warp a block.
template <class F>
__device__ __forceinline__ void hash(const typename F::Word* values, i64 n, i64 block_size, u64* hashes) {
  const i64 block = warp_number(), lane = threadIdx.x % 32;
  if (block * block_size >= n) return;
  u64 sum0 = 0, sum1 = 0;
  for (i64 word = lane; word < block_size / 8; word += 32) {
    alignas(16) typename F::Word tile[8];
    const i64 start = block * block_size + 8 * word;
    load_tile<8>(tile, values + start, n - start);
    add_word(exponent_word<F>(tile), word, sum0, sum1);
  }
  sum0 = sum_over_warp(sum0);
  sum1 = sum_over_warp(sum1);
  if (lane == 0) finish_hash(sum0, sum1, hashes + 2 * block);
}

// fresh [n] against last [n] -> bitmap, and for each CTA how many values changed and how many of them travel as literals.
template <class F>
__device__ __forceinline__ void scan(const typename F::Word* fresh, const typename F::Word* last, i64 n, u32 escape,
                                     u8* bitmap, i64* num_changed, i64* num_literals) {
  __shared__ u32 warp_counts[kWarps];
  const i64 tile = tile_number(), start = tile * kTile, left = n - start;
  u32 counts = 0;  // changes, and literals in the upper half
  if (left > 0) {
    alignas(16) typename F::Word now[kTile], before[kTile];
    load_tile<kTile>(now, fresh + start, left);
    load_tile<kTile>(before, last + start, left);
    const u32 bits = changed_bits(now, before);
    bitmap[tile] = (u8)bits;
    counts = __popc(bits) + (count_literals<F>(now, before, bits, escape) << 16);
  }
  counts = sum_over_warp(counts);
  if (threadIdx.x % 32 == 0) warp_counts[threadIdx.x / 32] = counts;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 total = 0;
    CIERA_UNROLL
    for (int k = 0; k < kWarps; k++) total += warp_counts[k];
    num_changed[cta_number()] = total & 0xffff;
    num_literals[cta_number()] = total >> 16;
  }
}

// What scan found -> moves and literals, side by side; `last` becomes equal to `fresh`. The offsets say, for each CTA, how
// many changes and literals the CTAs up to and with it have.
template <class F>
__device__ __forceinline__ void compact(const typename F::Word* fresh, typename F::Word* last, i64 n, u32 escape,
                                        const u8* bitmap, const i64* changes_up_to, const i64* literals_up_to, u8* moves,
                                        typename F::Word* literals) {
  __shared__ u32 warp_sums[kWarps];
  const i64 tile = tile_number(), start = tile * kTile, left = n - start;
  const u32 bits = left > 0 ? bitmap[tile] : 0;
  alignas(16) typename F::Word now[kTile], before[kTile];
  u32 counts = 0;
  if (bits) {
    load_tile<kTile>(now, fresh + start, left);
    load_tile<kTile>(before, last + start, left);
    counts = __popc(bits) + (count_literals<F>(now, before, bits, escape) << 16);
  }
  u32 total;
  const u32 before_this = sum_before(counts, warp_sums, total);
  if (!bits) return;
  const i64 first_move = changes_up_to[cta_number()] - (total & 0xffff) + (before_this & 0xffff);
  if (has_literals<F>()) literals += literals_up_to[cta_number()] - (total >> 16) + (before_this >> 16);
  compact_tile<F>(now, before, bits, escape, moves + first_move, literals);
  store_tile<kTile>(now, last + start, left);
}

// For each CTA of a run of n values: how many bits of `bitmap` are set.
__device__ __forceinline__ void count_changes(const u8* bitmap, i64 n, i64* num_changed) {
  __shared__ u32 warp_counts[kWarps];
  const i64 tile = tile_number();
  const u32 count = sum_over_warp((u32)__popc(chosen_bits(bitmap, tile, n)));
  if (threadIdx.x % 32 == 0) warp_counts[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    i64 total = 0;
    CIERA_UNROLL
    for (int k = 0; k < kWarps; k++) total += warp_counts[k];
    num_changed[cta_number()] = total;
  }
}

// For each CTA that apply will have: how many of its moves are escapes. A warp for each; moves behind `num_moves` count none.
__device__ __forceinline__ void count_escapes(const u8* moves, i64 num_moves, const i64* changes_up_to, i64 num_ctas,
                                              u32 escape, i64* num_literals) {
  const i64 cta = warp_number(), lane = threadIdx.x % 32;
  if (cta >= num_ctas) return;
  const i64 first = cta ? changes_up_to[cta - 1] : 0;
  i64 end = changes_up_to[cta];
  if (end > num_moves) end = num_moves;
  u32 count = 0;
  for (i64 k = first + lane; k < end; k += 32) count += moves[k] == escape;
  count = sum_over_warp(count);
  if (lane == 0) num_literals[cta] = count;
}

// Expands the bitmap, moves the values [n] of a cache, and writes them to the cache and to `out`, in one pass. What points
// behind the moves or literals that there are leaves a value alone and sets `damage` to 1.
template <class F>
__device__ __forceinline__ void apply(typename F::Word* values, i64 n, u32 escape, const u8* bitmap,
                                      const i64* changes_up_to, const i64* literals_up_to, const u8* moves, i64 num_moves,
                                      const typename F::Word* literals, i64 num_literals, typename F::Word* out,
                                      u32* damage) {
  __shared__ u32 warp_changes[kWarps], warp_escapes[kWarps];
  const i64 tile = tile_number(), start = tile * kTile, left = n - start;
  u32 bits = chosen_bits(bitmap, tile, n), num_changes, num_escapes, escapes = 0;
  const u32 changes_before = sum_before(__popc(bits), warp_changes, num_changes);
  const i64 first_move = changes_up_to[cta_number()] - num_changes + changes_before;
  if (first_move < 0 || first_move + __popc(bits) > num_moves) {
    if (bits) atomicOr(damage, 1u);
    bits = 0;
  }
  if (has_literals<F>()) {
    for (int k = 0; k < (int)__popc(bits); k++) escapes += moves[first_move + k] == escape;
    const u32 escapes_before = sum_before(escapes, warp_escapes, num_escapes);
    const i64 first_literal = literals_up_to[cta_number()] - num_escapes + escapes_before;
    if (escapes && (first_literal < 0 || first_literal + escapes > num_literals)) {
      atomicOr(damage, 1u);
      bits = 0;
    }
    literals += first_literal;
  }
  if (left <= 0) return;
  alignas(16) typename F::Word tile_values[kTile];
  load_tile<kTile>(tile_values, values + start, left);
  if (bits) {
    apply_tile<F>(tile_values, bits, escape, moves + first_move, literals);
    store_tile<kTile>(tile_values, values + start, left);
  }
  if (out) store_tile<kTile>(tile_values, out + start, left);
}

// The exponents of the blocks whose rank is not negative -> exponents [ranks * block_size]. A warp a block.
template <class F>
__device__ __forceinline__ void take_blocks(const typename F::Word* values, i64 n, i64 block_size, const i64* ranks,
                                            u8* exponents) {
  const i64 block = warp_number(), lane = threadIdx.x % 32, first = block * block_size;
  if (first >= n || ranks[block] < 0) return;
  for (i64 word = lane; word < block_size / 8; word += 32) {
    const i64 left = n - first - 8 * word;
    if (left <= 0) break;
    alignas(16) typename F::Word tile[8];
    alignas(16) u8 out[8];
    load_tile<8>(tile, values + first + 8 * word, left);
    split_exponents<F, 8>(tile, out);
    store_tile<8>(out, exponents + ranks[block] * block_size + 8 * word, left);
  }
}

// The inverse into a cache [num_blocks * block_size]: blocks of rank -1 stay; behind `num_exponents` there are zeros.
__device__ __forceinline__ void put_blocks(const u8* exponents, i64 num_exponents, i64 block_size, const i64* ranks,
                                           i64 num_blocks, u8* cache) {
  const i64 block = warp_number(), lane = threadIdx.x % 32;
  if (block >= num_blocks || ranks[block] < 0) return;
  for (i64 word = lane; word < block_size / 8; word += 32) {
    const i64 from = ranks[block] * block_size + 8 * word;
    alignas(16) u8 tile[8];
    load_tile<8>(tile, exponents + from, num_exponents - from);
    store_tile<8>(tile, cache + block * block_size + 8 * word, 8);
  }
}

// Rows of bytes -> adds to sums [rows] what their words contribute. Row number: blockIdx.y.
__device__ __forceinline__ void checksum(const u8* bytes, i64 stride, i64 num_bytes, u64* sums) {
  const u8* row = bytes + (i64)blockIdx.y * stride;
  const i64 num_words = (num_bytes + 7) / 8;
  u64 sum = 0;
  for (i64 j = tile_number(); j < num_words; j += (i64)gridDim.x * kThreads) {
    alignas(16) u8 tile[8];
    load_tile<8>(tile, row + 8 * j, num_bytes - 8 * j);
    u64 word = 0;
    CIERA_UNROLL
    for (int k = 0; k < 8; k++) word |= (u64)tile[k] << (8 * k);
    sum += checksum_term(word, j);
  }
  sum = sum_over_warp(sum);
  if (threadIdx.x % 32 == 0 && sum) atomicAdd(sums + blockIdx.y, sum);
}

}  // namespace ciera

using namespace ciera;

#define CIERA_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)
// Six CTAs on an SM at once, so up to 40 registers: left alone, ptxas aims at eight and spills.
#define CIERA_LARGE_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, 6)

#define CIERA_FORMAT_KERNELS(F)                                                                                         \
  CIERA_KERNEL split_##F(const F::Word* values, i64 n, u8* exponents, u8* low, u8* top) {                               \
    split<F>(values, n, exponents, low, top);                                                                           \
  }                                                                                                                     \
  CIERA_KERNEL merge_##F(const u8* exponents, i64 exponents_stride, const u8* low, const u8* top, i64 planes_stride,    \
                         i64 n, F::Word* out, i64 out_stride) {                                                         \
    merge<F>(exponents, exponents_stride, low, top, planes_stride, n, out, out_stride);                                 \
  }                                                                                                                     \
  CIERA_KERNEL hash_##F(const F::Word* values, i64 n, i64 block_size, u64* hashes) {                                    \
    hash<F>(values, n, block_size, hashes);                                                                             \
  }                                                                                                                     \
  CIERA_KERNEL take_blocks_##F(const F::Word* values, i64 n, i64 block_size, const i64* ranks, u8* exponents) {         \
    take_blocks<F>(values, n, block_size, ranks, exponents);                                                            \
  }

#define CIERA_CHANGE_KERNELS(F, name)                                                                                   \
  CIERA_KERNEL scan_##name(const F::Word* fresh, const F::Word* last, i64 n, u32 escape, u8* bitmap, i64* num_changed,  \
                           i64* num_literals) {                                                                         \
    scan<F>(fresh, last, n, escape, bitmap, num_changed, num_literals);                                                 \
  }                                                                                                                     \
  CIERA_KERNEL compact_##name(const F::Word* fresh, F::Word* last, i64 n, u32 escape, const u8* bitmap,                 \
                              const i64* changes_up_to, const i64* literals_up_to, u8* moves, F::Word* literals) {      \
    compact<F>(fresh, last, n, escape, bitmap, changes_up_to, literals_up_to, moves, literals);                         \
  }                                                                                                                     \
  CIERA_LARGE_KERNEL apply_##name(F::Word* values, i64 n, u32 escape, const u8* bitmap, const i64* changes_up_to,       \
                            const i64* literals_up_to, const u8* moves, i64 num_moves, const F::Word* literals,         \
                            i64 num_literals, F::Word* out, u32* damage) {                                              \
    apply<F>(values, n, escape, bitmap, changes_up_to, literals_up_to, moves, num_moves, literals, num_literals, out,   \
             damage);                                                                                                   \
  }

CIERA_FORMAT_KERNELS(bf16)
CIERA_FORMAT_KERNELS(fp16)
CIERA_FORMAT_KERNELS(fp32)
CIERA_CHANGE_KERNELS(bf16, bf16)
CIERA_CHANGE_KERNELS(fp16, fp16)
CIERA_CHANGE_KERNELS(fp32, fp32)
CIERA_CHANGE_KERNELS(ciera::byte, byte)

CIERA_KERNEL count_changes(const u8* bitmap, i64 n, i64* num_changed) { ciera::count_changes(bitmap, n, num_changed); }
CIERA_KERNEL count_escapes(const u8* moves, i64 num_moves, const i64* changes_up_to, i64 num_ctas, u32 escape,
                                  i64* num_literals) {
  ciera::count_escapes(moves, num_moves, changes_up_to, num_ctas, escape, num_literals);
}
CIERA_KERNEL put_blocks(const u8* exponents, i64 num_exponents, i64 block_size, const i64* ranks, i64 num_blocks,
                               u8* cache) {
  ciera::put_blocks(exponents, num_exponents, block_size, ranks, num_blocks, cache);
}
CIERA_LARGE_KERNEL checksum(const u8* bytes, i64 stride, i64 num_bytes, u64* sums) {
  ciera::checksum(bytes, stride, num_bytes, sums);
}
// sums [rows] -> checksums, in place.
CIERA_KERNEL finish_checksums(u64* sums, i64 num_rows) {
  const i64 row = tile_number();
  if (row < num_rows) sums[row] = mix(sums[row]);
}

// CUDA side: values of all runs of a unit <-> exponents in the state, sign+mantissa in the planes (reference_tiles.py:
// split_tiles, split_rows, merge_rows, copy_out).
//
// [Note: Padding] Runs are padded in the state and in the planes. A tile's padding reaches up to where the next tile begins, and
// splitting writes it as 0: payloads have no bytes of other gathers in them, and merging loads whole octets without a tail. A
// block may be longer than a tile, so the padding may be too, hence the loop. A state with the flat buffer's places has no
// padding but the values of other units in between, and is never split into (cuda.py asserts it).
// Tests: kernel_cases.py compares what lies between the runs; blocks of 4096.
#pragma once
#include "payloads.cuh"
#include "planes.cuh"

namespace ciera {

// Rows of values -> low, top and exponents, of those that are wanted. Only exponents have rows.
template <class F>
__device__ __forceinline__ void split(const typename F::Word* values, const Tile* tiles, i64 num_tiles,
                                      i64 num_plane_values, i64 num_state_values, u8* low, u8* top, u8* exponents) {
  const Tile tile = tiles[blockIdx.x];
  const bool is_last = blockIdx.x + 1 == num_tiles;
  const i64 in_planes = low ? (is_last ? num_plane_values : tiles[blockIdx.x + 1].plane) - tile.plane : 0;
  const i64 in_state = exponents ? (is_last ? num_state_values : tiles[blockIdx.x + 1].state) - tile.state : 0;
  for (i64 first = threadIdx.x * kOctet; first < in_planes || first < in_state; first += kTileValues) {
    alignas(16) typename F::Word in[kOctet];
    load_values<kOctet>(in, values + tile.start + first, tile.num_values - first);
    if (first < in_state) {
      alignas(16) u8 out[kOctet];
      split_exponents<F, kOctet>(in, out);
      store_values<kOctet>(out, exponents + tile.state + first, kOctet);
    }
    if (first < in_planes) {
      alignas(16) u8 out[kOctet * F::kLowBytes];
      split_low<F, kOctet>(in, out);
      store_values<kOctet * F::kLowBytes>(out, low + (tile.plane + first) * F::kLowBytes, kOctet * F::kLowBytes);
      if (F::kTopBits && top) {
        u8 bits[F::kTopBits + 1];
        split_top<F, kOctet>(in, bits);
        CIERA_UNROLL
        for (int k = 0; k < F::kTopBits; k++) top[(tile.plane + first) / kOctet * F::kTopBits + k] = bits[k];
      }
    }
  }
}

// The exponents of an octet, `first` in its tile, and its low and top bytes -> values, the first `left` of them.
template <class F>
__device__ __forceinline__ void merge_octet(const u8* exponents, const u8* low, const u8* top, const Tile& tile, i64 first,
                                            i64 left, typename F::Word* out) {
  alignas(16) u8 lows[kOctet * F::kLowBytes];
  u8 tops[F::kTopBits + 1];
  load_values<kOctet * F::kLowBytes>(lows, low + (tile.plane + first) * F::kLowBytes, kOctet * F::kLowBytes);
  CIERA_UNROLL
  for (int k = 0; k < F::kTopBits; k++) tops[k] = top[(tile.plane + first) / kOctet * F::kTopBits + k];
  alignas(16) typename F::Word values[kOctet];
  merge_values<F, kOctet>(exponents, lows, tops, values);
  store_values<kOctet>(values, out + tile.start + first, left);
}

// The inverse of split, for one row.
template <class F>
__device__ __forceinline__ void merge(const u8* exponents, const u8* low, const u8* top, const Tile* tiles,
                                      typename F::Word* out) {
  const Tile tile = tiles[blockIdx.x];
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  if (left <= 0) return;
  alignas(16) u8 exponent[kOctet];
  load_values<kOctet>(exponent, exponents + tile.state + first, kOctet);
  merge_octet<F>(exponent, low, top, tile, first, left, out);
}

// One row of the state -> its places in the flat buffer.
template <class Word>
__device__ __forceinline__ void copy_out(const Word* row, const Tile* tiles, Word* out) {
  const Tile tile = tiles[blockIdx.x];
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  if (left <= 0) return;
  alignas(16) Word values[kOctet];
  load_values<kOctet>(values, row + tile.state + first, left);
  store_values<kOctet>(values, out + tile.start + first, left);
}

}  // namespace ciera

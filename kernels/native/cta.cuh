// CUDA side: which values a CTA handles, and what its threads find out together.
//
// blockIdx.x counts tiles (or blocks), blockIdx.y counts peers. Runs are no axis: the table of tiles was made from them
// (tiles.make_tiles), so a launch handles all runs of all peers.
//
// [Note: Tails] Behind the last value of a tile octets are filled with zeros and nothing is stored, so that a tail needs no
// code of its own. Tests: test_kernels_ptx.py, every length around an octet, a warp and a CTA.
//
// [Note: A sum, an array] The functions below pass the warps' sums through shared memory, with one barrier: they are written
// before it and read behind it. No barrier comes behind the reading, so every sum of a kernel needs an array of its own; else
// a fast warp writes the next sum where a slow one still reads the last. Tests: test_kernels_ptx.py looks for races between
// any two barriers, test_kernels_shim.py plants one array for two sums and has to see it.
//
// [Note: One mind] A thread that returns early never comes to the barriers behind. So threads return before a barrier only on
// what all of them know alike: numbers that are the same for the CTA, and totals. Tests: both interpreters end with an
// error where part of a CTA waits; test_kernels_shim.py plants it.
#pragma once
#include "common.cuh"

namespace ciera {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileValues = kThreads * kOctet;
constexpr u32 kAllLanes = 0xffffffffu;

// Up to kTileValues consecutive values of one run: where they are in the flat buffer, in the unit's state, in its planes.
struct Tile {
  i64 start, state, plane, num_values;
};

// A block of values that share a hash: where it is in the flat buffer.
struct Block {
  i64 start, num_values;
};

__device__ __forceinline__ u32 lane_number() { return threadIdx.x % 32; }
__device__ __forceinline__ u32 warp_number() { return threadIdx.x / 32; }

// The rank that blockIdx.y stands for: it counts all ranks but `own`.
__device__ __forceinline__ i64 rank_of_row(i64 own) { return (i64)blockIdx.y + ((i64)blockIdx.y >= own); }

// The sum over the 32 lanes of a warp, for all of them.
template <class T>
__device__ __forceinline__ T sum_over_warp(T value) {
  CIERA_UNROLL
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// The larger of two numbers; and the largest over the threads of the CTA, for all of them. `warp_most` is shared, [kWarps]: see
// [Note: A sum, an array].
__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a < b ? b : a; }
__device__ __forceinline__ u32 max_over_cta(u32 value, u32* warp_most) {
  CIERA_UNROLL
  for (int distance = 16; distance; distance /= 2) value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
  if (lane_number() == 0) warp_most[warp_number()] = value;
  __syncthreads();
  CIERA_UNROLL
  for (int k = 0; k < kWarps; k++) value = larger(value, warp_most[k]);
  return value;
}

// The sums of all warps [kWarps] -> the sum of those before this one, and of all.
__device__ __forceinline__ u32 before_warp(const u32* warp_sums, u32& total) {
  u32 before = 0;
  total = 0;
  CIERA_UNROLL
  for (u32 k = 0; k < kWarps; k++) {
    before += k < warp_number() ? warp_sums[k] : 0;
    total += warp_sums[k];
  }
  return before;
}

// The sum of `value` over the threads before this one in the CTA, and over all of them. `warp_sums` is shared, [kWarps]:
// see [Note: A sum, an array].
__device__ __forceinline__ u32 sum_before(u32 value, u32* warp_sums, u32& total) {
  u32 up_to = value;
  CIERA_UNROLL
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(kAllLanes, up_to, distance);
    if (lane_number() >= distance) up_to += other;
  }
  if (lane_number() == 31) warp_sums[warp_number()] = up_to;
  __syncthreads();
  return before_warp(warp_sums, total) + up_to - value;
}

// The same of flags.
__device__ __forceinline__ u32 count_before(bool flag, u32* warp_sums, u32& total) {
  const u32 votes = __ballot_sync(kAllLanes, flag);
  if (lane_number() == 0) warp_sums[warp_number()] = __popc(votes);
  __syncthreads();
  return before_warp(warp_sums, total) + __popc(votes & ((1u << lane_number()) - 1));
}

}  // namespace ciera

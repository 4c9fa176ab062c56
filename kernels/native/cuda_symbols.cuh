// CUDA side: exponents of all runs of a unit as nibbles (reference_tiles.py: scan_symbols, pack_symbols, put_nibbles,
// merge_symbols).
//
// A nibble says how far an exponent is below the top, the largest exponent of its tile; kFar that it is that far or further, and
// an escape. An octet has eight nibbles, the first value's in the lowest four bits. `offsets` say how many escapes the tiles
// before each have: a CTA needs nothing of the others.
//
//   sender     scan -> sum of counts -> sizes of sections -> pack; put, into the fixed part
//   receiver   merge
#pragma once
#include "cuda_changes.cuh"
#include "cuda_planes.cuh"

namespace ciera {

constexpr u32 kFar = 15;  // tiles.FAR

// Exponents of an octet, of which none is above `top` -> nibbles; 0 behind the first `left`.
__device__ __forceinline__ u32 nibbles_of(const u8* exponents, u32 top, i64 left) {
  u32 nibbles = 0;
  CIERA_UNROLL
  for (int i = 0; i < kOctet; i++) {
    const u32 below = top - exponents[i];
    if (i < left) nibbles |= (below < kFar ? below : kFar) << 4 * i;
  }
  return nibbles;
}

// The lowest bit of each nibble that is kFar.
__device__ __forceinline__ u32 far_nibbles(u32 nibbles) {
  const u32 pairs = nibbles & nibbles >> 1;
  return pairs & pairs >> 2 & 0x11111111u;
}

// Nibbles of an octet at any alignment; 0 behind the first `left`.
__device__ __forceinline__ u32 load_nibbles(const u8* from, i64 left) {
  u32 nibbles = 0;
  if (is_aligned(from, sizeof nibbles)) {
    nibbles = *reinterpret_cast<const u32*>(from);
  } else {
    CIERA_UNROLL
    for (int k = 0; k < (int)sizeof nibbles; k++) nibbles |= (u32)from[k] << 8 * k;
  }
  return left < kOctet ? nibbles & ((1u << 4 * left) - 1) : nibbles;
}
__device__ __forceinline__ void store_nibbles(u32 nibbles, u8* to) {
  if (is_aligned(to, sizeof nibbles)) {
    *reinterpret_cast<u32*>(to) = nibbles;
  } else {
    CIERA_UNROLL
    for (int k = 0; k < (int)sizeof nibbles; k++) to[k] = (u8)(nibbles >> 8 * k);
  }
}

// Values -> the top of each tile, and counts [num_tiles + 1] of escapes, of which the first is left alone.
template <class F>
__device__ __forceinline__ void scan_symbols(const typename F::Word* values, const Tile* tiles, u8* tops, i64* counts) {
  __shared__ u32 warp_tops[kWarps], warp_escapes[kWarps];
  const Tile tile = tiles[blockIdx.x];
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  alignas(16) u8 exponents[kOctet];
  load_as<F>(exponents, values + tile.start + first, left);
  u32 top = 0;
  CIERA_UNROLL
  for (int i = 0; i < kOctet; i++) top = larger(top, (u32)exponents[i]);
  top = max_over_cta(top, warp_tops);
  u32 total;
  sum_before(__popc(far_nibbles(nibbles_of(exponents, top, left))), warp_escapes, total);
  if (threadIdx.x == 0) {
    tops[blockIdx.x] = (u8)top;
    counts[blockIdx.x + 1] = total;
  }
}

// What scan found -> sections, unless they do not fit. `up_to` [num_tiles + 1]: how many escapes the tiles before each have,
// and all of them. Values are read where a tile has some.
template <class F>
__device__ __forceinline__ void pack_symbols(const typename F::Word* values, const Tile* tiles, i64 num_tiles,
                                             const u8* tops, const i64* up_to, const SectionRoom& room) {
  __shared__ u32 warp_escapes[kWarps];
  if (!room.has_room()) return;
  const u32 top = tops[blockIdx.x];
  const i64 before_tile = up_to[blockIdx.x], behind_tile = up_to[blockIdx.x + 1];
  if (threadIdx.x == 0) {
    u32* offsets = reinterpret_cast<u32*>(room.section<0>()) + blockIdx.x;
    offsets[0] = (u32)before_tile;
    if (blockIdx.x + 1 == num_tiles) offsets[1] = (u32)behind_tile;
    room.section<1>()[blockIdx.x] = (u8)top;
  }
  if (before_tile == behind_tile) return;
  const Tile tile = tiles[blockIdx.x];
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  alignas(16) u8 exponents[kOctet];
  load_as<F>(exponents, values + tile.start + first, left);
  const u32 far = far_nibbles(nibbles_of(exponents, top, left));
  u32 total;
  u8* escapes = room.section<2>() + before_tile + sum_before(__popc(far), warp_escapes, total);
  CIERA_UNROLL
  for (int i = 0; i < kOctet; i++) {
    if (far >> 4 * i & 1) *escapes++ = exponents[i];
  }
}

// Values and the tops of their tiles -> nibbles; 0 in the padding, which ends where the next tile or run begins (see [Note:
// Padding]): no tile has more than kTileValues with it.
template <class F>
__device__ __forceinline__ void put_nibbles(const typename F::Word* values, const Tile* tiles, i64 num_tiles,
                                            i64 num_plane_values, const u8* tops, u8* nibbles) {
  const Tile tile = tiles[blockIdx.x];
  const bool is_last = blockIdx.x + 1 == num_tiles;
  const i64 in_planes = (is_last ? num_plane_values : tiles[blockIdx.x + 1].plane) - tile.plane;
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  if (first >= in_planes) return;
  alignas(16) u8 exponents[kOctet];
  load_as<F>(exponents, values + tile.start + first, left);
  store_nibbles(nibbles_of(exponents, tops[blockIdx.x], left), nibbles + (tile.plane + first) / 2);
}

// The planes and sections of a peer -> its values. See [Note: Untrusted payloads] and [Note: One mind].
template <class F>
__device__ __forceinline__ void merge_symbols(const Payloads& payloads, const u8* payload, const u8* low, const u8* top,
                                              const u8* nibbles, const Tile* tiles, i64 num_tiles,
                                              typename F::Word* out, u32* damage) {
  __shared__ u32 warp_escapes[kWarps];
  SectionReader reader(payloads, payload);
  const u32* offsets = reinterpret_cast<const u32*>(payload + reader.next());
  const u64 offsets_bytes = reader.num_bytes;
  const u8* tops = payload + reader.next();
  const u64 tops_bytes = reader.num_bytes;
  const u8* escapes = payload + reader.next();
  bool fits = reader.fits && offsets_bytes == sizeof(u32) * (u64)(num_tiles + 1) && tops_bytes == (u64)num_tiles;
  u32 from = 0, here = 0, top_exponent = 0;
  if (fits) {
    from = offsets[blockIdx.x];
    const u32 to = offsets[blockIdx.x + 1], total = offsets[num_tiles];
    here = to - from;
    fits = reader.num_bytes == total && from <= to && to <= total && (blockIdx.x || !from);
    top_exponent = tops[blockIdx.x];
  }
  if (!fits) return report_damage(damage);

  const Tile tile = tiles[blockIdx.x];
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  const u32 octet = left > 0 ? load_nibbles(nibbles + (tile.plane + first) / 2, left) : 0, far = far_nibbles(octet);
  u32 total;
  const u32 escapes_before = sum_before(__popc(far), warp_escapes, total);
  if (total != here) return report_damage(damage);
  if (left <= 0) return;
  escapes += from + (u64)escapes_before;
  alignas(16) u8 exponents[kOctet];
  CIERA_UNROLL
  for (int i = 0; i < kOctet; i++) {
    exponents[i] = far >> 4 * i & 1 ? *escapes++ : (u8)(top_exponent - (octet >> 4 * i & kFar));
  }
  merge_octet<F>(exponents, low, top, tile, first, left, out);
}

}  // namespace ciera

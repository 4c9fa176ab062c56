// CUDA side: changes of all runs of a unit, of values or of exponents (reference_tiles.py: scan_*, pack_*, apply_*).
//
// The bits of a tile, one a value, are kThreads bytes, a thread each; most are 0. So level 1 has one bit for each byte, level
// 2 the bytes that are not 0. `offsets` say, for each tile, how many bytes of level 2, moves and literals the tiles before it
// have: a CTA needs nothing of the others.
//
//   sender     scan -> sums of counts -> sizes of sections -> pack
//   receiver   apply
#pragma once
#include "changes.cuh"
#include "payloads.cuh"
#include "planes.cuh"

namespace ciera {

constexpr int kCounts = 3;  // bytes of level 2, moves, literals

// Three counts in one word: of the tile's threads before one, there are at most 255, 2040 and 2040. What the count of level 2
// would carry away in a total of 256 is dropped, so only totals of a warp may be read.
CIERA_TILE u32 join_counts(u32 level2, u32 moves, u32 literals) { return level2 << 24 | moves << 12 | literals; }
CIERA_TILE u32 count_of(u32 counts, u32 which) { return counts >> (24 - 12 * which) & 0xfff; }

// `from` [at least `left`] -> values, or their exponents, of an octet.
template <class F>
__device__ __forceinline__ void load_as(typename F::Word* values, const typename F::Word* from, i64 left) {
  load_values<kOctet>(values, from, left);
}
template <class F>
__device__ __forceinline__ void load_as(u8* exponents, const typename F::Word* from, i64 left) {
  alignas(16) typename F::Word values[kOctet];
  load_values<kOctet>(values, from, left);
  split_exponents<F, kOctet>(values, exponents);
}

// Values of format F against the state of the unit, as values (As = F) or as exponents (As = byte)
// -> bits [num_tiles, kThreads], and counts [kCounts, num_tiles + 1], of which the first of each row is left alone.
template <class F, class As>
__device__ __forceinline__ void scan(const typename F::Word* fresh, const typename As::Word* last, const Tile* tiles,
                                     i64 num_tiles, u32 escape, u8* bits_of, i64* counts_of) {
  __shared__ u32 warp_counts[kWarps];
  const Tile tile = tiles[blockIdx.x];
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  u32 bits = 0, counts = 0;
  if (left > 0) {
    alignas(16) typename As::Word now[kOctet], before[kOctet];
    load_as<F>(now, fresh + tile.start + first, left);
    load_values<kOctet>(before, last + tile.state + first, left);
    bits = changed_bits(now, before);
    counts = join_counts(bits != 0, __popc(bits), count_literals<As>(now, before, bits, escape));
  }
  bits_of[(i64)blockIdx.x * kThreads + threadIdx.x] = (u8)bits;
  counts = sum_over_warp(counts);
  if (lane_number() == 0) warp_counts[warp_number()] = counts;
  __syncthreads();
  if (threadIdx.x < kCounts) {
    i64 total = 0;
    CIERA_UNROLL
    for (int k = 0; k < kWarps; k++) total += count_of(warp_counts[k], threadIdx.x);
    counts_of[threadIdx.x * (num_tiles + 1) + blockIdx.x + 1] = total;
  }
}

// What scan found -> sections, unless nothing changed, or they do not fit. `up_to` [num_tiles + 1, kCounts]: how much the
// tiles before each have, and all of them.
template <class F, class As>
__device__ __forceinline__ void pack(const typename F::Word* fresh, const typename As::Word* last, const Tile* tiles,
                                     i64 num_tiles, u32 escape, const u8* bits_of, const i64* up_to,
                                     const SectionRoom& room) {
  __shared__ u32 warp_sums[kWarps];
  if (!up_to[kCounts * num_tiles + 1] || !room.has_room()) return;
  const Tile tile = tiles[blockIdx.x];
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  const u32 bits = bits_of[(i64)blockIdx.x * kThreads + threadIdx.x];
  alignas(16) typename As::Word now[kOctet], before[kOctet];
  u32 counts = 0;
  if (bits) {
    load_as<F>(now, fresh + tile.start + first, left);
    load_values<kOctet>(before, last + tile.state + first, left);
    counts = join_counts(1, __popc(bits), count_literals<As>(now, before, bits, escape));
  }
  u32 total;
  const u32 counts_before = sum_before(counts, warp_sums, total);
  const u32 votes = __ballot_sync(kAllLanes, bits != 0);
  const i64* before_tile = up_to + kCounts * (i64)blockIdx.x;
  if (threadIdx.x < kCounts) {
    u32* offsets = reinterpret_cast<u32*>(room.section<0>()) + kCounts * (i64)blockIdx.x + threadIdx.x;
    offsets[0] = (u32)before_tile[threadIdx.x];
    if (blockIdx.x + 1 == num_tiles) offsets[kCounts] = (u32)before_tile[kCounts + threadIdx.x];
  }
  if (lane_number() % 8 == 0 && left > 0) room.section<1>()[(tile.plane + first) / 64] = (u8)(votes >> lane_number());
  if (!bits) return;
  room.section<2>()[before_tile[0] + count_of(counts_before, 0)] = (u8)bits;
  typename As::Word* literals = 0;
  if (has_literals<As>()) {
    literals = reinterpret_cast<typename As::Word*>(room.section<4>()) + before_tile[2] + count_of(counts_before, 2);
  }
  pack_octet<As>(now, before, bits, escape, room.section<3>() + before_tile[1] + count_of(counts_before, 1), literals);
}

// Sections of a peer -> its row of the unit's state, in place. What did not change is neither read nor written.
// See [Note: Untrusted payloads] and [Note: One mind].
template <class As>
__device__ __forceinline__ void apply(const Payloads& payloads, const u8* payload, const Tile* tiles, i64 num_tiles,
                                      i64 num_plane_values, u32 escape, typename As::Word* row, u32* damage) {
  __shared__ u32 warp_bytes[kWarps], warp_moves[kWarps], warp_literals[kWarps];
  SectionReader reader(payloads, payload);
  const u32* offsets = reinterpret_cast<const u32*>(payload + reader.next());
  const u64 offsets_bytes = reader.num_bytes;
  const u8* level1 = payload + reader.next();
  const u64 level1_bytes = reader.num_bytes;
  const u8* level2 = payload + reader.next();
  const u64 level2_bytes = reader.num_bytes;
  const u8* moves = payload + reader.next();
  const u64 moves_bytes = reader.num_bytes;
  const typename As::Word* literals = 0;
  u64 literals_bytes = 0;
  if (has_literals<As>()) {
    literals = reinterpret_cast<const typename As::Word*>(payload + reader.next());
    literals_bytes = reader.num_bytes;
  }
  if (reader.fits && !(offsets_bytes | level1_bytes | level2_bytes | moves_bytes | literals_bytes)) return;
  bool fits = reader.fits && offsets_bytes == (u64)(kCounts * sizeof(u32) * (num_tiles + 1)) &&
              level1_bytes == (u64)num_plane_values / 64;
  u32 from[kCounts] = {}, here[kCounts] = {};  // how much the tiles before this one have, and it itself
  if (fits) {
    const u32* total = offsets + kCounts * num_tiles;
    fits = level2_bytes == total[0] && moves_bytes == total[1] && literals_bytes == (u64)total[2] * sizeof(*literals);
    offsets += kCounts * (i64)blockIdx.x;
    CIERA_UNROLL
    for (int k = 0; k < kCounts; k++) {
      from[k] = offsets[k];
      here[k] = offsets[kCounts + k] - from[k];
      fits = fits && from[k] <= offsets[kCounts + k] && offsets[kCounts + k] <= total[k] && (blockIdx.x || !from[k]);
    }
  }
  if (!fits) return report_damage(damage);

  const Tile tile = tiles[blockIdx.x];
  const i64 first = threadIdx.x * kOctet, left = tile.num_values - first;
  const bool is_changed = left > 0 && level1[(tile.plane + first) / 64] >> lane_number() % 8 & 1;
  u32 total;
  const u32 bytes_before = count_before(is_changed, warp_bytes, total);
  if (total != here[0]) return report_damage(damage);
  const u32 bits = is_changed ? level2[from[0] + (u64)bytes_before] & (left < kOctet ? (1u << left) - 1 : 0xffu) : 0;
  const u32 moves_before = sum_before(__popc(bits), warp_moves, total);
  if (total != here[1]) return report_damage(damage);
  moves += from[1] + (u64)moves_before;
  if (has_literals<As>()) {
    u32 num_literals = 0;
    for (int k = 0; k < (int)__popc(bits); k++) num_literals += moves[k] == escape;
    const u32 literals_before = sum_before(num_literals, warp_literals, total);
    if (total != here[2]) return report_damage(damage);
    literals += from[2] + (u64)literals_before;
  }
  if (!bits) return;
  alignas(16) typename As::Word values[kOctet];
  row += tile.state + first;
  load_values<kOctet>(values, row, left);
  apply_octet<As>(values, bits, escape, moves, literals);
  store_values<kOctet>(values, row, left);
}

}  // namespace ciera

// CUDA side: blocks of exponents of all runs of a unit (reference_tiles.py: hash_blocks, pack_blocks, put_blocks).
//
// A block has a warp. To send and to receive, a CTA has a group of kGroup blocks: eight bytes of the bitmap.
#pragma once
#include "payloads.cuh"
#include "planes.cuh"

namespace ciera {

constexpr int kGroup = 64;

// -> hashes [num_blocks, 2] of the exponents of each block, and whether they are not the last ones; null: none are.
// Behind the last value of a block exponents are 0.
template <class F>
__device__ __forceinline__ void hash(const typename F::Word* values, const Block* blocks, i64 num_blocks, i64 block_size,
                                     const u64* last_hashes, u64* hashes, u8* changed) {
  const i64 number = (i64)blockIdx.x * kWarps + warp_number();
  if (number >= num_blocks) return;
  const Block block = blocks[number];
  u64 sum0 = 0, sum1 = 0;
  for (i64 word = lane_number(); word < block_size / 8; word += 32) {
    alignas(16) typename F::Word octet[kOctet];
    load_values<kOctet>(octet, values + block.start + 8 * word, block.num_values - 8 * word);
    add_word(exponent_word<F>(octet), word, sum0, sum1);
  }
  sum0 = sum_over_warp(sum0);
  sum1 = sum_over_warp(sum1);
  if (lane_number() == 0) {
    u64 now[2];
    finish_hash(sum0, sum1, now);
    hashes[2 * number] = now[0];
    hashes[2 * number + 1] = now[1];
    const bool is_same = last_hashes && now[0] == last_hashes[2 * number] && now[1] == last_hashes[2 * number + 1];
    changed[number] = !is_same;
  }
}

// Changed blocks -> sections, unless nothing changed, or they do not fit. `ranks` [num_blocks + 1]: how many changed blocks
// there are before each, and in all.
template <class F>
__device__ __forceinline__ void pack_blocks(const typename F::Word* values, const Block* blocks, i64 num_blocks,
                                            i64 block_size, const u8* changed, const i64* ranks, const SectionRoom& room) {
  if (!ranks[num_blocks] || !room.has_room()) return;
  const i64 first = (i64)blockIdx.x * kGroup;
  if (threadIdx.x < kGroup) {
    const i64 number = first + threadIdx.x;
    const u32 votes = __ballot_sync(kAllLanes, number < num_blocks && changed[number]);
    if (lane_number() % 8 == 0 && number < num_blocks) room.section<0>()[number / 8] = (u8)(votes >> lane_number());
  }
  if (threadIdx.x == 0) {
    u32* offsets = reinterpret_cast<u32*>(room.section<1>()) + blockIdx.x;
    offsets[0] = (u32)ranks[first];
    if (first + kGroup >= num_blocks) offsets[1] = (u32)ranks[num_blocks];
  }
  for (i64 number = first + warp_number(); number < first + kGroup && number < num_blocks; number += kWarps) {
    if (!changed[number]) continue;
    const Block block = blocks[number];
    u8* exponents = room.section<2>() + ranks[number] * block_size;
    CIERA_NO_UNROLL
    for (i64 word = lane_number(); word < block_size / 8; word += 32) {
      alignas(16) typename F::Word octet[kOctet];
      alignas(16) u8 out[kOctet];
      load_values<kOctet>(octet, values + block.start + 8 * word, block.num_values - 8 * word);
      split_exponents<F, kOctet>(octet, out);
      store_aligned<kOctet>(out, exponents + 8 * word);
    }
  }
}

// The inverse: sections of a peer -> its row of the unit's state. See [Note: Untrusted payloads].
__device__ __forceinline__ void put_blocks(const Payloads& payloads, const u8* payload, i64 num_blocks, i64 block_size,
                                           u8* row, u32* damage) {
  SectionReader reader(payloads, payload);
  const u8* bits = payload + reader.next();
  const u64 bits_bytes = reader.num_bytes;
  const u32* offsets = reinterpret_cast<const u32*>(payload + reader.next());
  const u64 offsets_bytes = reader.num_bytes;
  const u8* exponents = payload + reader.next();
  if (reader.fits && !(bits_bytes | offsets_bytes | reader.num_bytes)) return;
  const i64 first = (i64)blockIdx.x * kGroup, num_groups = (num_blocks + kGroup - 1) / kGroup;
  bool fits = reader.fits && bits_bytes == (u64)(num_blocks + 7) / 8 &&
              offsets_bytes == sizeof(u32) * (u64)(num_groups + 1);
  u32 from = 0, to = 0, changed[2] = {};  // the group's bits
  if (fits) {
    from = offsets[blockIdx.x];
    to = offsets[blockIdx.x + 1];
    CIERA_UNROLL
    for (int k = 0; k < kGroup / 8; k++) {
      if (first + 8 * k < num_blocks) changed[k / 4] |= (u32)bits[first / 8 + k] << k % 4 * 8;
    }
    CIERA_UNROLL
    for (int k = 0; k < 2; k++) {  // bits behind the last block do not count
      const i64 left = num_blocks - first - 32 * k;
      if (left < 32) changed[k] &= left > 0 ? (1u << left) - 1 : 0;
    }
    const u32 total = offsets[num_groups];
    fits = reader.num_bytes == (u64)total * (u64)block_size && from <= to && to <= total && (blockIdx.x || !from) &&
           to - from == (u32)(__popc(changed[0]) + __popc(changed[1]));
  }
  if (!fits) return report_damage(damage);

  for (u32 k = warp_number(); k < kGroup; k += kWarps) {
    const u32 half = k < 32 ? changed[0] : changed[1], bit = 1u << k % 32;
    if (!(half & bit)) continue;
    const i64 rank = from + (i64)(k < 32 ? 0 : __popc(changed[0])) + __popc(half & (bit - 1));
    CIERA_NO_UNROLL
    for (i64 word = lane_number(); word < block_size / 8; word += 32) {
      alignas(16) u8 octet[kOctet];
      load_aligned<kOctet>(octet, exponents + rank * block_size + 8 * word);
      store_values<kOctet>(octet, row + (first + k) * block_size + 8 * word, kOctet);
    }
  }
}

}  // namespace ciera

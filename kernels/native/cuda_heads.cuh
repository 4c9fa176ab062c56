// CUDA side: heads of payloads and checksums (reference_tiles.py: write_head, check_heads, checksum). heads.py describes them.
#pragma once
#include "checksum.cuh"
#include "payloads.cuh"

namespace ciera {

constexpr u64 kBrokenPromiseName = 0, kFailedName = 1;
constexpr u64 kWireVersion = 5;
// "CIER", wire version and alignment, as the last word of a head.
constexpr u64 kForm = 0x52454943ull | kWireVersion << 32 | kAlignment << 48;

// A head, or part of a payload as it was received. It may begin anywhere.
struct alignas(16) Head {
  u64 name, checksum, payload_bytes, form;
};

// This rank's head. One thread. payload_bytes: null, where the host knows the number.
__device__ __forceinline__ void write_head(u8* payload, u64 name, const u64* own_checksum, const u64* expected_checksum,
                                           const u64* payload_bytes, u64 known_bytes) {
  if (threadIdx.x) return;
  Head head;
  head.name = *own_checksum == *expected_checksum ? name : kBrokenPromiseName;
  head.checksum = *own_checksum;
  head.payload_bytes = payload_bytes ? *payload_bytes : known_bytes;
  head.form = kForm;
  store_values<sizeof(Head)>(reinterpret_cast<const u8*>(&head), payload, sizeof(Head));
}

// Heads of all ranks -> row_ok [num_ranks]. A thread a rank. decoded_checksums: null, or compared but for `own`.
__device__ __forceinline__ void check_heads(const u8* heads, i64 stride, i64 num_ranks, i64 own, u64 name,
                                            const u64* decoded_checksums, int* row_ok, u32* damage) {
  const i64 rank = (i64)blockIdx.x * kThreads + threadIdx.x;
  if (rank >= num_ranks) return;
  Head head;
  load_values<sizeof(Head)>(reinterpret_cast<u8*>(&head), heads + rank * stride, sizeof(Head));
  u32 wrong = 0;
  if (head.form != kForm) {
    wrong = kForeign;
  } else if (head.name != name) {
    wrong = head.name == kBrokenPromiseName ? kBrokenPromise : head.name == kFailedName ? kFailed : kOtherGather;
  } else if (decoded_checksums && rank != own && decoded_checksums[rank] != head.checksum) {
    wrong = kWrongValues;
  }
  row_ok[rank] = !wrong;
  if (wrong) atomicOr(damage, wrong);
}

// Rows of bytes -> adds to sums [rows] what their words contribute. Row number: blockIdx.y.
__device__ __forceinline__ void checksum(const u8* bytes, i64 stride, i64 num_bytes, u64* sums) {
  const u8* row = bytes + (i64)blockIdx.y * stride;
  const i64 num_words = (num_bytes + 7) / 8;
  u64 sum = 0;
  for (i64 j = (i64)blockIdx.x * kThreads + threadIdx.x; j < num_words; j += (i64)gridDim.x * kThreads) {
    alignas(16) u8 octet[8];
    load_values<8>(octet, row + 8 * j, num_bytes - 8 * j);
    u64 word = 0;
    CIERA_UNROLL
    for (int k = 0; k < 8; k++) word |= (u64)octet[k] << (8 * k);
    sum += checksum_term(word, j);
  }
  sum = sum_over_warp(sum);
  if (lane_number() == 0 && sum) atomicAdd(sums + blockIdx.y, sum);
}

}  // namespace ciera

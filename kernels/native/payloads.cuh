// CUDA side: how sections of payloads are found, to read and to write. heads.py describes payloads.
//
// A payload has a table of u64, one a section: its coding in the top 8 bits, and in the others where it ends, in bytes from
// the beginning of the payload. A section begins where the one before it ends, rounded up to kAlignment; the first one at
// `sections_at`.
//
// [Note: Untrusted payloads] A peer's payload may say anything: it may come from another gather, or be damaged. Kernels
// that decode read from it only what lies inside of a section, a section only where it lies inside of the payload, and
// write only where their own tables say. What does not fit sets kDamaged, and the values it is about stay as they are: a
// tile is decoded as a whole or not at all, since all of it is checked before the first store. The kernels depend on no more
// than that payloads have the length and alignment that the host gives.
// Tests: kernel_cases.py, damaged_cases, in memory with exact bounds; test_kernels_shim.py under AddressSanitizer.
#pragma once
#include "cta.cuh"

namespace ciera {

constexpr u64 kAlignment = 16;                 // heads.ALIGNMENT
constexpr u64 kTilesCoding = 9;                // heads.TILES
constexpr u64 kEndMask = (1ull << 56) - 1;
constexpr u32 kDamaged = 1, kOtherGather = 2, kBrokenPromise = 4, kFailed = 8, kWrongValues = 16, kForeign = 32;

CIERA_TILE u64 round_up(u64 number) { return (number + kAlignment - 1) & ~(kAlignment - 1); }

// The payloads of all ranks, as kernels get them.
struct Payloads {
  const u8* data;      // of rank 0; a multiple of kAlignment
  i64 stride;          // bytes from a payload to the next; a multiple of kAlignment
  i64 num_bytes;       // that each has
  i64 own;             // the rank that is left out
  const int* row_ok;   // by rank: 0 where nothing must be decoded
  i64 table_at, sections_at;
  i64 first;           // number of the unit's first section
};

// Tells once for a CTA that a payload is damaged.
__device__ __forceinline__ void report_damage(u32* damage) {
  if (threadIdx.x == 0) atomicOr(damage, kDamaged);
}

// Reads the table of one payload, a section after the other. See [Note: Untrusted payloads].
struct SectionReader {
  const u64* entry;
  u64 end;              // of the section that was read last
  u64 limit;            // bytes of the payload
  u64 num_bytes = 0;    // of that section
  bool fits = true;     // whether all sections so far lie in the payload

  __device__ __forceinline__ SectionReader(const Payloads& payloads, const u8* payload)
      : entry(reinterpret_cast<const u64*>(payload + payloads.table_at) + payloads.first),
        end(payloads.first ? entry[-1] & kEndMask : (u64)payloads.sections_at),
        limit((u64)payloads.num_bytes) {}

  // Where the next section begins. Means nothing unless it `fits`.
  __device__ __forceinline__ u64 next() {
    const u64 start = round_up(end), word = *entry++;
    end = word & kEndMask;
    num_bytes = end - start;
    fits = fits && start <= end && end <= limit && (start == end || word >> 56 == kTilesCoding);
    return start;
  }
};

// Where a sender writes sections: `arena` stands for the payload from byte `arena_at` on.
struct SectionRoom {
  u8* arena;           // a multiple of kAlignment, as `arena_at` is
  i64 capacity;
  const u64* table;    // as in the payload
  i64 num_sections;    // of the whole payload
  i64 arena_at, sections_at;
  i64 first;           // number of the unit's first section

  // Whether all sections of the payload have room.
  __device__ __forceinline__ bool has_room() const {
    return (i64)(table[num_sections - 1] & kEndMask) - arena_at <= capacity;
  }

  // Section `number` of the unit. Only the very first of a payload has none before it.
  template <int number>
  __device__ __forceinline__ u8* section() const {
    const u64 before = number || first ? table[first + number - 1] & kEndMask : (u64)sections_at;
    return arena + (i64)round_up(before) - arena_at;
  }
};

}  // namespace ciera

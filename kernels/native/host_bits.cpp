// Host build: bitmaps of changed values and the gaps that name them on the wire. See host.hpp.
#include "host_bits.hpp"

using namespace ciera;

namespace {

// The positions of set bits -> gaps: the number of clear bits before each; 255 only moves on by 255. With `among`, bits and
// positions count only where it (xor `flip`) is set.
CIERA_CLONES i64 gaps_of_bits(const u8* bitmap, const u8* among, u64 flip, i64 count, u8* gaps) {
  i64 base = 0, last = -1;
  u8* into = gaps;
  for (i64 start = 0; start < count; start += 64) {
    const u64 chosen = among ? class_word(among, flip, start, count) : ~0ull;
    for (u64 bits = load_word(bitmap, start, count) & chosen; bits; bits &= bits - 1) {
      const u64 before = chosen & ((bits & (0 - bits)) - 1);
      const i64 position = base + __builtin_popcountll(before);
      i64 gap = position - last - 1;
      for (; gap >= 255; gap -= 255) *into++ = 255;
      *into++ = (u8)gap;
      last = position;
    }
    base += __builtin_popcountll(chosen);
  }
  return into - gaps;
}

// The inverse, into a bitmap of zeros. Gives how many bits it set, or -1 where a position lies outside or the last gap is open.
CIERA_CLONES i64 bits_of_gaps(const u8* gaps, i64 num_gaps, i64 count, u8* bitmap) {
  i64 position = -1, num_set = 0;
  for (i64 k = 0; k < num_gaps; k++) {
    if (gaps[k] == 255) {
      position += 255;
      continue;
    }
    position += gaps[k] + 1;
    if (position >= count) return -1;
    bitmap[position / 8] |= (u8)(1u << (position % 8));
    num_set++;
  }
  return num_gaps && gaps[num_gaps - 1] == 255 ? -1 : num_set;
}

// The bits of `bitmap` where `among` (xor `flip`) is set, side by side in `out` (of zeros). Gives how many there are.
CIERA_CLONES i64 gather_bits(const u8* bitmap, const u8* among, u64 flip, i64 count, u8* out) {
  i64 base = 0;
  for (i64 start = 0; start < count; start += 64) {
    const u64 chosen = class_word(among, flip, start, count);
    for (u64 bits = load_word(bitmap, start, count) & chosen; bits; bits &= bits - 1) {
      const i64 rank = base + __builtin_popcountll(chosen & ((bits & (0 - bits)) - 1));
      out[rank / 8] |= (u8)(1u << (rank % 8));
    }
    base += __builtin_popcountll(chosen);
  }
  return base;
}

CIERA_CLONES i64 count_bits(const u8* bitmap, i64 count) {
  return count_set({bitmap, packed_bytes(count, 1), 0}, count);
}

}  // namespace

CIERA_API i64 ciera_gaps_of_bits(const u8* bitmap, const u8* among, int flip, i64 count, u8* gaps) {
  return gaps_of_bits(bitmap, among, flip ? ~0ull : 0, count, gaps);
}
CIERA_API i64 ciera_bits_of_gaps(const u8* gaps, i64 num_gaps, i64 count, u8* bitmap) {
  return bits_of_gaps(gaps, num_gaps, count, bitmap);
}
CIERA_API i64 ciera_gather_bits(const u8* bitmap, const u8* among, int flip, i64 count, u8* out) {
  return gather_bits(bitmap, among, flip ? ~0ull : 0, count, out);
}
CIERA_API i64 ciera_count_bits(const u8* bitmap, i64 count) { return count_bits(bitmap, count); }

// Host build: bitmaps, as the host's files share them. A bit a value, the first value lowest.
#pragma once
#include "host.hpp"

namespace ciera {

// 64 bytes of 0 or 1 -> as many bits, the first lowest.
CIERA_TILE u64 bits_of_bytes(const u8* bytes) {
  u64 bits = 0;
  for (int group = 0; group < 8; group++) {
    u64 eight;
    memcpy(&eight, bytes + 8 * group, 8);
    bits |= (eight * 0x0102040810204080ull >> 56) << (8 * group);  // the product has the eight side by side on top
  }
  return bits;
}

// A bitmap as words of 64; bits behind `count` values are 0.
CIERA_TILE u64 load_word(const u8* bitmap, i64 start, i64 count) {
  u64 bits = 0;
  if (count - start >= 64) {
    memcpy(&bits, bitmap + start / 8, 8);
    return bits;
  }
  memcpy(&bits, bitmap + start / 8, packed_bytes(count - start, 1));
  return bits & ((1ull << (count - start)) - 1);
}
CIERA_TILE void store_word(u64 bits, u8* bitmap, i64 start, i64 count) {
  memcpy(bitmap + start / 8, &bits, count - start >= 64 ? 8 : packed_bytes(count - start, 1));
}

// Which of up to 64 values belong to a class: those that `among` (xor `flip`) marks.
CIERA_TILE u64 class_word(const u8* among, u64 flip, i64 start, i64 count) {
  const u64 inside = count - start < 64 ? (1ull << (count - start)) - 1 : ~0ull;
  return (load_word(among, start, count) ^ flip) & inside;
}

// Reads a bitmap 64 bits at most at a time; behind its end there are zeros.
struct BitReader {
  const u8* bitmap;
  i64 num_bytes, position;
  CIERA_TILE u64 read(int count) {
    const i64 byte = position / 8;
    const int shift = position % 8;
    u64 bits = 0;
    if (byte + 8 <= num_bytes) {
      memcpy(&bits, bitmap + byte, 8);
    } else if (byte < num_bytes) {
      memcpy(&bits, bitmap + byte, num_bytes - byte);
    }
    bits >>= shift;
    if (shift + count > 64 && byte + 8 < num_bytes) bits |= (u64)bitmap[byte + 8] << (64 - shift);
    position += count;
    return count < 64 ? bits & ((1ull << count) - 1) : bits;
  }
};

CIERA_TILE i64 count_set(BitReader bits, i64 count) {
  i64 num_set = 0;
  for (; count > 0; count -= 64) num_set += __builtin_popcountll(bits.read(least(count, 64)));
  return num_set;
}

}  // namespace ciera

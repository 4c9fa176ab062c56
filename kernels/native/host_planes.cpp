// Host build: split, merge, block hash and checksum. See host.hpp.
#include "host.hpp"

using namespace ciera;

namespace {

template <class F>
struct Planes {  // from some value on; null where not wanted
  u8 *exponents, *low, *top;

  CIERA_TILE Planes at(i64 start) const {
    return {exponents ? exponents + start : nullptr, low ? low + start * F::kLowBytes : nullptr,
            top ? top + start / 8 * F::kTopBits : nullptr};
  }
};

template <class F, int N>
CIERA_TILE void split_tile(const typename F::Word* values, Planes<F> into) {
  if (into.exponents) split_exponents<F, N>(values, into.exponents);
  if (into.low) split_low<F, N>(values, into.low);
  if (F::kTopBits && into.top) split_top<F, N>(values, into.top);
}

template <class F>
CIERA_TILE void split_piece(const typename F::Word* values, i64 count, Planes<F> planes) {
  i64 start = 0;
  for (; start + kHostTile <= count; start += kHostTile) split_tile<F, kHostTile>(values + start, planes.at(start));
  if (start == count) return;
  const i64 left = count - start;  // the tail: a whole tile, elsewhere
  typename F::Word tile[kHostTile] = {};
  u8 exponents[kHostTile], low[kHostTile * F::kLowBytes], top[kHostTile / 8 * F::kTopBits + 1];
  memcpy(tile, values + start, left * sizeof(typename F::Word));
  split_tile<F, kHostTile>(tile, {exponents, low, top});
  const Planes<F> into = planes.at(start);
  if (into.exponents) memcpy(into.exponents, exponents, left);
  if (into.low) memcpy(into.low, low, left * F::kLowBytes);
  if (into.top) memcpy(into.top, top, packed_bytes(left, F::kTopBits));
}

template <class F>
CIERA_TILE void merge_piece(Planes<F> planes, i64 count, typename F::Word* values) {
  i64 start = 0;
  for (; start + kHostTile <= count; start += kHostTile) {
    const Planes<F> from = planes.at(start);
    merge_values<F, kHostTile>(from.exponents, from.low, from.top, values + start);
  }
  if (start == count) return;
  const i64 left = count - start;
  typename F::Word tile[kHostTile];
  u8 exponents[kHostTile] = {}, low[kHostTile * F::kLowBytes] = {}, top[kHostTile / 8 * F::kTopBits + 1] = {};
  const Planes<F> from = planes.at(start);
  memcpy(exponents, from.exponents, left);
  memcpy(low, from.low, left * F::kLowBytes);
  if (F::kTopBits) memcpy(top, from.top, packed_bytes(left, F::kTopBits));
  merge_values<F, kHostTile>(exponents, low, top, tile);
  memcpy(values + start, tile, left * sizeof(typename F::Word));
}

// Blocks from `values` on; behind the last of `num_values` values exponents are 0.
template <class F>
CIERA_TILE void hash_piece(const typename F::Word* values, i64 num_values, i64 block_size, i64 num_blocks, u64* hashes) {
  for (i64 block = 0; block < num_blocks; block++) {
    u64 sum0 = 0, sum1 = 0;
    for (i64 offset = 0; offset < block_size; offset += kHostTile) {
      const i64 start = block * block_size + offset, left = least(num_values - start, block_size - offset);
      u8 exponents[kHostTile];
      u64 words[kHostTile / 8];
      if (left >= kHostTile) {
        split_exponents<F, kHostTile>(values + start, exponents);
      } else {
        typename F::Word tile[kHostTile] = {};
        if (left > 0) memcpy(tile, values + start, left * sizeof(typename F::Word));
        split_exponents<F, kHostTile>(tile, exponents);
      }
      memcpy(words, exponents, sizeof words);
      const i64 num_words = least(block_size - offset, kHostTile) / 8;
      for (i64 j = 0; j < num_words; j++) add_word(words[j], offset / 8 + j, sum0, sum1);
    }
    finish_hash(sum0, sum1, hashes + 2 * block);
  }
}

CIERA_CLONES u64 sum_words(const u8* bytes, i64 num_bytes, i64 first_word) {
  u64 sum = 0;
  const i64 num_words = num_bytes / 8;
  for (i64 j = 0; j < num_words; j++) {
    u64 word;
    memcpy(&word, bytes + 8 * j, 8);
    sum += checksum_term(word, first_word + j);
  }
  if (num_bytes % 8) {
    u64 word = 0;
    memcpy(&word, bytes + 8 * num_words, num_bytes % 8);
    sum += checksum_term(word, first_word + num_words);
  }
  return sum;
}

}  // namespace

// The functions that host.py calls, for each format. See [Note: Clones].
#define CIERA_FORMAT(F)                                                                                                 \
  CIERA_CLONES static void split_##F(const F::Word* values, i64 count, Planes<F> planes) {                              \
    split_piece<F>(values, count, planes);                                                                              \
  }                                                                                                                     \
  CIERA_CLONES static void merge_##F(Planes<F> planes, i64 count, F::Word* values) {                                    \
    merge_piece<F>(planes, count, values);                                                                              \
  }                                                                                                                     \
  CIERA_CLONES static void hash_##F(const F::Word* values, i64 num_values, i64 block_size, i64 num_blocks, u64* hashes) { \
    hash_piece<F>(values, num_values, block_size, num_blocks, hashes);                                                  \
  }                                                                                                                     \
  CIERA_API void ciera_split_##F(const F::Word* values, i64 num_values, u8* exponents, u8* low, u8* top, int threads) { \
    const Planes<F> planes = {exponents, low, top};                                                                     \
    for_pieces(num_values, threads,                                                                                     \
               [&](i64, i64 start, i64 count) { split_##F(values + start, count, planes.at(start)); });                 \
  }                                                                                                                     \
  CIERA_API void ciera_merge_##F(u8* exponents, u8* low, u8* top, i64 num_values, F::Word* values, int threads) {       \
    const Planes<F> planes = {exponents, low, top};                                                                     \
    for_pieces(num_values, threads,                                                                                     \
               [&](i64, i64 start, i64 count) { merge_##F(planes.at(start), count, values + start); });                 \
  }                                                                                                                     \
  CIERA_API void ciera_hash_##F(const F::Word* values, i64 num_values, i64 block_size, u64* hashes, int threads) {      \
    const i64 num_blocks = (num_values + block_size - 1) / block_size;                                                  \
    const i64 blocks_a_piece = kPiece / block_size > 0 ? kPiece / block_size : 1;                                       \
    for_pieces((num_blocks + blocks_a_piece - 1) / blocks_a_piece * kPiece, threads, [&](i64 piece, i64, i64) {         \
      const i64 first = piece * blocks_a_piece, start = first * block_size;                                             \
      hash_##F(values + start, num_values - start, block_size, least(num_blocks - first, blocks_a_piece),               \
               hashes + 2 * first);                                                                                     \
    });                                                                                                                 \
  }

CIERA_FORMAT(bf16)
CIERA_FORMAT(fp16)
CIERA_FORMAT(fp32)

CIERA_API u64 ciera_checksum(const u8* bytes, i64 num_bytes, int threads) {
  std::atomic<u64> sum{0};
  for_pieces((num_bytes + 7) / 8, threads, [&](i64, i64 first, i64 num_words) {
    sum += sum_words(bytes + 8 * first, least(num_bytes - 8 * first, 8 * num_words), first);
  });
  return mix(sum);
}

// Names the source that this was built from, so that a stale build is found out.
CIERA_API const char* ciera_source() { return CIERA_SOURCE; }

// Host build: which values changed and by how much, in one pass over a run, and the way back. See host.hpp.
//
// The values of a run may be told apart in *small* and large ones by their last exponents (docs/wire-format.md); then each
// of the two has its own moves, and changed positions are counted among its own values.
#include "host_bits.hpp"

using namespace ciera;

namespace {

// For up to 64 values: whether they differ. Bytes first, since such loops become vector code.
template <class Word>
CIERA_TILE u64 changed_word(const Word* fresh, const Word* last, i64 count) {
  u8 differs[64] = {};
  if (count == 64) {
    for (int i = 0; i < 64; i++) differs[i] = fresh[i] != last[i];
  } else {
    for (i64 i = 0; i < count; i++) differs[i] = fresh[i] != last[i];
  }
  return bits_of_bytes(differs);
}

// For up to 64 values: whether their exponents are below a boundary, given as `limit_of(boundary)`.
template <class Word>
CIERA_TILE u64 small_word(const Word* values, Word limit, i64 count) {
  u8 is_small[64] = {};
  if (count == 64) {
    for (int i = 0; i < 64; i++) is_small[i] = (Word)(values[i] << 1) < limit;
  } else {
    for (i64 i = 0; i < count; i++) is_small[i] = (Word)(values[i] << 1) < limit;
  }
  return bits_of_bytes(is_small);
}

template <class F>
typename F::Word limit_of(u32 boundary) {  // of a value without its sign, moved up by one bit
  return (typename F::Word)(boundary << (F::kMantissaBits + 1));
}
template <>
u8 limit_of<ciera::byte>(u32) {
  return 0;
}

struct Moved {  // the changes of small or of large values
  u32 escape;
  u8* moves;
};

// Symbols of the values chosen by `bits` among 64 -> part.moves, their new values -> literals while they escape.
template <class F>
CIERA_TILE void compact_word(const typename F::Word* fresh, const typename F::Word* last, u64 bits, Moved& part,
                             typename F::Word* literals, i64& num_literals) {
  while (bits) {
    const int i = __builtin_ctzll(bits);
    const u32 symbol = move_symbol<F>(fresh[i], last[i], part.escape);
    *part.moves++ = (u8)symbol;
    if (has_literals<F>()) {
      literals[num_literals] = fresh[i];  // overwritten by the next one unless it counts
      num_literals += symbol == part.escape;
    }
    bits &= bits - 1;
  }
}

struct Found {  // of a piece
  i64 num_small, num_small_changed, num_changed, num_literals;
};

// See find. `changed` and `small` are bitmaps of the piece; literals are the small values' first, then the large ones'.
template <class F>
CIERA_TILE Found find_piece(const typename F::Word* fresh, const typename F::Word* last, i64 count,
                            typename F::Word limit, u8* changed, u8* small, Moved of_small, Moved of_large, typename F::Word* literals) {
  Found found = {0, 0, 0, 0};
  for (i64 start = 0; start < count; start += 64) {
    const i64 here = least(count - start, 64);
    const u64 bits = changed_word(fresh + start, last + start, here);
    store_word(bits, changed, start, count);
    found.num_changed += __builtin_popcountll(bits);
    if (!small) {
      compact_word<F>(fresh + start, last + start, bits, of_large, literals, found.num_literals);
      continue;
    }
    const u64 is_small = small_word(last + start, limit, here);
    store_word(is_small, small, start, count);
    found.num_small += __builtin_popcountll(is_small);
    found.num_small_changed += __builtin_popcountll(bits & is_small);
    compact_word<F>(fresh + start, last + start, bits & is_small, of_small, literals, found.num_literals);
  }
  for (i64 start = 0; small && start < count; start += 64) {
    const u64 bits = load_word(changed, start, count) & ~load_word(small, start, count);
    compact_word<F>(fresh + start, last + start, bits, of_large, literals, found.num_literals);
  }
  return found;
}

template <class F>
CIERA_TILE i64 find_all_piece(const typename F::Word* fresh, const typename F::Word* last, i64 count, Moved all,
                              typename F::Word* literals) {
  i64 num_literals = 0;
  for (i64 i = 0; i < count; i++) all.moves[i] = (u8)move_symbol<F>(fresh[i], last[i], all.escape);
  for (i64 start = 0; has_literals<F>() && start < count; start += 64) {
    const i64 here = least(count - start, 64);
    u8 is_literal[64] = {};
    for (i64 i = 0; i < here; i++) is_literal[i] = all.moves[start + i] == all.escape;
    for (u64 bits = bits_of_bytes(is_literal); bits; bits &= bits - 1) {
      literals[num_literals++] = fresh[start + __builtin_ctzll(bits)];
    }
  }
  return num_literals;
}

// For up to 64 values whose exponents were `last`: the exponents that they have now, and whether these differ.
template <class F>
CIERA_TILE u64 changed_exponents(const typename F::Word* values, const u8* last, i64 count, u8* exponents) {
  u8 differs[64] = {};
  if (count == 64) {
    split_exponents<F, 64>(values, exponents);
    for (int i = 0; i < 64; i++) differs[i] = exponents[i] != last[i];
  } else {
    for (i64 i = 0; i < count; i++) exponents[i] = exponent_of<F>(values[i]);
    for (i64 i = 0; i < count; i++) differs[i] = exponents[i] != last[i];
  }
  return bits_of_bytes(differs);
}

// See find_exponents. Without a bitmap every value has a move.
template <class F>
CIERA_TILE i64 find_exponents_piece(const typename F::Word* values, const u8* last, i64 count, u8* changed, u8* moves) {
  u8* into = moves;
  for (i64 start = 0; start < count; start += 64) {
    const i64 here = least(count - start, 64);
    u8 exponents[64];
    u64 bits = changed_exponents<F>(values + start, last + start, here, exponents);
    if (!changed) {
      for (i64 i = 0; i < here; i++) *into++ = (u8)(exponents[i] - last[start + i]);
      continue;
    }
    store_word(bits, changed, start, count);
    for (; bits; bits &= bits - 1) {
      const int i = __builtin_ctzll(bits);
      *into++ = (u8)(exponents[i] - last[start + i]);
    }
  }
  return into - moves;
}

// The changes of small or of large values, as they are taken up again.
template <class F>
struct Received {
  u32 escape;
  const u8* moves;
  const typename F::Word* literals;

  CIERA_TILE void move(typename F::Word& value) {
    const u32 symbol = *moves++;
    const bool is_literal = has_literals<F>() && symbol == escape;
    value = is_literal ? *literals++ : moved_value<F>(value, symbol);
  }
};

// The position of set bit number `rank` of `word`, counted from 0.
CIERA_TILE int position_of(u64 word, int rank) {
  u64 counts = word - (word >> 1 & 0x5555555555555555ull);
  counts = (counts & 0x3333333333333333ull) + (counts >> 2 & 0x3333333333333333ull);
  counts = ((counts + (counts >> 4)) & 0x0f0f0f0f0f0f0f0full) * 0x0101010101010101ull;  // byte k: of bytes 0 to k
  // bytes whose count is at most the rank lie before it
  const u64 before = ((rank * 0x0101010101010101ull | 0x8080808080808080ull) - counts) & 0x8080808080808080ull;
  const int shift = 8 * __builtin_popcountll(before);
  rank -= (int)((counts << 8) >> shift & 0xff);
  u32 byte = (u32)(word >> shift & 0xff);
  for (; rank > 0; rank--) byte &= byte - 1;
  return shift + __builtin_ctz(byte);
}

// Bits of a class, in the places that `among` marks.
CIERA_TILE u64 spread(u64 bits, u64 among) {
  u64 placed = 0;
  for (; bits; bits &= bits - 1) placed |= 1ull << position_of(among, __builtin_ctzll(bits));
  return placed;
}

// See apply. The readers stand where the piece begins; `is_small` holds a bit for each of its values.
template <class F>
CIERA_TILE void apply_piece(typename F::Word* values, i64 count, BitReader small, BitReader large, Received<F> of_small,
                            Received<F> of_large, const u64* is_small) {
  for (i64 start = 0; start < count; start += 64) {
    const i64 here = least(count - start, 64);
    u64 of_small_here = 0, bits;
    if (small.bitmap) {
      const u64 small_here = is_small[start / 64];
      const u64 large_here = ~small_here & (here < 64 ? (1ull << here) - 1 : ~0ull);
      const int num_small = __builtin_popcountll(small_here);
      of_small_here = spread(small.read(num_small), small_here);
      bits = spread(large.read(here - num_small), large_here) | of_small_here;
    } else {
      bits = large.read(here);
    }
    for (; bits; bits &= bits - 1) {
      const int i = __builtin_ctzll(bits);
      (of_small_here >> i & 1 ? of_small : of_large).move(values[start + i]);
    }
  }
}

template <class F>
CIERA_TILE void apply_all_piece(typename F::Word* values, i64 count, Received<F> all) {
  for (i64 i = 0; i < count; i++) all.move(values[i]);
}

// Which of up to kPiece values are small, a bit each; gives how many.
template <class Word>
CIERA_TILE i64 look_piece(const Word* values, i64 count, Word limit, u64* is_small) {
  i64 num_small = 0;
  for (i64 start = 0; start < count; start += 64) {
    is_small[start / 64] = small_word(values + start, limit, least(count - start, 64));
    num_small += __builtin_popcountll(is_small[start / 64]);
  }
  return num_small;
}

CIERA_CLONES i64 count_bits(BitReader bits, i64 count) { return count_set(bits, count); }

CIERA_CLONES i64 count_bytes(const u8* bytes, i64 count, u8 wanted) {
  i64 found = 0;
  for (i64 i = 0; i < count; i++) found += bytes[i] == wanted;
  return found;
}

struct Start {  // what there was before a piece
  i64 small, small_moves, moves, literals, small_literals_here;
};

// Moves up what each range of values left at its own place in an array, so that nothing lies between.
template <class T, class Count>
void close_up(T* array, const std::vector<Found>& found, i64 range, Count count) {
  i64 end = 0;
  for (size_t k = 0; k < found.size(); k++) {
    const i64 here = count(found[k]);
    if (here && k) memmove(array + end, array + k * range, here * sizeof(T));
    end += here;
  }
}

// ---- what runs in clones, see [Note: Clones]; told apart by their first argument

#define CIERA_CHANGE_CLONES(F)                                                                                          \
  CIERA_CLONES Found find_clone(F, const F::Word* fresh, const F::Word* last, i64 count, F::Word limit, u8* changed,    \
                                u8* small, Moved of_small, Moved of_large, F::Word* literals) {                         \
    if (changed) return find_piece<F>(fresh, last, count, limit, changed, small, of_small, of_large, literals);         \
    return {0, 0, count, find_all_piece<F>(fresh, last, count, of_large, literals)};                                    \
  }                                                                                                                     \
  CIERA_CLONES i64 look_clone(F, const F::Word* values, i64 count, F::Word limit, u64* is_small) {                      \
    return look_piece(values, count, limit, is_small);                                                                  \
  }                                                                                                                     \
  CIERA_CLONES void apply_clone(F, F::Word* values, i64 count, BitReader small, BitReader large, Received<F> of_small,  \
                                Received<F> of_large, const u64* is_small) {                                            \
    if (large.bitmap) {                                                                                                 \
      apply_piece<F>(values, count, small, large, of_small, of_large, is_small);                                        \
    } else {                                                                                                            \
      apply_all_piece<F>(values, count, of_large);                                                                      \
    }                                                                                                                   \
  }

CIERA_CHANGE_CLONES(bf16)
CIERA_CHANGE_CLONES(fp16)
CIERA_CHANGE_CLONES(fp32)
CIERA_CHANGE_CLONES(ciera::byte)

#define CIERA_EXPONENT_CLONES(F)                                                                                        \
  CIERA_CLONES i64 find_exponents_clone(F, const F::Word* values, const u8* last, i64 count, u8* changed, u8* moves) {  \
    return find_exponents_piece<F>(values, last, count, changed, moves);                                                \
  }

CIERA_EXPONENT_CLONES(bf16)
CIERA_EXPONENT_CLONES(fp16)
CIERA_EXPONENT_CLONES(fp32)

// ---- whole runs

// The number of pieces that a thread takes one after the other, in values: little of the room for moves is touched then.
i64 range_of(i64 num_pieces, i64 num_ranges) {
  return num_ranges ? (num_pieces + num_ranges - 1) / num_ranges * kPiece : kPiece;
}

// Values [n] against `last` [n]. Writes the bitmap `changed` and, where `small` is given, which
// values were small, moves and literals (room for n of each; `changed` null: a move for every value).
// counts: small values, changed small values, changed values, literals.
template <class F>
void find(const typename F::Word* fresh, const typename F::Word* last, i64 n, u32 boundary, u32 small_escape, u32 escape,
          u8* changed, u8* small, u8* small_moves, u8* moves, typename F::Word* literals, i64* counts, int threads) {
  const typename F::Word limit = limit_of<F>(boundary);
  const i64 num_pieces = (n + kPiece - 1) / kPiece;
  const i64 num_ranges = least(num_pieces, threads), range = range_of(num_pieces, num_ranges);
  std::vector<Found> found(num_ranges, Found{0, 0, 0, 0});
  for_each(num_ranges, threads, [&](i64 k) {
    Found& sum = found[k];
    const i64 first = k * range, end = least(n, first + range);
    for (i64 start = first; start < end; start += kPiece) {
      const Moved of_small = {small_escape, small ? small_moves + first + sum.num_small_changed : nullptr};
      const Moved of_large = {escape, moves + first + sum.num_changed - sum.num_small_changed};
      const Found one = find_clone(F(), fresh + start, last + start, least(end - start, kPiece), limit,
                                   changed ? changed + start / 8 : nullptr, small ? small + start / 8 : nullptr, of_small,
                                   of_large, literals ? literals + first + sum.num_literals : nullptr);
      sum.num_small += one.num_small;
      sum.num_small_changed += one.num_small_changed;
      sum.num_changed += one.num_changed;
      sum.num_literals += one.num_literals;
    }
  });
  close_up(small_moves, found, range, [](const Found& one) { return one.num_small_changed; });
  close_up(moves, found, range, [](const Found& one) { return one.num_changed - one.num_small_changed; });
  close_up(literals, found, range, [](const Found& one) { return one.num_literals; });
  for (int k = 0; k < 4; k++) counts[k] = 0;
  for (const Found& one : found) {
    counts[0] += one.num_small;
    counts[1] += one.num_small_changed;
    counts[2] += one.num_changed;
    counts[3] += one.num_literals;
  }
}

// The exponents of values [n] against `last` [n]. Writes the bitmap `changed` and a move for each one that differs (room for n;
// `changed` null: a move for every value). Gives the number of moves.
template <class F>
i64 find_exponents(const typename F::Word* values, const u8* last, i64 n, u8* changed, u8* moves, int threads) {
  const i64 num_pieces = (n + kPiece - 1) / kPiece;
  const i64 num_ranges = least(num_pieces, threads), range = range_of(num_pieces, num_ranges);
  std::vector<Found> found(num_ranges, Found{0, 0, 0, 0});
  for_each(num_ranges, threads, [&](i64 k) {
    const i64 first = k * range, end = least(n, first + range);
    for (i64 start = first; start < end; start += kPiece) {
      found[k].num_changed += find_exponents_clone(F(), values + start, last + start, least(end - start, kPiece),
                                                   changed ? changed + start / 8 : nullptr,
                                                   moves + first + found[k].num_changed);
    }
  });
  close_up(moves, found, range, [](const Found& one) { return one.num_changed; });
  i64 num_moves = 0;
  for (const Found& one : found) num_moves += one.num_changed;
  return num_moves;
}

// The inverse on `values` [n], which it also copies to `out` where given. `large` null: a move for every value; `small` null:
// all are large. Bits of `small` and `large` are counted among small and large values. The caller has checked that there are
// as many moves as bits and as many literals as escapes, and compares `counts` afterwards: small values, small moves,
// large moves and literals that were used.
template <class F>
void apply(typename F::Word* values, i64 n, u32 boundary, const u8* small, i64 small_bytes, const u8* large,
           i64 large_bytes, u32 small_escape, u32 escape, const u8* small_moves, const u8* moves,
           const typename F::Word* literals, typename F::Word* out, i64* counts, int threads) {
  const i64 num_pieces = (n + kPiece - 1) / kPiece;
  const typename F::Word limit = limit_of<F>(boundary);
  std::vector<Start> starts(num_pieces + 1, Start{0, 0, 0, 0, 0});
  std::vector<u64> is_small(small ? num_pieces * (kPiece / 64) : 0);
  const auto look = [&](i64 piece, i64 start, i64 count) {
    starts[piece + 1].small = small ? look_clone(F(), values + start, count, limit, &is_small[start / 64]) : 0;
  };
  const auto add_up = [&](i64 piece, i64 start, i64 count) {
    Start& at = starts[piece];
    Start& next = starts[piece + 1];
    const i64 num_small = next.small;
    const i64 in_small = small ? count_bits({small, small_bytes, at.small}, num_small) : 0;
    const i64 in_large = large ? count_bits({large, large_bytes, start - at.small}, count - num_small) : count;
    i64 in_literals = 0;
    if (has_literals<F>()) {
      if (small) at.small_literals_here = count_bytes(small_moves + at.small_moves, in_small, (u8)small_escape);
      in_literals = at.small_literals_here + count_bytes(moves + at.moves, in_large, (u8)escape);
    }
    next = {at.small + num_small, at.small_moves + in_small, at.moves + in_large, at.literals + in_literals, 0};
  };
  const auto run = [&](i64 piece, i64 start, i64 count) {
    const Start& at = starts[piece];
    const Received<F> of_small = {small_escape, small_moves + at.small_moves, literals + at.literals};
    const Received<F> of_large = {escape, moves + at.moves, literals + at.literals + at.small_literals_here};
    apply_clone(F(), values + start, count, {small, small_bytes, at.small}, {large, large_bytes, start - at.small},
                of_small, of_large, small ? &is_small[start / 64] : nullptr);
    if (out) memcpy(out + start, values + start, count * sizeof(typename F::Word));
  };
  if (threads == 1) {  // one pass over memory: a piece is counted and moved while it is in the cache
    for_pieces(n, 1, [&](i64 piece, i64 start, i64 count) {
      look(piece, start, count);
      add_up(piece, start, count);
      run(piece, start, count);
    });
  } else {
    if (small) for_pieces(n, threads, look);
    for_pieces(n, 1, add_up);
    for_pieces(n, threads, run);
  }
  const Start& end = starts[num_pieces];
  counts[0] = end.small, counts[1] = end.small_moves, counts[2] = end.moves, counts[3] = end.literals;
}

}  // namespace

// The functions that host.py calls, for each format.
#define CIERA_CHANGES(F, name)                                                                                          \
  CIERA_API void ciera_find_##name(const F::Word* fresh, const F::Word* last, i64 n, u32 boundary, u32 small_escape,    \
                                   u32 escape, u8* changed, u8* small, u8* small_moves, u8* moves, F::Word* literals,   \
                                   i64* counts, int threads) {                                                          \
    find<F>(fresh, last, n, boundary, small_escape, escape, changed, small, small_moves, moves, literals, counts,       \
            threads);                                                                                                   \
  }                                                                                                                     \
  CIERA_API void ciera_apply_##name(F::Word* values, i64 n, u32 boundary, const u8* small, i64 small_bytes,             \
                                    const u8* large, i64 large_bytes, u32 small_escape, u32 escape,                     \
                                    const u8* small_moves, const u8* moves, const F::Word* literals, F::Word* out,      \
                                    i64* counts, int threads) {                                                         \
    apply<F>(values, n, boundary, small, small_bytes, large, large_bytes, small_escape, escape, small_moves, moves,     \
             literals, out, counts, threads);                                                                           \
  }

CIERA_CHANGES(bf16, bf16)
CIERA_CHANGES(fp16, fp16)
CIERA_CHANGES(fp32, fp32)
CIERA_CHANGES(ciera::byte, byte)

#define CIERA_EXPONENTS(F)                                                                                              \
  CIERA_API i64 ciera_find_exponents_##F(const F::Word* values, const u8* last, i64 n, u8* changed, u8* moves,          \
                                         int threads) {                                                                 \
    return find_exponents<F>(values, last, n, changed, moves, threads);                                                 \
  }

CIERA_EXPONENTS(bf16)
CIERA_EXPONENTS(fp16)
CIERA_EXPONENTS(fp32)

// Which values changed (scan), by how much (pack), and the way back (apply).
//
// A *move* is the distance between two bit patterns in the order of the numbers, in zigzag form (0, -1, 1, -2, ... as
// 0, 1, 2, 3, ...). Moves below an *escape* are symbols of a byte; the escape itself stands for all others, whose new value
// travels as it is, a *literal*. Bytes (exponents) have differences mod 256 for moves and no literals.
// Reference: reference.find_changes, apply_changes.
//
// Worked example, bf16, escape 15: last 1.0, -2.0, 0.5, 0.0 = 0x3F80, 0xC000, 0x3F00, 0x0000
//   fresh 0x3F81, 0xC000, 0x3F00, 0x8001: changed bits 0b1001 (first value lowest);
//   the first went up by 1: move 2; the last from 0 down to the first negative denormal. In order, -0.0 is -1 and 0x8001
//   is -2: move 3. Symbols 2, 3; no literals. Had the last become 1.0, its symbol would be 15 and 0x3F80 a literal.
#pragma once
#include "common.cuh"

namespace ciera {

// What takes the place of a float format where the values are exponents, one byte each.
struct byte {
  typedef u8 Word;
};

// Eight pairs -> one bit each, 1 = differs, first value lowest.
template <class Word>
CIERA_TILE u32 changed_bits(const Word* __restrict__ fresh, const Word* __restrict__ last) {
  u32 bits = 0;
  CIERA_UNROLL
  for (int i = 0; i < 8; i++) bits |= (u32)(fresh[i] != last[i]) << i;
  return bits;
}

// Bit patterns <-> integers in the order of the numbers (its own inverse): the lower bits of negatives flip.
template <class F>
CIERA_TILE typename F::Word in_order(typename F::Word word) {
  typedef typename F::Word Word;
  Word is_negative = (Word)(Word(0) - (word >> (F::kBits - 1)));
  return (Word)(word ^ (is_negative >> 1));
}

template <class F>
CIERA_TILE constexpr bool has_literals() {
  return true;
}
template <>
CIERA_TILE constexpr bool has_literals<byte>() {
  return false;
}

// The move from `last` to `fresh`, at most `escape`.
template <class F>
CIERA_TILE u32 move_symbol(typename F::Word fresh, typename F::Word last, u32 escape) {
  typedef typename F::Word Word;
  Word moved = (Word)(in_order<F>(fresh) - in_order<F>(last));
  Word is_negative = (Word)(Word(0) - (moved >> (F::kBits - 1)));
  Word zigzag = (Word)((Word)(moved << 1) ^ is_negative);
  return zigzag < (Word)escape ? zigzag : (Word)escape;
}
template <>
CIERA_TILE u32 move_symbol<byte>(u8 fresh, u8 last, u32) {
  return (u8)(fresh - last);
}

// The inverse; of an escape it is no value worth having.
template <class F>
CIERA_TILE typename F::Word moved_value(typename F::Word last, u32 symbol) {
  typedef typename F::Word Word;
  Word distance = (Word)((symbol >> 1) ^ (0u - (symbol & 1)));
  return in_order<F>((Word)(in_order<F>(last) + distance));
}
template <>
CIERA_TILE u8 moved_value<byte>(u8 last, u32 symbol) {
  return (u8)(last + symbol);
}

// How many of the chosen ones of eight values travel as literals.
template <class F>
CIERA_TILE u32 count_literals(const typename F::Word* fresh, const typename F::Word* last, u32 bits, u32 escape) {
  u32 count = 0;
  if (has_literals<F>()) {
    CIERA_UNROLL
    for (int i = 0; i < 8; i++) count += (bits >> i & 1) && move_symbol<F>(fresh[i], last[i], escape) == escape;
  }
  return count;
}

// The chosen ones of eight values -> their symbols from `moves` on, and literals from `literals` on.
template <class F>
CIERA_TILE void pack_octet(const typename F::Word* fresh, const typename F::Word* last, u32 bits, u32 escape,
                             u8* __restrict__ moves, typename F::Word* __restrict__ literals) {
  CIERA_UNROLL
  for (int i = 0; i < 8; i++) {
    if (bits >> i & 1) {
      u32 symbol = move_symbol<F>(fresh[i], last[i], escape);
      *moves++ = (u8)symbol;
      if (has_literals<F>() && symbol == escape) *literals++ = fresh[i];
    }
  }
}

// The inverse: moves the chosen ones of eight values [8], in place. Gives how many literals it took.
template <class F>
CIERA_TILE u32 apply_octet(typename F::Word* values, u32 bits, u32 escape, const u8* __restrict__ moves,
                          const typename F::Word* __restrict__ literals) {
  u32 num_literals = 0;
  CIERA_UNROLL
  for (int i = 0; i < 8; i++) {
    if (bits >> i & 1) {
      u32 symbol = *moves++;
      bool is_literal = has_literals<F>() && symbol == escape;
      values[i] = is_literal ? literals[num_literals] : moved_value<F>(values[i], symbol);
      num_literals += is_literal;
    }
  }
  return num_literals;
}

}  // namespace ciera

// Split a tile of values into exponents and sign+mantissa planes, and merge them again (paper, Algorithm 1: split, merge).
// Reference: reference.split_planes and merge_planes.
//
// Worked example, bf16: values 1.0, -2.0, 0.5, -0.0 = 0x3F80, 0xC000, 0x3F00, 0x8000
//   exponents 127, 128, 126, 0; low bytes (mantissa << 1 | sign) 0, 1, 0, 1; no top bits.
// fp16: the same values = 0x3C00, 0xC000, 0x3800, 0x8000
//   exponents 15, 16, 14, 0; low bytes 0, 1, 0, 1; top bits (the mantissa's upper three) all 0.
#pragma once
#include "hash.cuh"

namespace ciera {

// values [N] -> exponents [N], low [N * kLowBytes] (a value's bytes together, lowest first), top [N * kTopBits / 8].
// N is a multiple of 8. Top bits are packed, first value lowest.
template <class F, int N>
CIERA_TILE void split_low(const typename F::Word* __restrict__ values, u8* __restrict__ low) {
  typedef typename F::Word Word;
  CIERA_UNROLL
  for (int i = 0; i < N; i++) {
    Word rotated = (Word)((values[i] << 1) | (values[i] >> (F::kBits - 1)));
    CIERA_UNROLL
    for (int k = 0; k < F::kLowBytes; k++) low[i * F::kLowBytes + k] = (u8)(rotated >> (8 * k));
  }
}

template <class F, int N>
CIERA_TILE void split_exponents(const typename F::Word* __restrict__ values, u8* __restrict__ exponents) {
  CIERA_UNROLL
  for (int i = 0; i < N; i++) exponents[i] = exponent_of<F>(values[i]);
}

template <class F, int N>
CIERA_TILE void split_top(const typename F::Word* __restrict__ values, u8* __restrict__ top) {
  constexpr int width = F::kTopBits;
  CIERA_UNROLL
  for (int group = 0; group < N / 8; group++) {
    u32 packed = 0;
    CIERA_UNROLL
    for (int i = 0; i < 8; i++) {
      u32 bits = (values[8 * group + i] >> (F::kMantissaBits - width)) & ((1u << width) - 1);
      packed |= bits << (width * i);
    }
    CIERA_UNROLL
    for (int k = 0; k < width; k++) top[width * group + k] = (u8)(packed >> (8 * k));
  }
}

// The inverse of the three: exponents [N], low, top -> values [N], bit for bit.
template <class F, int N>
CIERA_TILE void merge_values(const u8* __restrict__ exponents, const u8* __restrict__ low, const u8* __restrict__ top,
                             typename F::Word* __restrict__ values) {
  typedef typename F::Word Word;
  constexpr int width = F::kTopBits;
  CIERA_UNROLL
  for (int group = 0; group < N / 8; group++) {
    u32 packed = 0;
    CIERA_UNROLL
    for (int k = 0; k < width; k++) packed |= (u32)top[width * group + k] << (8 * k);
    CIERA_UNROLL
    for (int j = 0; j < 8; j++) {
      int i = 8 * group + j;
      u32 rotated = (u32)exponents[i] << (F::kBits - F::kExponentBits);
      if (width) rotated |= ((packed >> (width * j)) & ((1u << width) - 1)) << (8 * F::kLowBytes);
      CIERA_UNROLL
      for (int k = 0; k < F::kLowBytes; k++) rotated |= (u32)low[i * F::kLowBytes + k] << (8 * k);
      Word word = (Word)rotated;
      values[i] = (Word)((word >> 1) | (word << (F::kBits - 1)));
    }
  }
}

}  // namespace ciera

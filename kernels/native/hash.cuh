// The block hash: two independent 64-bit streams over the exponents of a block (paper 3.1, Algorithm 1: Hash).
//
// Eight exponents make one little-endian word w_j. Stream s is mix(sum_j mix(w_j ^ key(s, j)) ^ seed_s), with
// key(s, j) = seed_s + (j + 1) * gamma and mix = SplitMix64's finaliser. A sum, so that words may be hashed in any order.
// Reference: reference.hash_blocks.
//
// Worked example, bf16, a block of eight values of which four are 1.0, -2.0, 0.5, -0.0 and four are 0: exponents
// 127, 128, 126, 0, 0, 0, 0, 0, so w_0 = 0x7e807f and the hash is 0x6d9c5c8c2291ef39, 0xe55b79bfe0eba6f6.
#pragma once
#include "common.cuh"

namespace ciera {

constexpr u64 kGamma = 0x9E3779B97F4A7C15ull;   // 2**64 / golden ratio
constexpr u64 kSeed0 = 0x243F6A8885A308D3ull;   // digits of pi
constexpr u64 kSeed1 = 0x13198A2E03707344ull;

// SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014). mix(1) = 0x5692161d100b05e5.
CIERA_TILE u64 mix(u64 word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
  return word ^ (word >> 31);
}

// The exponent of one value, 0 to 255.
template <class F>
CIERA_TILE u8 exponent_of(typename F::Word value) {
  return (u8)((value >> F::kMantissaBits) & ((1u << F::kExponentBits) - 1));
}

// Exponents of eight values -> one word, the first lowest.
template <class F>
CIERA_TILE u64 exponent_word(const typename F::Word* values) {
  u64 word = 0;
  CIERA_UNROLL
  for (int i = 0; i < 8; i++) word |= (u64)exponent_of<F>(values[i]) << (8 * i);
  return word;
}

// What word number j of a block adds to the sums of both streams.
CIERA_TILE void add_word(u64 word, u64 j, u64& sum0, u64& sum1) {
  u64 step = (j + 1) * kGamma;
  sum0 += mix(word ^ (step + kSeed0));
  sum1 += mix(word ^ (step + kSeed1));
}

// The sums of a whole block -> its hash.
CIERA_TILE void finish_hash(u64 sum0, u64 sum1, u64* hash) {
  hash[0] = mix(sum0 ^ kSeed0);
  hash[1] = mix(sum1 ^ kSeed1);
}

}  // namespace ciera

// The 64-bit checksum of a row of bytes: mix(sum_j mix(w_j ^ (j + 1) * gamma)) over its little-endian words, sums mod 2**64.
// Words are mixed before they are added: in a sum of multiples of words, two flipped signs would cancel.
// Reference: reference.checksum.
//
// Worked example: bytes 1, 2, 3, 4 are the one word 0x04030201, and the checksum is 0xf16840c310650e2a.
#pragma once
#include "hash.cuh"

namespace ciera {

// What word number j adds to the sum.
CIERA_TILE u64 checksum_term(u64 word, u64 j) { return mix(word ^ ((j + 1) * kGamma)); }

}  // namespace ciera

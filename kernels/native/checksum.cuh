// The 64-bit checksum of a row of bytes: sum_j w_j * (2j + 1) mod 2**64 over its little-endian words, through mix.
// Reference: reference.checksum.
//
// Worked example: bytes 1, 2, 3, 4 are the one word 0x04030201, times 1; mixed, 0x6b26e77cd3e59b6a.
#pragma once
#include "hash.cuh"

namespace ciera {

// What word number j adds to the sum.
CIERA_TILE u64 checksum_term(u64 word, u64 j) { return word * (2 * j + 1); }

}  // namespace ciera

// What the host build's files share: host_planes.cpp, host_changes.cpp, host_bits.cpp.
//
// The host build is the fast path on CPU: the tile functions over tiles in memory, spread over OpenMP threads a piece at a
// time. It is compiled when the package is installed (setup.py) and called through ctypes (host.py).
//
// [Note: Clones] Work on one piece is a function of its own, with the attribute `target_clones`: the loader picks the form
// for the processor it runs on, so that a package built elsewhere runs everywhere. A loop with an OpenMP pragma cannot be
// cloned (its body is cut out before), hence the two layers. Test: test_host_build.py, every form against the reference.
#pragma once
#include <atomic>
#include <cstring>
#include <vector>

#include "changes.cuh"
#include "checksum.cuh"
#include "hash.cuh"
#include "planes.cuh"

// GCC knows these names of processors from version 12 on.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(CIERA_NO_CLONES)
#define CIERA_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CIERA_CLONES
#endif
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format and these loops are little-endian");
#define CIERA_API extern "C" __attribute__((visibility("default")))

namespace ciera {

constexpr i64 kPiece = 1 << 17;  // values a thread takes at a time: they fit a core's cache; reference.py's CHUNK_VALUES
constexpr int kHostTile = 512;   // values of the innermost loops, whose length the compiler knows

CIERA_TILE i64 least(i64 a, i64 b) { return a < b ? a : b; }
CIERA_TILE i64 packed_bytes(i64 num_values, int width_bits) { return (num_values * width_bits + 7) / 8; }

// work(number) for each number below `count`, spread over threads.
template <class Work>
void for_each(i64 count, int num_threads, const Work& work) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && count > 1) schedule(static)
  for (i64 number = 0; number < count; number++) work(number);
}

// work(piece, start, count) for each piece of the values.
template <class Work>
void for_pieces(i64 num_values, int num_threads, const Work& work) {
  for_each((num_values + kPiece - 1) / kPiece, num_threads, [&](i64 piece) {
    work(piece, piece * kPiece, least(num_values - piece * kPiece, kPiece));
  });
}

}  // namespace ciera

// The CUDA kernels: `make ptx` compiles them to ../ptx/, launch.py launches them, cuda.py says with what.
//
// Each has kThreads threads a CTA. blockIdx.x counts tiles, or blocks; blockIdx.y counts peers: cta.cuh. All counts and offsets
// into memory are 64-bit. Nothing here waits for another CTA: what a CTA must know of those before it comes from a sum between
// two launches, or from the sender.
#ifdef CIERA_SHIM
#include "shim.h"
#endif
#include "cuda_blocks.cuh"
#include "cuda_changes.cuh"
#include "cuda_heads.cuh"
#include "cuda_planes.cuh"
#include "cuda_symbols.cuh"

using namespace ciera;

#define CIERA_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)
// Six CTAs on an SM at once, so up to 40 registers: left alone, ptxas aims at eight and spills.
#define CIERA_LARGE_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, 6)

// The parameters of struct Payloads, and of struct SectionRoom.
#define CIERA_PAYLOADS                                                                                                  \
  const u8 *payloads, i64 payload_stride, i64 payload_bytes, i64 own, const int *row_ok, i64 table_at, i64 sections_at, \
      i64 first_section
#define CIERA_THE_PAYLOADS \
  Payloads { payloads, payload_stride, payload_bytes, own, row_ok, table_at, sections_at, first_section }
#define CIERA_ROOM                                                                                                    \
  u8 *arena, i64 capacity, const u64 *section_table, i64 num_sections, i64 arena_at, i64 sections_at, i64 first_section
#define CIERA_THE_ROOM \
  SectionRoom { arena, capacity, section_table, num_sections, arena_at, sections_at, first_section }

#define CIERA_SENDER_KERNELS(F, As, what)                                                                               \
  CIERA_KERNEL scan_##what##_##F(const F::Word* fresh, const As::Word* last, const Tile* tiles, i64 num_tiles,          \
                                 u32 escape, u8* bits, i64* counts) {                                                   \
    scan<F, As>(fresh, last, tiles, num_tiles, escape, bits, counts);                                                   \
  }                                                                                                                     \
  CIERA_LARGE_KERNEL pack_##what##_##F(const F::Word* fresh, const As::Word* last, const Tile* tiles, i64 num_tiles,    \
                                       u32 escape, const u8* bits, const i64* up_to, CIERA_ROOM) {                      \
    pack<F, As>(fresh, last, tiles, num_tiles, escape, bits, up_to, CIERA_THE_ROOM);                                    \
  }

#define CIERA_FORMAT_KERNELS(F)                                                                                         \
  CIERA_SENDER_KERNELS(F, F, values)                                                                                    \
  CIERA_SENDER_KERNELS(F, ciera::byte, exponents)                                                                       \
  CIERA_LARGE_KERNEL apply_values_##F(CIERA_PAYLOADS, const Tile* tiles, i64 num_tiles, i64 num_plane_values,           \
                                      u32 escape, F::Word* rows, i64 rows_stride, u32* damage) {                        \
    const i64 rank = rank_of_row(own);                                                                                  \
    if (!row_ok[rank]) return;                                                                                          \
    apply<F>(CIERA_THE_PAYLOADS, payloads + rank * payload_stride, tiles, num_tiles, num_plane_values, escape,          \
             rows + rank * rows_stride, damage);                                                                        \
  }                                                                                                                     \
  CIERA_LARGE_KERNEL split_##F(const F::Word* rows, i64 rows_stride, i64 own, const Tile* tiles, i64 num_tiles,         \
                               i64 num_plane_values, i64 num_state_values, u8* low, u8* top, u8* exponents,             \
                               i64 exponents_stride) {                                                                  \
    split<F>(rows + rank_of_row(own) * rows_stride, tiles, num_tiles, num_plane_values, num_state_values, low, top,     \
             exponents ? exponents + (i64)blockIdx.y * exponents_stride : 0);                                           \
  }                                                                                                                     \
  CIERA_KERNEL merge_rows_##F(const u8* exponents, i64 exponents_stride, const u8* payloads, i64 payload_stride,        \
                              i64 own, const int* row_ok, i64 low_at, i64 top_at, const Tile* tiles, F::Word* out,      \
                              i64 out_stride) {                                                                         \
    const i64 rank = rank_of_row(own);                                                                                  \
    if (!row_ok[rank]) return;                                                                                          \
    const u8* payload = payloads + rank * payload_stride;                                                               \
    merge<F>(exponents + (i64)blockIdx.y * exponents_stride, payload + low_at, payload + top_at, tiles,                 \
             out + rank * out_stride);                                                                                  \
  }                                                                                                                     \
  CIERA_KERNEL hash_blocks_##F(const F::Word* values, const Block* blocks, i64 num_blocks, i64 block_size,              \
                               const u64* last_hashes, u64* hashes, u8* changed) {                                      \
    hash<F>(values, blocks, num_blocks, block_size, last_hashes, hashes, changed);                                      \
  }                                                                                                                     \
  CIERA_LARGE_KERNEL pack_blocks_##F(const F::Word* values, const Block* blocks, i64 num_blocks, i64 block_size,        \
                                     const u8* changed, const i64* ranks, CIERA_ROOM) {                                 \
    pack_blocks<F>(values, blocks, num_blocks, block_size, changed, ranks, CIERA_THE_ROOM);                             \
  }                                                                                                                     \
  CIERA_KERNEL scan_symbols_##F(const F::Word* values, const Tile* tiles, u8* tops, i64* counts) {                      \
    scan_symbols<F>(values, tiles, tops, counts);                                                                       \
  }                                                                                                                     \
  CIERA_KERNEL pack_symbols_##F(const F::Word* values, const Tile* tiles, i64 num_tiles, const u8* tops,                \
                                const i64* up_to, CIERA_ROOM) {                                                         \
    pack_symbols<F>(values, tiles, num_tiles, tops, up_to, CIERA_THE_ROOM);                                             \
  }                                                                                                                     \
  CIERA_KERNEL put_nibbles_##F(const F::Word* values, const Tile* tiles, i64 num_tiles, i64 num_plane_values,           \
                               const u8* tops, u8* nibbles) {                                                           \
    put_nibbles<F>(values, tiles, num_tiles, num_plane_values, tops, nibbles);                                          \
  }                                                                                                                     \
  CIERA_LARGE_KERNEL merge_symbols_##F(CIERA_PAYLOADS, i64 low_at, i64 top_at, i64 nibbles_at, const Tile* tiles,       \
                                       i64 num_tiles, F::Word* out, i64 out_stride, u32* damage) {                      \
    const i64 rank = rank_of_row(own);                                                                                  \
    if (!row_ok[rank]) return;                                                                                          \
    const u8* payload = payloads + rank * payload_stride;                                                               \
    merge_symbols<F>(CIERA_THE_PAYLOADS, payload, payload + low_at, payload + top_at, payload + nibbles_at, tiles,      \
                     num_tiles, out + rank * out_stride, damage);                                                       \
  }

CIERA_FORMAT_KERNELS(bf16)
CIERA_FORMAT_KERNELS(fp16)
CIERA_FORMAT_KERNELS(fp32)

CIERA_LARGE_KERNEL apply_exponents(CIERA_PAYLOADS, const Tile* tiles, i64 num_tiles, i64 num_plane_values, u8* rows,
                                   i64 rows_stride, u32* damage) {
  const i64 rank = rank_of_row(own);
  if (!row_ok[rank]) return;
  apply<ciera::byte>(CIERA_THE_PAYLOADS, payloads + rank * payload_stride, tiles, num_tiles, num_plane_values, 0,
                     rows + (i64)blockIdx.y * rows_stride, damage);
}
CIERA_LARGE_KERNEL put_blocks(CIERA_PAYLOADS, i64 num_blocks, i64 block_size, u8* rows, i64 rows_stride, u32* damage) {
  const i64 rank = rank_of_row(own);
  if (!row_ok[rank]) return;
  ciera::put_blocks(CIERA_THE_PAYLOADS, payloads + rank * payload_stride, num_blocks, block_size,
                    rows + (i64)blockIdx.y * rows_stride, damage);
}

#define CIERA_COPY_OUT(name, Word)                                                                                      \
  CIERA_KERNEL name(const Word* rows, i64 rows_stride, i64 own, const Tile* tiles, Word* out, i64 out_stride) {         \
    const i64 rank = rank_of_row(own);                                                                                  \
    copy_out(rows + rank * rows_stride, tiles, out + rank * out_stride);                                                \
  }
CIERA_COPY_OUT(copy_out_16, u16)
CIERA_COPY_OUT(copy_out_32, u32)

CIERA_KERNEL write_head(u8* payload, u64 name, const u64* own_checksum, const u64* expected_checksum,
                        const u64* payload_bytes, u64 known_bytes) {
  ciera::write_head(payload, name, own_checksum, expected_checksum, payload_bytes, known_bytes);
}
CIERA_KERNEL check_heads(const u8* heads, i64 stride, i64 num_ranks, i64 own, u64 name, const u64* decoded_checksums,
                         int* row_ok, u32* damage) {
  ciera::check_heads(heads, stride, num_ranks, own, name, decoded_checksums, row_ok, damage);
}
CIERA_LARGE_KERNEL checksum(const u8* bytes, i64 stride, i64 num_bytes, u64* sums) {
  ciera::checksum(bytes, stride, num_bytes, sums);
}
// sums [rows] -> checksums, in place.
CIERA_KERNEL finish_checksums(u64* sums, i64 num_rows) {
  const i64 row = (i64)blockIdx.x * kThreads + threadIdx.x;
  if (row < num_rows) sums[row] = mix(sums[row]);
}

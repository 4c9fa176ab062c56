// What all tile functions share: integer types, float formats, vector loads and stores.
//
// One source, three builds:
//   nvcc          kernels.cu -> PTX, a thread handles a tile of kTile values that it holds in registers
//   g++           host_*.cpp -> the fast path on CPU, the same tile functions over longer tiles in memory
//   g++ with the tests' shim   kernels.cu again, one thread or fibre for each CUDA thread, under sanitizers
//
// Offsets into tensors are 64-bit everywhere. Pointers may have any alignment; vector accesses are used where it allows.
#pragma once

#if defined(__CUDACC__) || defined(CIERA_SHIM)
#define CIERA_TILE __host__ __device__ __forceinline__
#else
#define CIERA_TILE inline __attribute__((always_inline))
#endif

#ifdef __CUDA_ARCH__
#define CIERA_UNROLL _Pragma("unroll")
#else
#define CIERA_UNROLL
#endif

namespace ciera {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int kTile = 8;  // values a CUDA thread handles: 16 bytes of bf16, and whole bytes of every packed plane

// Formats: the bits of a value, rotated left by one so that the exponent is on top and the sign at the bottom.
//
//   name   Word  exponent  remainder = sign + mantissa
//   bf16   u16   8 bits    1 low byte
//   fp16   u16   5 bits    1 low byte and 3 top bits, which are packed in a plane of their own
//   fp32   u32   8 bits    3 low bytes
template <class W, int ExponentBits>
struct Format {
  typedef W Word;
  static constexpr int kBits = 8 * sizeof(W);
  static constexpr int kExponentBits = ExponentBits;
  static constexpr int kMantissaBits = kBits - 1 - ExponentBits;
  static constexpr int kTopBits = 8 - ExponentBits;
  static constexpr int kLowBytes = sizeof(W) - 1;
};
typedef Format<u16, 8> bf16;
typedef Format<u16, 5> fp16;
typedef Format<u32, 8> fp32;

// CUDA side: tiles in registers.
#if defined(__CUDACC__) || defined(CIERA_SHIM)

__device__ __forceinline__ bool is_aligned(const void* pointer, u32 num_bytes) {
  return ((u64)pointer & (num_bytes - 1)) == 0;
}

// `from` [at least `left`] -> `tile` [N], zeros behind the end. One or more vector loads where alignment allows.
template <int N, class T>
__device__ __forceinline__ void load_tile(T* tile, const T* __restrict__ from, i64 left) {
  constexpr int num_bytes = N * sizeof(T);
  if (left >= N && num_bytes % 16 == 0 && is_aligned(from, 16)) {
    const uint4* vectors = reinterpret_cast<const uint4*>(from);
    CIERA_UNROLL
    for (int i = 0; i < num_bytes / 16; i++) reinterpret_cast<uint4*>(tile)[i] = vectors[i];
  } else if (left >= N && num_bytes % 8 == 0 && is_aligned(from, 8)) {
    const uint2* vectors = reinterpret_cast<const uint2*>(from);
    CIERA_UNROLL
    for (int i = 0; i < num_bytes / 8; i++) reinterpret_cast<uint2*>(tile)[i] = vectors[i];
  } else {
    CIERA_UNROLL
    for (int i = 0; i < N; i++) tile[i] = i < left ? from[i] : T(0);
  }
}

// A plain store of a vector: nvcc takes it apart where another branch stores the same registers one by one.
template <class Vector>
__device__ __forceinline__ void store_vector(Vector* to, const Vector& value) {
#ifdef __CUDA_ARCH__
  __stwb(to, value);
#else
  *to = value;
#endif
}

// `tile` [N] -> `to`, the first `left` of them.
template <int N, class T>
__device__ __forceinline__ void store_tile(const T* tile, T* __restrict__ to, i64 left) {
  constexpr int num_bytes = N * sizeof(T);
  if (left >= N && num_bytes % 16 == 0 && is_aligned(to, 16)) {
    uint4* vectors = reinterpret_cast<uint4*>(to);
    CIERA_UNROLL
    for (int i = 0; i < num_bytes / 16; i++) store_vector(vectors + i, reinterpret_cast<const uint4*>(tile)[i]);
  } else if (left >= N && num_bytes % 8 == 0 && is_aligned(to, 8)) {
    uint2* vectors = reinterpret_cast<uint2*>(to);
    CIERA_UNROLL
    for (int i = 0; i < num_bytes / 8; i++) store_vector(vectors + i, reinterpret_cast<const uint2*>(tile)[i]);
  } else {
    CIERA_UNROLL
    for (int i = 0; i < N; i++)
      if (i < left) to[i] = tile[i];
  }
}

#endif

}  // namespace ciera

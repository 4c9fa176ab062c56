// What all builds share: integer types, float formats, vector loads and stores.
//
// One source, three builds:
//   nvcc          kernels.cu -> PTX, a thread handles an octet, eight consecutive values that it holds in registers
//   g++           host_*.cpp -> the fast path on CPU, the same functions over more values, in memory
//   g++ with the tests' shim   kernels.cu again, one thread or fibre for each CUDA thread, under sanitizers
//
// CIERA_TILE marks functions over as many consecutive values as their caller holds.
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
#define CIERA_NO_UNROLL _Pragma("unroll 1")
#else
#define CIERA_UNROLL
#define CIERA_NO_UNROLL
#endif

namespace ciera {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int kOctet = 8;  // values a CUDA thread handles: 16 bytes of bf16, and whole bytes of every packed plane

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

// CUDA side: values in registers.
#if defined(__CUDACC__) || defined(CIERA_SHIM)

__device__ __forceinline__ bool is_aligned(const void* pointer, u32 num_bytes) {
  return ((u64)pointer & (num_bytes - 1)) == 0;
}

// `from` [at least `left`] -> `values` [N], zeros behind the end. One or more vector loads where alignment allows.
template <int N, class T>
__device__ __forceinline__ void load_values(T* values, const T* __restrict__ from, i64 left) {
  constexpr int num_bytes = N * sizeof(T);
  if (left >= N && num_bytes % 16 == 0 && is_aligned(from, 16)) {
    const uint4* vectors = reinterpret_cast<const uint4*>(from);
    CIERA_UNROLL
    for (int i = 0; i < num_bytes / 16; i++) reinterpret_cast<uint4*>(values)[i] = vectors[i];
  } else if (left >= N && num_bytes % 8 == 0 && is_aligned(from, 8)) {
    const uint2* vectors = reinterpret_cast<const uint2*>(from);
    CIERA_UNROLL
    for (int i = 0; i < num_bytes / 8; i++) reinterpret_cast<uint2*>(values)[i] = vectors[i];
  } else {
    CIERA_UNROLL
    for (int i = 0; i < N; i++) values[i] = i < left ? from[i] : T(0);
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

// `values` [N] -> `to`, the first `left` of them.
template <int N, class T>
__device__ __forceinline__ void store_values(const T* values, T* __restrict__ to, i64 left) {
  constexpr int num_bytes = N * sizeof(T);
  if (left >= N && num_bytes % 16 == 0 && is_aligned(to, 16)) {
    uint4* vectors = reinterpret_cast<uint4*>(to);
    CIERA_UNROLL
    for (int i = 0; i < num_bytes / 16; i++) store_vector(vectors + i, reinterpret_cast<const uint4*>(values)[i]);
  } else if (left >= N && num_bytes % 8 == 0 && is_aligned(to, 8)) {
    uint2* vectors = reinterpret_cast<uint2*>(to);
    CIERA_UNROLL
    for (int i = 0; i < num_bytes / 8; i++) store_vector(vectors + i, reinterpret_cast<const uint2*>(values)[i]);
  } else {
    CIERA_UNROLL
    for (int i = 0; i < N; i++)
      if (i < left) to[i] = values[i];
  }
}

// The same of 8 bytes at a multiple of 8, all of which are there.
template <int N, class T>
__device__ __forceinline__ void load_aligned(T* values, const T* __restrict__ from) {
  static_assert(N * sizeof(T) == sizeof(uint2), "one vector");
  *reinterpret_cast<uint2*>(values) = *reinterpret_cast<const uint2*>(from);
}
template <int N, class T>
__device__ __forceinline__ void store_aligned(const T* values, T* __restrict__ to) {
  static_assert(N * sizeof(T) == sizeof(uint2), "one vector");
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(values);
}

#endif

}  // namespace ciera

// Brings tiles of an operand into shared memory in 16-byte chunks, swizzled so that no read of them meets a bank twice.
#pragma once

#include <type_traits>

#include "ptx/copy.cuh"

namespace moe {

// Where chunk `chunk` of row `row` of values T stands within its row of `kRowBytes`.
template <typename T, int kRowBytes>
__device__ __forceinline__ constexpr int swizzle(int row, int chunk) {
  if constexpr (kRowBytes == 64) return chunk ^ ((row >> 1) & 3);
  if constexpr (sizeof(T) == 4) return chunk;  // float32 is read along such rows, which meets every bank evenly
  return chunk ^ (row & 7);
}

// The address of row `row` of rows `row_bytes` apart.
__device__ __forceinline__ const char* row_address(const char* first, int row, uint32_t row_bytes) {
  return first + uint64_t(uint32_t(row)) * row_bytes;
}

// How the threads of a block share a staged tile of kTileRows x kWidth values: each brings one 16-byte chunk of kRows
// rows: first(), first() + kStride and so on.
template <typename T, int kTileRows, int kWidth, int kThreads>
struct Share {
  static constexpr int kRowBytes = kWidth * sizeof(T), kValues = 16 / sizeof(T), kChunks = kRowBytes / 16;
  static constexpr int kStride = kThreads / kChunks, kRows = kTileRows / kStride;
  static_assert(kStride % 8 == 0 || sizeof(T) == 4, "the swizzle repeats every eight rows");

  static __device__ __forceinline__ int chunk(unsigned thread = threadIdx.x) { return thread % kChunks; }
  static __device__ __forceinline__ int first(unsigned thread = threadIdx.x) { return thread / kChunks; }
  // Of this thread's first chunk, from the start of the tile.
  static __device__ __forceinline__ uint32_t offset() {
    return first() * kRowBytes + swizzle<T, kRowBytes>(first(), chunk()) * 16;
  }
  // How many of the chunk's values lie within the first `width` of the row.
  static __device__ __forceinline__ int valid(int width) { return min(max(width - chunk() * kValues, 0), kValues); }
};

// Brings this thread's row i of a tile: its `valid` first values from `from`, and zeros. `to` is the tile's start in shared
// memory plus offset(). kVector asks for a 16-byte aligned address, and all values or none.
template <typename Share, bool kVector>
__device__ __forceinline__ void load_chunk(uint32_t to, int i, const char* from, int valid) {
  to += i * Share::kStride * Share::kRowBytes;
  if constexpr (kVector) {
    ptx::copy_16_or_zero(to, from, valid > 0);
  } else {
    using Bits = std::conditional_t<Share::kValues == 4, uint32_t, uint16_t>;
    union {
      uint4 whole;
      Bits bits[Share::kValues];
    } packed;
#pragma unroll
    for (int j = 0; j < Share::kValues; ++j) {
      packed.bits[j] = j < valid ? reinterpret_cast<const Bits*>(from)[j] : Bits(0);
    }
    ptx::store_shared_16(to, packed.whole);
  }
}

template <int kValue>
struct Constant {
  __device__ constexpr operator int() const { return kValue; }
};

// Calls body with 0, 1, ... kCount - 1 as compile-time constants until it returns false.
template <int kCount, int kFrom = 0, typename Body>
__device__ __forceinline__ void unrolled(Body body) {
  if constexpr (kFrom < kCount) {
    if (body(Constant<kFrom>{})) unrolled<kCount, kFrom + 1>(body);
  }
}

}  // namespace moe

// Brings tiles of an operand into shared memory in 16-byte chunks, swizzled so that no read of them meets a bank twice.
#pragma once

#include <type_traits>

#include "ptx/copy.cuh"

namespace moe {

// Where chunk `chunk` of row `row` stands within its row of `kRowBytes`.
template <int kRowBytes>
__device__ __forceinline__ constexpr int swizzle(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128 || kRowBytes == 256 || kRowBytes == 512);
  if constexpr (kRowBytes == 64) return chunk ^ ((row >> 1) & 3);
  if constexpr (kRowBytes == 512) return chunk;  // float32 is read along such rows, which meets every bank evenly
  return chunk ^ (row & 7);
}

// The address of row `row` of rows `row_bytes` apart.
__device__ __forceinline__ const char* row_address(const char* first, int row, uint32_t row_bytes) {
  return first + uint64_t(uint32_t(row)) * row_bytes;
}

// How the threads of a block share a staged tile of kRows x kWidth values: each brings one 16-byte chunk of every
// kRowsAtOnce-th row, from row first() on.
template <typename T, int kRows_, int kWidth, int kThreads>
struct Share {
  using Value = T;
  static constexpr int kRows = kRows_, kRowBytes = kWidth * sizeof(T), kValues = 16 / sizeof(T);
  static constexpr int kChunks = kRowBytes / 16, kRowsAtOnce = kThreads / kChunks;
  static_assert(kRowsAtOnce % 8 == 0 || kRowBytes == 512, "the swizzle repeats every eight rows");

  static __device__ __forceinline__ int chunk() { return threadIdx.x % kChunks; }
  static __device__ __forceinline__ int first() { return threadIdx.x / kChunks; }
};

// Brings part `part` of kParts of a tile: row(i) is the address of this thread's chunk of row first() + i. The rows for
// which live(i) is false and the values at or past `width_left` become zeros and are not read. kVector asks for
// addresses, and a width_left within the tile, that are multiples of 16 bytes.
template <typename Share, bool kVector, int kParts, typename Row, typename Live>
__device__ __forceinline__ void load_tile(uint32_t shared, int part, int width_left, Row row, Live live) {
  constexpr int kValues = Share::kValues, kRows = Share::kRows / kParts;
  static_assert(kRows % Share::kRowsAtOnce == 0);
  const uint32_t target =
      shared + Share::first() * Share::kRowBytes + swizzle<Share::kRowBytes>(Share::first(), Share::chunk()) * 16;
  const int valid = min(max(width_left - Share::chunk() * kValues, 0), kValues);
#pragma unroll
  for (int n = 0; n < kRows; n += Share::kRowsAtOnce) {
    const int i = part * kRows + n;
    const char* from = row(i);
    const int count = live(i) ? valid : 0;
    if constexpr (kVector) {
      ptx::copy_16_or_zero(target + i * Share::kRowBytes, from, count > 0);
    } else {
      using Bits = std::conditional_t<kValues == 4, uint32_t, uint16_t>;
      union {
        uint4 whole;
        Bits bits[kValues];
      } packed;
#pragma unroll
      for (int j = 0; j < kValues; ++j) packed.bits[j] = j < count ? reinterpret_cast<const Bits*>(from)[j] : Bits(0);
      ptx::store_shared_16(target + i * Share::kRowBytes, packed.whole);
    }
  }
}

}  // namespace moe

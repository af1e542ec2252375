// Brings tiles of an operand into shared memory, so arranged there that neither the writes nor the reads meet a bank twice.
#pragma once

#include <type_traits>

#include "config.h"
#include "ptx/copy.cuh"

namespace moe {

// The address of row `row` of rows `row_bytes` apart.
__device__ __forceinline__ const char* row_address(const char* first, uint32_t row, uint32_t row_bytes) {
  return first + uint64_t(row) * row_bytes;
}

// How the threads of a block share a staged tile of kTileRows x kWidth values. A thread looks after kRows rows: first(),
// first() + kStride and so on. Of each it brings kValues values from value chunk() * kValues on, kLanes threads side by
// side, and kAcross times that.
template <typename T, int kTileRows, int kWidth, int kThreads, int kValues_, int kLanes_>
struct Share {
  static constexpr int kValues = kValues_, kLanes = kLanes_, kAcross = kWidth / (kLanes * kValues);
  static constexpr int kStride = kThreads / kLanes, kRows = kTileRows / kStride;

  static __device__ __forceinline__ int chunk(unsigned thread = threadIdx.x) { return thread % kLanes; }
  static __device__ __forceinline__ int first(unsigned thread = threadIdx.x) { return thread / kLanes; }
  // Of this thread's values, from the start of a row in memory.
  static __device__ __forceinline__ int bytes(unsigned thread = threadIdx.x) {
    return chunk(thread) * kValues * int(sizeof(T));
  }
  // How many values of a row of `width` are left from this thread's first one on.
  static __device__ __forceinline__ int left(int width) { return width - chunk() * kValues; }
};

// For ldmatrix: rows as they lie in memory, their 16-byte chunks swizzled.
template <int kRowBytes>
__device__ __forceinline__ constexpr int swizzle(int row, int chunk) {
  return chunk ^ (kRowBytes == 64 ? (row >> 1) & 3 : row & 7);
}

template <typename T, int kTileRows, int kWidth, int kThreads>
struct SwizzledShare : Share<T, kTileRows, kWidth, kThreads, 16 / sizeof(T), kWidth * sizeof(T) / 16> {
  static constexpr int kRowBytes = kWidth * sizeof(T);
  static_assert(SwizzledShare::kStride % 8 == 0, "the swizzle repeats every eight rows");

  // Of this thread's first chunk from the start of the tile, and from there to that of its row i.
  static __device__ __forceinline__ uint32_t offset() {
    return SwizzledShare::first() * kRowBytes + swizzle<kRowBytes>(SwizzledShare::first(), SwizzledShare::chunk()) * 16;
  }
  static __device__ constexpr int step(int i, int) { return i * SwizzledShare::kStride * kRowBytes; }
};

// For float32 products from registers: the summed dimension always lies across (kTileK rows of kTile values), so that
// operands that are contiguous along it are turned, a value at a time; the others move 16 bytes at once with kVector.
template <Major kMajor, int kTileK, int kThreads, bool kVector>
struct TurnedShare : Share<float, kMajor == Major::k ? kTile : kTileK, kMajor == Major::k ? kTileK : kTile, kThreads,
                           kMajor == Major::mn && kVector ? 4 : 1, kMajor == Major::k ? 8 : 32> {
  static constexpr int kAlongRow = kMajor == Major::k ? kFloatPitch * 4 : 4;
  static constexpr int kToNextRow = kMajor == Major::k ? 4 : kFloatPitch * 4;

  static __device__ __forceinline__ uint32_t offset() {
    return TurnedShare::chunk() * TurnedShare::kValues * kAlongRow + TurnedShare::first() * kToNextRow;
  }
  static __device__ constexpr int step(int i, int across) {
    return i * TurnedShare::kStride * kToNextRow + across * TurnedShare::kLanes * TurnedShare::kValues * kAlongRow;
  }
};

// Brings this thread's part of row i of a tile, zeros where no more than `left` values are left. `to` is the tile's start in
// shared memory plus offset(). kVector: chunks of 16 bytes are aligned, and no value or all of them are left. split: `left`
// counts in each half of a row, between which there are `gap` values in memory.
template <typename Share, bool kVector>
__device__ __forceinline__ void load_row(uint32_t to, int i, const char* from, int left, bool split = false, int gap = 0) {
#pragma unroll
  for (int across = 0; across < Share::kAcross; ++across) {
    const uint32_t at = to + Share::step(i, across);
    if constexpr (Share::kValues == 1) {
      const int value = across * Share::kLanes;
      const bool second = value >= kTile / 2;
      ptx::copy_4_or_zero(at, from + (value + (second ? gap : 0)) * int64_t(4), left > value - (second && split ? kTile / 2 : 0));
    } else if constexpr (kVector) {
      static_assert(Share::kAcross == 1);
      ptx::copy_16_or_zero(at, from, left > 0);
    } else {
      static_assert(Share::kAcross == 1 && Share::kValues == 8);
      union {
        uint4 whole;
        uint16_t value[8];
      } packed;
#pragma unroll
      for (int j = 0; j < 8; ++j) packed.value[j] = j < left ? reinterpret_cast<const uint16_t*>(from)[j] : uint16_t(0);
      ptx::store_shared_16(at, packed.whole);
    }
  }
}

template <auto kValue>
struct Constant {
  static constexpr auto value = kValue;
  __device__ constexpr operator decltype(kValue)() const { return kValue; }
};

template <int kLeft, int kRight>
__device__ constexpr Constant<kLeft + kRight> operator+(Constant<kLeft>, Constant<kRight>) {
  return {};
}

// Calls body with 0, 1, ... kCount - 1 until it returns false; as compile-time constants where kUnrolled.
template <int kCount, bool kUnrolled = true, int kFrom = 0, typename Body>
__device__ __forceinline__ void count(Body body) {
  if constexpr (!kUnrolled) {
#pragma unroll 1
    for (int i = 0; i < kCount && body(i); ++i) {
    }
  } else if constexpr (kFrom < kCount) {
    if (body(Constant<kFrom>{})) count<kCount, true, kFrom + 1>(body);
  }
}

}  // namespace moe

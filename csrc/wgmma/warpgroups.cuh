// What the Hopper kernels have in common: three warpgroups, of which the first brings operands into a ring of stages in shared
// memory and the other two multiply, 64 rows at a time, and how these hold their results.
#pragma once

#include "../config.h"
#include "../epilogue.cuh"
#include "../ptx/wgmma.cuh"

namespace moe::wgmma {

constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kRows = 64;   // of one multiplication, half of a tile
constexpr int kTileK = 64;  // 64 values are a row of 128 bytes, which are swizzled as one

// A place in the ring of stages; the parity flips each time around.
template <int kStages>
struct Turn {
  int slot = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ float2 unpack(uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Of each 64 rows of sums a thread holds pairs of columns of two rows, which are numbered from the top. Two neighbouring
// threads exchange pairs for a four each: four neighbouring columns of that row, from fours_column() + 16 j on.
__device__ __forceinline__ int fours_column(int lane) { return lane % 2 * 8 + lane % 4 / 2 * 4; }

// A row whose number is not known at compile time costs selections, but its code is there once.
template <int kHalves, int kSums>
__device__ __forceinline__ float sum_of(const float (&sums)[kHalves][kSums], int row, int n) {
  const float* last = sums[kHalves - 1];
  const float in_first = row % 2 ? sums[0][n + 2] : sums[0][n], in_last = row % 2 ? last[n + 2] : last[n];
  return row / 2 ? in_last : in_first;
}

template <int kHalves, int kSums>
__device__ __forceinline__ Four<float> exchange_for_four(const float (&sums)[kHalves][kSums], int row, int j, int lane) {
  const bool odd = lane % 2;
  Four<float> four;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float low = sum_of(sums, row, j * 8 + n), high = sum_of(sums, row, j * 8 + 4 + n);
    const float given = __shfl_xor_sync(~0u, odd ? low : high, 1);
    four.value[n] = odd ? given : low;
    four.value[n + 2] = odd ? high : given;
  }
  return four;
}

// Threads two apart exchange fours for eight neighbouring columns each, from lane % 4 * 8 + 32 j on.
template <int kSums>
__device__ __forceinline__ Eight<float> exchange_for_eight(const float (&sums)[2][kSums], int row, int j, int lane) {
  const bool upper = lane & 2;
  const Four<float> first = exchange_for_four(sums, row, 2 * j, lane), second = exchange_for_four(sums, row, 2 * j + 1, lane);
  Eight<float> eight;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float given = __shfl_xor_sync(~0u, upper ? first.value[n] : second.value[n], 2);
    eight.low.value[n] = upper ? given : first.value[n];
    eight.high.value[n] = upper ? second.value[n] : given;
  }
  return eight;
}

}  // namespace moe::wgmma

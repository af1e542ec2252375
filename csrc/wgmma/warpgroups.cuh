// What the Hopper kernels have in common: three warpgroups, of which the first brings operands into a ring of stages in shared
// memory and the other two multiply 64 rows each, and how these hold their results.
#pragma once

#include "../config.h"
#include "../ptx/wgmma.cuh"

namespace moe::wgmma {

constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kRows = kTile / kConsumers;  // of a consumer
constexpr int kTileK = 64, kStages = 4;    // 64 values are a row of 128 bytes, which are swizzled as one
// Of an SM's 64 K registers a thread of 384 gets 168 at first; bringing takes few of them, multiplying many.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// A place in the ring of stages; the parity flips each time around.
struct Turn {
  int slot = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

// Of 64 x kTileN accumulators a thread holds pairs of columns of two rows (i), eight rows apart. Two neighbouring threads
// change pairs for fours: then sums four_at(i, j, 0 ... 3) are neighbouring columns, from fours_column() + 16 j on.
__device__ __forceinline__ constexpr int four_at(int i, int j, int n) { return (2 * j + n / 2) * 4 + 2 * i + n % 2; }
__device__ __forceinline__ int fours_column(int lane) { return lane % 2 * 8 + lane % 4 / 2 * 4; }

template <int kSums>
__device__ __forceinline__ void make_fours(float (&sums)[kSums], int lane) {
  const bool odd = lane % 2;
#pragma unroll
  for (int j = 0; j < kSums / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float& low = sums[four_at(i, j, n)];
        float& high = sums[four_at(i, j, n + 2)];
        const float given = __shfl_xor_sync(~0u, odd ? low : high, 1);
        low = odd ? given : low;
        high = odd ? high : given;
      }
    }
  }
}

}  // namespace moe::wgmma

// How a stage of few rows becomes accumulators on the tensor cores: four warps, rows of W being the wide side of mma.sync.
#pragma once

#include "../config.h"
#include "../load.cuh"
#include "../ptx/mma.cuh"

namespace moe::mma {

// A warp has 16 columns of the output, and all of k where there are four times as many, else a quarter of each stage.
template <typename T, Major kMajor, bool kFine>
struct NarrowMultiply {
  using Value = T;
  static constexpr Major kMajorW = kMajor;
  static constexpr Config kConfig = kFine ? kFineGemm : kNarrowGemm;
  static constexpr int kThreads = 128, kWarps = kThreads / 32, kRows = kConfig.tile_rows, kEights = kRows / 8;
  static constexpr int kRowBytes = kConfig.tile_k * 2, kRowBytesW = kMajor == Major::k ? kRowBytes : kConfig.tile_columns * 2;
  static constexpr int kStep = 16, kSteps = kConfig.tile_k / kStep / (kFine ? kWarps : 1);
  static_assert(kConfig.tile_columns == (kFine ? 16 : 16 * kWarps) && (!kFine || kMajor == Major::k));

  float sums[kEights][4] = {};  // as mma leaves them

  __device__ __forceinline__ void stage(uint32_t w, uint32_t a, int rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int inside = lane % 8, low = lane / 8 % 2, high = lane / 16, first_column = kFine ? 0 : warp * 16;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = i + (kFine ? warp * kSteps : 0);
      uint32_t columns[4];  // 16 columns by 16 of k
      if constexpr (kMajor == Major::k) {
        const int chunk = swizzle<kRowBytesW>(inside, step * 2 + high);
        ptx::load_matrix(columns, w + (first_column + low * 8 + inside) * kRowBytesW + chunk * 16);
      } else {
        const int chunk = swizzle<kRowBytesW>(inside, first_column / 8 + low);
        ptx::load_matrix_transposed(columns, w + (step * kStep + high * 8 + inside) * kRowBytesW + chunk * 16);
      }
#pragma unroll
      for (int eight = 0; eight < kEights; eight += 2) {
        if (eight * 8 >= rows) break;
        uint32_t values[4];  // twice eight rows by 16 of k; the second eight are the first ones where there are no more
        const int row = (eight + (kEights > 1 ? high : 0)) * 8 + inside, chunk = swizzle<kRowBytes>(inside, step * 2 + low);
        ptx::load_matrix(values, a + row * kRowBytes + chunk * 16);
        ptx::mma_16x8x16<T>(sums[eight], columns, values[0], values[1]);
        if constexpr (kEights > 1) ptx::mma_16x8x16<T>(sums[eight + 1], columns, values[2], values[3]);
      }
    }
  }

  // Calls store with row, column and sum of staged_rows rows from `first` on, each by one thread; all threads together.
  template <typename Store>
  __device__ __forceinline__ void stage_rows(int first, float* scratch, Store store) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if constexpr (kFine) {
      // The quarters are added in their order.
      float* const own = scratch + kRows * kConfig.staged_pitch();
      constexpr int kSums = kRows * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) own[warp * kSums + (lane % 4 * 2 + i % 2) * 16 + i / 2 * 8 + lane / 4] = sums[0][i];
      __syncthreads();
      static_assert(kSums == kThreads);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += own[i * kSums + threadIdx.x];
      store(threadIdx.x / 16, threadIdx.x % 16, sum);
    } else {
#pragma unroll
      for (int eight = 0; eight < kConfig.staged_rows / 8; ++eight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          store(eight * 8 + lane % 4 * 2 + i % 2, warp * 16 + i / 2 * 8 + lane / 4, sums[first / 8 + eight][i]);
        }
      }
    }
  }
};

}  // namespace moe::mma

// How a stage of few rows becomes exact float32 accumulators: a thread has four columns of the output, and of each eight rows
// one; what eight threads of a row or four of a column read is the same, or lies in other banks.
#pragma once

#include "../config.h"
#include "../load.cuh"

namespace moe::simt {

template <Major kMajor>
struct NarrowMultiply {
  using Value = float;
  static constexpr Major kMajorW = kMajor;
  static constexpr Config kConfig = kNarrowFloatGemm;
  static constexpr int kThreads = 128, kEights = kConfig.tile_rows / 8;
  static constexpr int kRowBytes = kConfig.tile_k * 4, kRowBytesW = kMajor == Major::k ? kRowBytes : kConfig.tile_columns * 4;

  float sums[kEights][4] = {};

  static __device__ __forceinline__ int row(int eight) { return eight * 8 + threadIdx.x % 8; }
  static __device__ __forceinline__ int column(int i) {
    const int warp = threadIdx.x / 32, own = threadIdx.x % 32 / 8;
    return warp * 16 + (kMajor == Major::k ? i * 4 + own : own * 4 + i);
  }
  // Four neighbouring values of row `row` of a staged operand, the chunk-th such four.
  template <int kBytes>
  static __device__ __forceinline__ void load(float (&four)[4], uint32_t operand, int row, int chunk) {
    ptx::load_shared_16(four, operand + row * kBytes + swizzle<kBytes>(row, chunk) * 16);
  }

  __device__ __forceinline__ void stage(uint32_t w, uint32_t a, int rows) {
#pragma unroll 2
    for (int k = 0; k < kConfig.tile_k; k += 4) {
      float weights[4][4];  // of a column or, where these are contiguous, of a k
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load<kRowBytesW>(weights[i], w, kMajor == Major::k ? column(i) : k + i, (kMajor == Major::k ? k : column(0)) / 4);
      }
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        if (eight * 8 >= rows) break;
        float values[4];
        load<kRowBytes>(values, a, row(eight), k / 4);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[eight][i] = fmaf(values[n], kMajor == Major::k ? weights[i][n] : weights[n][i], sums[eight][i]);
          }
        }
      }
    }
  }

  // Calls store with row, column and sum of staged_rows rows from `first` on, each by one thread.
  template <typename Store>
  __device__ __forceinline__ void stage_rows(int first, float*, Store store) const {
#pragma unroll
    for (int eight = 0; eight < kConfig.staged_rows / 8; ++eight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) store(row(eight), column(i), sums[first / 8 + eight][i]);
    }
  }
};

}  // namespace moe::simt

// Exact float32: 128 threads of fused multiply-adds, an 8 x 16 block of the output each. The block is as large as the
// registers allow, because the adds can only be as fast as shared memory feeds them.
#pragma once

#include "../epilogue.cuh"
#include "../load.cuh"

namespace moe::simt {

// kA, kB: which dimension of a staged operand is contiguous.
template <Major kA, Major kB, int kTileK_, int kStages_, int kStagedRows_>
struct Multiply {
  using Value = float;
  static constexpr Major kMajorB = kB;
  static constexpr int kThreads = 128, kTileK = kTileK_, kStages = kStages_, kStagedRows = kStagedRows_, kParts = 1;
  static constexpr bool kTwoLoops = false;  // the instruction cache holds one
  static constexpr int kRows = 8, kColumns = 16, kRun = kB == Major::k ? 1 : 4;  // a thread's part of the output
  static constexpr int kRowBytes = kTileK * 4;    // of a staged operand with Major::k
  static constexpr int kColumnBytes = kTile * 4;   // of one with Major::mn

  // Warps lie 2 x 2 over the tile, 64 x 64 each, their lanes 8 x 4. A thread's rows and columns are spread over the
  // warp's so that neighbouring lanes read neighbouring 16-byte words of shared memory. Lanes that differ in bit 0 share
  // their columns and those that differ in bit 1 their rows: a 16-byte load then takes two passes and not four.
  const int lane_m = threadIdx.x % 32 / 8 * 2 + threadIdx.x % 2, lane_n = threadIdx.x / 2 % 4;
  const int warp_m = threadIdx.x / 64 * 64, warp_n = threadIdx.x / 32 % 2 * 64;
  const unsigned char *const a_slot, *const b_slot;  // the operands of stage slot 0
  const bool active;  // a warp whose whole block lies past the tile's rows or columns has nothing to add
  float sums[kRows][kColumns] = {};

  __device__ __forceinline__ Multiply(const unsigned char* a, const unsigned char* b, int rows, int columns)
      : a_slot(a), b_slot(b), active(warp_m < rows && warp_n < columns) {}

  __device__ __forceinline__ int row(int i) const {
    return warp_m + (kA == Major::k ? lane_m + 8 * i : i / 4 * 32 + lane_m * 4 + i % 4);
  }
  __device__ __forceinline__ int column(int j) const {
    return warp_n + (kB == Major::k ? lane_n + 4 * j : j / 4 * 16 + lane_n * 4 + j % 4);
  }

  __device__ __forceinline__ float& sum(int i, int j) { return sums[i][j]; }

  // Four values along k of row first + lane + kLanes * i; load.cuh's swizzle, split into what the lane and what the
  // unrolled loop knows.
  template <int kLanes>
  static __device__ __forceinline__ float4 k_word(const unsigned char* operand, int first, int lane, int i, int k) {
    static_assert(kRowBytes == 64);
    return *reinterpret_cast<const float4*>(operand + (first + lane) * kRowBytes + kLanes * i * kRowBytes +
                                            ((lane / 2 * 16) ^ (k * 4) ^ (kLanes * i / 2 % 4 * 16)));
  }
  static __device__ __forceinline__ float4 mn_word(const unsigned char* operand, int k, int column) {
    return *reinterpret_cast<const float4*>(operand + k * kColumnBytes + column * 4);
  }

  static __device__ __forceinline__ void store_weight(unsigned char* slot, int k, float value) {
    reinterpret_cast<float*>(slot)[k] = value;
  }

  template <bool kWeighted>
  struct Scale {};  // weights are read where they are needed

  template <bool kWeighted>
  __device__ __forceinline__ Scale<kWeighted> begin(const unsigned char*) {
    return {};
  }

  // Adds the products of the stage at `slot` bytes; row k of A is scaled by weight k of `weights` where kWeighted.
  // Calls refill, which starts the loads of a later stage, and after the last read of this stage advance, which waits for
  // the next. kAll: every warp is active.
  template <bool kAll, bool kWeighted, typename Refill, typename Advance>
  __device__ __forceinline__ void stage(int slot, int, Scale<kWeighted>, const unsigned char* weights, const unsigned char*,
                                        Refill refill, Advance advance) {
    refill(0);
    if (kAll || active) add(a_slot + slot, b_slot + slot, kWeighted ? reinterpret_cast<const float*>(weights) : nullptr);
    advance();
  }

  __device__ __forceinline__ void add(const unsigned char* a_stage, const unsigned char* b_stage, const float* weight) {
#pragma unroll 1  // one step's operands fill the registers
    for (int k = 0; k < kTileK; k += 4) {
      float a[4][kRows];
#pragma unroll
      for (int word = 0; word < kRows; ++word) {
        if constexpr (kA == Major::k) {
          const float4 four = k_word<8>(a_stage, warp_m, lane_m, word, k);
          a[0][word] = four.x, a[1][word] = four.y, a[2][word] = four.z, a[3][word] = four.w;
        } else {
          const int depth = word / 2, i = word % 2 * 4;
          const float scale = weight ? weight[k + depth] : 1.f;
          const float4 four = mn_word(a_stage, k + depth, row(i));
          a[depth][i] = scale * four.x, a[depth][i + 1] = scale * four.y;
          a[depth][i + 2] = scale * four.z, a[depth][i + 3] = scale * four.w;
        }
      }
#pragma unroll
      for (int word = 0; word < kColumns; ++word) {
        if constexpr (kB == Major::k) {
          const float4 four = k_word<4>(b_stage, warp_n, lane_n, word, k);
          const float b[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int depth = 0; depth < 4; ++depth) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) sums[i][word] = fmaf(a[depth][i], b[depth], sums[i][word]);
          }
        } else {
          const int depth = word / 4, first = word % 4 * 4;
          const float4 four = mn_word(b_stage, k + depth, column(first));
          const float b[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) sums[i][first + j] = fmaf(a[depth][i], b[j], sums[i][first + j]);
          }
        }
      }
    }
  }
};

}  // namespace moe::simt

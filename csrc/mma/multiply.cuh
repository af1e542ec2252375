// bf16 and fp16 on the tensor cores of every GPU since 8.0: four warps, a 64 x 64 block of the tile each, by mma.sync.
#pragma once

#include "../epilogue.cuh"
#include "../load.cuh"
#include "../ptx/mma.cuh"

namespace moe::mma {

// Scales packed pairs of values, with one rounding as if in float32.
template <typename T>
struct PairScale;

template <>
struct PairScale<__half> {
  float2 by;
  __device__ __forceinline__ explicit PairScale(float2 by) : by(by) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t pair) const {
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    const __half2 scaled = __floats2half2_rn(values.x * by.x, values.y * by.y);
    return *reinterpret_cast<const uint32_t*>(&scaled);
  }
};

// A bfloat16 has float32's range, so that a weight is the sum of two of them to 2^-17, and v * high + (v * low) in fused
// bfloat16 arithmetic rounds once: two instructions a pair instead of the five by way of float32.
template <>
struct PairScale<__nv_bfloat16> {
  __nv_bfloat162 high, low;
  __device__ __forceinline__ explicit PairScale(float2 by) {
    high = __float22bfloat162_rn(by);
    const float2 near = __bfloat1622float2(high);
    low = __float22bfloat162_rn(make_float2(by.x - near.x, by.y - near.y));
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t pair) const {
    const __nv_bfloat162 values = *reinterpret_cast<const __nv_bfloat162*>(&pair);
    const __nv_bfloat162 scaled = __hfma2(values, high, __hmul2(values, low));
    return *reinterpret_cast<const uint32_t*>(&scaled);
  }
};

// kA, kB: which dimension of a staged operand is contiguous.
template <typename T, Major kA, Major kB, int kTileK_, int kStages_>
struct Multiply {
  using Value = T;
  static constexpr Major kMajorB = kB;
  static constexpr int kThreads = 128, kTileK = kTileK_, kStages = kStages_;
  static constexpr int kBlock = 64, kStep = 16;  // a warp's block of the output; the depth of one mma

  const int lane = threadIdx.x % 32;
  const int warp_m = threadIdx.x / 64 * kBlock, warp_n = threadIdx.x / 32 % 2 * kBlock;
  const bool active;        // a warp whose whole block lies past the tile's rows or columns has nothing to add
  float sum[4][8][4] = {};  // 16 x 8 fragments, as mma leaves them

  __device__ __forceinline__ Multiply(int rows, int columns) : active(warp_m < rows && warp_n < columns) {}

  // Where this lane finds its rows of the 8 x 8 matrices of a 16 x 16 fragment: at base + (turn ^ step), load.cuh's
  // swizzle split into what the lane and what the unrolled loops know. Two bits of the lane pick one of the four
  // matrices, in the order (mn, k) for operand A and (k, mn) for B.
  struct Place {
    uint32_t base, turn;
  };
  template <Major kMajor, bool kIsA>
  __device__ __forceinline__ Place place(int warp) const {
    const int low = lane / 8 % 2, high = lane / 16, inside = lane % 8;
    const int mn = kIsA ? low : high, depth = kIsA ? high : low;
    if constexpr (kMajor == Major::k) {
      constexpr int kRowBytes = kTileK * 2;
      return {uint32_t(warp + 8 * mn + inside) * kRowBytes, uint32_t(swizzle<kRowBytes>(inside, depth)) * 16};
    } else {
      constexpr int kRowBytes = kTile * 2;
      return {uint32_t(8 * depth + inside) * kRowBytes + warp * 2, uint32_t(swizzle<kRowBytes>(inside, mn)) * 16};
    }
  }

  // Fragment i (16 of the output's rows or columns) at depth k.
  template <Major kMajor>
  static __device__ __forceinline__ void load_fragment(uint32_t (&fragment)[4], uint32_t operand, Place at, int i, int k) {
    if constexpr (kMajor == Major::k) {
      ptx::load_matrix(fragment, operand + at.base + (at.turn ^ (k * 2)) + i * 16 * kTileK * 2);
    } else {
      ptx::load_matrix_transposed(fragment, operand + at.base + (at.turn ^ (i * 32)) + k * kTile * 2);
    }
  }

  // The fragments of the step in hand. Those of the next are loaded while this one is multiplied: A's in place as each is
  // done with, B's beside, because every fragment of A meets all of them.
  uint32_t a[4][4], b[2][4][4];

  // The routing weights of a step's rows k, for those that this lane holds of A.
  struct Scale {
    PairScale<T> low, high;
    __device__ __forceinline__ Scale(const float* weight, int k, int lane)
        : low(*reinterpret_cast<const float2*>(weight + k + lane % 4 * 2)),
          high(*reinterpret_cast<const float2*>(weight + k + lane % 4 * 2 + 8)) {}
    __device__ __forceinline__ void apply(uint32_t (&fragment)[4]) const {
      fragment[0] = low(fragment[0]), fragment[1] = low(fragment[1]);
      fragment[2] = high(fragment[2]), fragment[3] = high(fragment[3]);
    }
  };

  // Loads the first step of the first stage.
  __device__ __forceinline__ void begin(const unsigned char* a_stage, const unsigned char* b_stage, const float* weight) {
    if (!active) return;
    const uint32_t a_operand = ptx::shared_address(a_stage), b_operand = ptx::shared_address(b_stage);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_fragment<kA>(a[i], a_operand, place<kA, true>(warp_m), i, 0);
      load_fragment<kB>(b[0][i], b_operand, place<kB, false>(warp_n), i, 0);
    }
    if (weight) Scale(weight, 0, lane).apply(a[0]);
  }

  // Adds the products of one stage; row k of A is scaled by weight[k] unless that is null. Calls refill, which starts the
  // loads of a later stage, and after the last read of this stage advance, which waits for the next: that one's first
  // step is loaded here too, so that the tensor cores do not wait between stages.
  template <typename Refill, typename Advance>
  __device__ __forceinline__ void stage(const unsigned char* a_stage, const unsigned char* b_stage, const float* weight,
                                        const unsigned char* a_next, const unsigned char* b_next, const float* next_weight,
                                        Refill refill, Advance advance) {
    constexpr int kSteps = kTileK / kStep;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool last = step + 1 == kSteps;
      const int now = step % 2, next = 1 - now, next_k = last ? 0 : (step + 1) * kStep;
      refill(step, std::integral_constant<int, kSteps>{});
      if (last) advance();
      if (!active) continue;
      const uint32_t a_operand = ptx::shared_address(last ? a_next : a_stage);
      const uint32_t b_operand = ptx::shared_address(last ? b_next : b_stage);
#pragma unroll
      for (int j = 0; j < 4; ++j) load_fragment<kB>(b[next][j], b_operand, place<kB, false>(warp_n), j, next_k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          ptx::mma_16x8x16<T>(sum[i][j], a[i], b[now][j / 2][j % 2 * 2], b[now][j / 2][j % 2 * 2 + 1]);
        }
        load_fragment<kA>(a[i], a_operand, place<kA, true>(warp_m), i, next_k);
        if (weight) {  // a fragment is scaled while the one before is multiplied
          if (i < 3) Scale(weight, step * kStep, lane).apply(a[i + 1]);
          if (i == 3) Scale(last ? next_weight : weight, next_k, lane).apply(a[0]);
        }
      }
    }
  }

  // Rows 64 * half to 64 * half + 63 of the tile.
  __device__ __forceinline__ void write_half(float* staged, int half) const {
    if (warp_m / kStagedRows != half) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float* to = staged + (16 * i + lane / 4) * kStagedPitch + warp_n + 8 * j + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sum[i][j][0], sum[i][j][1]);
        *reinterpret_cast<float2*>(to + 8 * kStagedPitch) = make_float2(sum[i][j][2], sum[i][j][3]);
      }
    }
  }
};

}  // namespace moe::mma

// bf16 and fp16 on the tensor cores of every GPU since 8.0: four warps, a 64 x 64 block of the tile each, by mma.sync.
#pragma once

#include "../epilogue.cuh"
#include "../load.cuh"
#include "../ptx/mma.cuh"

namespace moe::mma {

// Two neighbouring routing weights of a stage, and a packed pair of values multiplied by them with one rounding.
template <typename T>
struct PairScale;

template <>
struct PairScale<__half> {
  float2 by;
  __device__ __forceinline__ PairScale(const unsigned char* slot, int k) : by(reinterpret_cast<const float2*>(slot)[k / 2]) {}
  static __device__ __forceinline__ void store(unsigned char* slot, int k, float weight) {
    reinterpret_cast<float*>(slot)[k] = weight;
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t pair) const {
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    const __half2 scaled = __floats2half2_rn(values.x * by.x, values.y * by.y);
    return *reinterpret_cast<const uint32_t*>(&scaled);
  }
};

// A bfloat16 has float32's range, so that a weight is the sum of two of them to 2^-16, and v * high + (v * low) in fused
// bfloat16 arithmetic rounds once, but for values within 1/128 of a rounding step of a tie, which may fall to either side:
// two instructions a pair instead of five by way of float32. The low part has the sign of the high one and is not 0, so that
// an infinite value or weight gives an infinity.
template <>
struct PairScale<__nv_bfloat16> {
  struct alignas(8) Weights {
    __nv_bfloat162 high, low;
  } by;
  __device__ __forceinline__ PairScale(const unsigned char* slot, int k) : by(reinterpret_cast<const Weights*>(slot)[k / 2]) {}
  static __device__ __forceinline__ void store(unsigned char* slot, int k, float weight) {
    __nv_bfloat16* pair = reinterpret_cast<__nv_bfloat16*>(slot) + k / 2 * 4 + k % 2;
    const float below = __uint_as_float((__float_as_uint(weight) - (weight != 0.f)) & 0xffff0000u);
    pair[0] = __float2bfloat16_rn(below);
    pair[2] = __float2bfloat16_rn(weight - below);
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t pair) const {
    const __nv_bfloat162 values = *reinterpret_cast<const __nv_bfloat162*>(&pair);
    const __nv_bfloat162 scaled = __hfma2(values, by.high, __hmul2(values, by.low));
    return *reinterpret_cast<const uint32_t*>(&scaled);
  }
};

// The routing weights of the rows k that a lane holds of a step of A.
template <typename T, bool kWeighted>
struct Scale {
  PairScale<T> low, high;
  __device__ __forceinline__ Scale(const unsigned char* slot, int k, int lane)
      : low(slot, k + lane % 4 * 2), high(slot, k + lane % 4 * 2 + 8) {}
  __device__ __forceinline__ void apply(uint32_t (&fragment)[4]) const {
    fragment[0] = low(fragment[0]), fragment[1] = low(fragment[1]);
    fragment[2] = high(fragment[2]), fragment[3] = high(fragment[3]);
  }
};

template <typename T>
struct Scale<T, false> {
  __device__ __forceinline__ Scale(const unsigned char*, int, int) {}
  __device__ __forceinline__ void apply(uint32_t (&)[4]) const {}
};

// kA, kB: which dimension of a staged operand is contiguous.
template <typename T, Major kA, Major kB, int kTileK_, int kStages_, int kStagedRows_>
struct Multiply {
  using Value = T;
  static constexpr Major kMajorB = kB;
  static constexpr int kThreads = 128, kTileK = kTileK_, kStages = kStages_, kStagedRows = kStagedRows_;
  static constexpr bool kUnrolled = true, kWeighsFragments = true;
  template <Major kMajor, bool>
  using Operand = std::conditional_t<kMajor == Major::k, SwizzledShare<T, kTile, kTileK, kThreads>,
                                     SwizzledShare<T, kTileK, kTile, kThreads>>;
  static constexpr int kBlock = 64, kStep = 16;  // a warp's block of the output; the depth of one mma
  static constexpr int kParts = kTileK / kStep;

  const int lane = threadIdx.x % 32;
  const int warp_m = threadIdx.x / 64 * kBlock, warp_n = threadIdx.x / 32 % 2 * kBlock;
  float sums[4][8][4] = {};  // 16 x 8 fragments, as mma leaves them

  // Where this lane finds its rows of the four 8 x 8 matrices of a 16 x 16 fragment, in stage slot 0. The swizzle (load.cuh)
  // turns with k where the operand lies along k (Major::k), with the fragment where it lies across: an address for
  // each of these; all else is a constant distance.
  static constexpr int kTurnsA = kA == Major::k ? kParts : 4, kTurnsB = kB == Major::k ? kParts : 4;
  uint32_t a_at[kTurnsA], b_at[kTurnsB];

  __device__ __forceinline__ Multiply(const unsigned char* a, const unsigned char* b) {
    // Two bits of the lane pick one of the four matrices, in the order (mn, k) for operand A and (k, mn) for B.
    const int low = lane / 8 % 2, high = lane / 16;
    place<kA>(a_at, a, warp_m, low, high);
    place<kB>(b_at, b, warp_n, high, low);
  }

  template <Major kMajor, int kTurns>
  __device__ __forceinline__ void place(uint32_t (&at)[kTurns], const unsigned char* operand, int warp, int mn, int k) const {
    constexpr int kRowBytes = (kMajor == Major::k ? kTileK : kTile) * 2;
    const int inside = lane % 8;
    const uint32_t base = ptx::shared_address(operand) + (kMajor == Major::k ? (warp + 8 * mn + inside) * kRowBytes
                                                                             : (8 * k + inside) * kRowBytes + warp * 2);
    const uint32_t turn = swizzle<kRowBytes>(inside, kMajor == Major::k ? k : mn) * 16;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) at[i] = ptx::keep(base + (turn ^ (i * 32)));
  }

  // Fragment i (16 of the output's rows or columns) of step `step` of the stage at `slot` bytes.
  template <Major kMajor, int kTurns>
  static __device__ __forceinline__ void load_fragment(uint32_t (&fragment)[4], const uint32_t (&at)[kTurns], int slot, int i,
                                                       int step) {
    if constexpr (kMajor == Major::k) {
      ptx::load_matrix(fragment, at[step] + slot + i * 16 * kTileK * 2);
    } else {
      ptx::load_matrix_transposed(fragment, at[i] + slot + step * kStep * kTile * 2);
    }
  }

  // Whether this warp's block reaches into a tile of so many rows and columns; kWhole: into one as large as any.
  template <bool kWhole>
  __device__ __forceinline__ auto work(int rows, int columns) const {
    if constexpr (kWhole) return Constant<true>{};
    else return warp_m < rows && warp_n < columns;
  }

  // The fragments of the step in hand. Those of the next are loaded while this one is multiplied: A's in place as each is
  // done with, B's beside, because every fragment of A meets all of them.
  uint32_t a[4][4], b[2][4][4];

  static __device__ __forceinline__ void store_weight(unsigned char* slot, int k, float value) {
    PairScale<T>::store(slot, k, value);
  }

  // Loads the first step of the first stage, and returns the weights of its rows.
  template <bool kWeighted>
  __device__ __forceinline__ Scale<T, kWeighted> begin(const unsigned char* weights) {
    const Scale<T, kWeighted> scale(weights, 0, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_fragment<kA>(a[i], a_at, 0, i, 0);
      load_fragment<kB>(b[0][i], b_at, 0, i, 0);
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) scale.apply(a[i]);
    return scale;
  }

  // Adds the products of the stage at `slot` bytes. Where A's rows k are weighted, `scale` is that of the step in hand, and
  // `weights` and `next_weights` are this stage's and the next one's.
  // Calls refill, which starts the loads of a later stage part by part, and after the last read of this stage advance,
  // which waits for the next: that one's first step is loaded here too, so that the tensor cores do not wait between stages.
  template <bool kWeighted, typename Work, typename Refill, typename Advance>
  __device__ __forceinline__ void stage(Work work, int slot, int next_slot, Scale<T, kWeighted>& scale,
                                        const unsigned char* weights, const unsigned char* next_weights, Refill refill,
                                        Advance advance) {
#pragma unroll
    for (int step = 0; step < kParts; ++step) {
      const bool last = step + 1 == kParts;
      const int now = step % 2, next = 1 - now, next_step = last ? 0 : step + 1;
      refill(step);
      if (last) advance();
      if (!work) continue;
      const Scale<T, kWeighted> next_scale(last ? next_weights : weights, next_step * kStep, lane);
#pragma unroll
      for (int j = 0; j < 4; ++j) load_fragment<kB>(b[next][j], b_at, last ? next_slot : slot, j, next_step);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          ptx::mma_16x8x16<T>(sums[i][j], a[i], b[now][j / 2][j % 2 * 2], b[now][j / 2][j % 2 * 2 + 1]);
        }
        load_fragment<kA>(a[i], a_at, last ? next_slot : slot, i, next_step);
        // A fragment is scaled one behind its load; the last one's turn comes in the next step.
        i == 0 ? scale.apply(a[3]) : next_scale.apply(a[i - 1]);
      }
      scale = next_scale;
    }
  }

  // Where the sums lie (epilogue.cuh).
  static constexpr int kRows = 8, kColumns = 16;
  static constexpr bool kPairs = true;
  __device__ __forceinline__ int row(int i) const { return warp_m + 8 * i + lane / 4; }
  __device__ __forceinline__ int column(int j) const { return warp_n + j / 2 * 8 + lane % 4 * 2 + j % 2; }
  __device__ __forceinline__ float& sum(int i, int j) { return sums[i / 2][j / 2][i % 2 * 2 + j % 2]; }
};

}  // namespace moe::mma

// Exact float32: 128 threads of fused multiply-adds, an 8 x 16 block of the output each, as large as the registers allow.
//
// A scheduler reads two registers a cycle, one of even and one of odd number, and a product needs at least two: its sum and
// an operand that the product before did not have. So the speed is decided by how ptxas lays the registers out. It finds a
// good way where the products of a depth wind through the block, each sharing an operand with the one before, and where
// nothing ties sums to each other. Words along k would put both operands of a depth into the same half (docs/design.md).
#pragma once

#include "../epilogue.cuh"
#include "../load.cuh"

namespace moe::simt {

// kMajorB: which dimension of B is contiguous in memory; in shared memory the summed one always lies across (load.cuh).
template <Major kMajorB_, int kTileK_, int kStages_, int kStagedRows_>
struct Multiply {
  using Value = float;
  static constexpr Major kMajorB = kMajorB_;
  static constexpr int kThreads = 128, kTileK = kTileK_, kStages = kStages_, kStagedRows = kStagedRows_, kParts = 1;
  static constexpr bool kUnrolled = false, kWeighsFragments = false;
  template <Major kMajor, bool kVector>
  using Operand = TurnedShare<kMajor, kTileK, kThreads, kVector>;

  // Where the sums lie (epilogue.cuh). Warps are 2 x 2 over the tile: 64 columns each, and 32 rows of its first half and 32 of
  // its second, so that a tile of at most 64 rows is half the work of each. Their lanes are 8 x 4, and a lane has groups of
  // four rows and columns, so that neighbouring lanes read neighbouring 16-byte words. Lanes that differ in bit 0 share their
  // columns and those that differ in bit 1 their rows: a load then takes two passes and not four.
  static constexpr int kRows = 8, kColumns = 16;
  static constexpr bool kPairs = false;
  const int lane_m = threadIdx.x % 32 / 8 * 2 + threadIdx.x % 2, lane_n = threadIdx.x / 2 % 4;
  const int warp_m = threadIdx.x / 64 * 32, warp_n = threadIdx.x / 32 % 2 * 64;
  __device__ __forceinline__ int row(int i) const { return warp_m + i / 4 * 64 + lane_m * 4 + i % 4; }
  __device__ __forceinline__ int column(int j) const { return warp_n + j / 4 * 16 + lane_n * 4 + j % 4; }
  __device__ __forceinline__ float& sum(int i, int j) { return sums[i][j]; }
  float sums[kRows][kColumns] = {};

  const uint32_t a_slot, b_slot;  // this lane's first values of depth 0 of stage slot 0

  __device__ __forceinline__ Multiply(const unsigned char* a, const unsigned char* b)
      : a_slot(ptx::shared_address(a) + row(0) * 4), b_slot(ptx::shared_address(b) + column(0) * 4) {}

  // How many of its two halves this warp has to multiply in a tile of so many rows and columns.
  template <bool>
  __device__ __forceinline__ int work(int rows, int columns) const { return warp_n >= columns ? 0 : rows > kTile / 2 ? 2 : 1; }

  // The values of the depth in hand, and of the next.
  float a[2][kRows], b[2][kColumns];

  __device__ __forceinline__ void load(int to, int slot, int depth) {
    const int at = slot + depth * kFloatPitch * 4;
#pragma unroll
    for (int i = 0; i < kRows; i += 4) ptx::load_shared_16(&a[to][i], a_slot + at + i * 16 * 4);
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) ptx::load_shared_16(&b[to][j], b_slot + at + j * 4 * 4);
  }

  static __device__ __forceinline__ void store_weight(unsigned char* slot, int k, float value) {
    reinterpret_cast<float*>(slot)[k] = value;
  }
  // Weighs the rows of a staged operand that this thread brought itself, in place; `own` is the stage's start plus offset().
  // (Products of weighted values in registers would get registers that cost a fifth of the rate.)
  template <typename Share>
  static __device__ __forceinline__ void weigh_own(unsigned char* own, const unsigned char* weights) {
#pragma unroll
    for (int i = 0; i < Share::kRows; ++i) {
      const float weight = reinterpret_cast<const float*>(weights)[Share::first() + i * Share::kStride];
#pragma unroll
      for (int across = 0; across < Share::kAcross; ++across) {
        struct alignas(4 * Share::kValues) Chunk {
          float value[Share::kValues];
        };
        Chunk& chunk = *reinterpret_cast<Chunk*>(own + Share::step(i, across));
        Chunk weighted = chunk;
#pragma unroll
        for (float& value : weighted.value) value *= weight;
        chunk = weighted;
      }
    }
  }
  struct Scale {};

  // Loads the first depth of the first stage.
  template <bool>
  __device__ __forceinline__ Scale begin(const unsigned char*) {
    load(0, 0, 0);
    return {};
  }

  // Adds the products of the stage at `slot` bytes. Calls refill, which starts the loads of a later stage, and after the last
  // read of this stage advance, which waits for the next: that one's first depth is loaded here too.
  template <typename Refill, typename Advance>
  __device__ __forceinline__ void stage(int work, int slot, int next_slot, Scale, const unsigned char*, const unsigned char*,
                                        Refill refill, Advance advance) {
    refill(0);
    if (work == 2) {
      add<kRows>(slot, next_slot, advance);
    } else if (work == 1) {
      add<kRows / 2>(slot, next_slot, advance);
    } else {
      advance();
    }
  }

  template <int kLiveRows, typename Advance>
  __device__ __forceinline__ void add(int slot, int next_slot, Advance advance) {
    constexpr int kTogether = 4;  // of the depths; all of them would not fit the instruction cache
#pragma unroll 1
    for (int k = 0; k < kTileK - kTogether; k += kTogether) {
#pragma unroll
      for (int depth = 0; depth < kTogether; ++depth) {
        load((depth + 1) % 2, slot, k + depth + 1);
        add_depth<kLiveRows>(depth % 2);
      }
    }
#pragma unroll
    for (int depth = 0; depth < kTogether; ++depth) {
      const bool last = depth + 1 == kTogether;
      if (last) advance();
      load((depth + 1) % 2, last ? next_slot : slot, last ? 0 : kTileK - kTogether + depth + 1);
      add_depth<kLiveRows>(depth % 2);
    }
  }

  template <int kLiveRows>
  __device__ __forceinline__ void add_depth(int now) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int along = 0; along < kLiveRows; ++along) {
        const int i = j % 2 ? kLiveRows - 1 - along : along;
        sums[i][j] = fmaf(a[now][i], b[now][j], sums[i][j]);
      }
    }
  }
};

}  // namespace moe::simt

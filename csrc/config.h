// The kernels there are, and the rule that picks one: the first of its path whose blocks fit the GPU's shared memory.
#pragma once

#include "problem.h"

namespace moe {

enum class Op { gemm, weight_grad };
enum class Path { fp32, mma, wgmma };

// How many pieces of `size` it takes; in unsigned arithmetic, for rounding up passes 2^31 where the extent comes near it.
__host__ __device__ constexpr int pieces(unsigned extent, unsigned size) { return int((extent + size - 1) / size); }

// Output tiles are 128 x 128 on every portable path; a row dot has one partial sum a tile column.
constexpr int kTile = 128;
constexpr int kFloatPitch = kTile + 4;  // of a row of a staged float32 operand; the 4 spread rows over the banks

struct Config {
  Op op;
  Path path;
  int tile_k;
  int stages;
  int staged_rows;  // of results that are written at a time
  bool vectorized;  // moves 16 bytes at once: rows and pointers must be 16-byte aligned
  int blocks_per_sm = 2;

  __host__ __device__ constexpr int operand_bytes() const { return tile_k * (path == Path::fp32 ? kFloatPitch * 4 : kTile * 2); }
  __host__ __device__ constexpr int stage_bytes() const { return 2 * operand_bytes(); }

  // Shared memory: the stages, over all of which but the first (it is loaded for the next tile meanwhile) results are staged
  // with two words for each of the tile's rows; behind them, what the loop knows of rows (gemm.cuh, weight_grad.cuh).
  __host__ __device__ constexpr int staged_at() const { return stage_bytes(); }
  __host__ __device__ constexpr int staged_pitch() const { return kTile + (path == Path::fp32 ? 4 : 8); }  // for the banks
  __host__ __device__ constexpr int row_words_at() const { return staged_at() + staged_rows * staged_pitch() * 4; }
  __host__ __device__ constexpr int tables_at() const {
    const int results_end = row_words_at() + 2 * kTile * 4, stages_end = stages * stage_bytes();
    return results_end > stages_end ? results_end : stages_end;
  }
  __host__ __device__ constexpr int table_bytes() const {
    return op == Op::gemm ? 2 * 16 + kTile * 4 : 48 + (2 * stages + 1) * tile_k * 4;
  }
  __host__ __device__ constexpr int shared_bytes() const { return tables_at() + table_bytes(); }
};

constexpr Config kConfigs[] = {
    {Op::gemm, Path::fp32, 16, 2, 32, true},        {Op::gemm, Path::fp32, 16, 2, 32, false},
    {Op::gemm, Path::mma, 64, 3, 128, true},        {Op::gemm, Path::mma, 32, 3, 32, true},
    {Op::gemm, Path::mma, 32, 3, 32, false},        {Op::weight_grad, Path::fp32, 16, 2, 32, true},
    {Op::weight_grad, Path::fp32, 16, 2, 32, false}, {Op::weight_grad, Path::mma, 64, 3, 128, true},
    {Op::weight_grad, Path::mma, 32, 3, 32, true},  {Op::weight_grad, Path::mma, 32, 3, 32, false},
};
constexpr int kConfigCount = sizeof(kConfigs) / sizeof(kConfigs[0]);

// Shared memory of a GPU in bytes: what one block may ask for, what an SM has, what the driver keeps of each block.
struct SharedMemory {
  int per_block, per_sm, reserved;
};

constexpr bool fits(const Config& config, const SharedMemory& memory) {
  return config.shared_bytes() <= memory.per_block &&
         config.blocks_per_sm * (config.shared_bytes() + memory.reserved) <= memory.per_sm;
}

// `forced` is an index into kConfigs, or -1; it counts only where it can serve the call.
constexpr int pick_config(Op op, DType type, bool aligned, const SharedMemory& memory, int forced) {
  const Path path = type == DType::float32 ? Path::fp32 : Path::mma;
  for (int pass = forced < 0; pass < 2; ++pass) {
    for (int i = 0; i < kConfigCount; ++i) {
      const Config& config = kConfigs[i];
      const bool serves = config.op == op && config.path == path && (aligned || !config.vectorized);
      if (serves && (pass == 0 ? i == forced : fits(config, memory))) return i;
    }
  }
  return -1;
}

}  // namespace moe

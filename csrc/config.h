// The kernels there are, and the rule that picks one: of those that serve a call and whose blocks fit the GPU's shared memory the
// first one with tiles of as many rows as the call had best have, or else of more.
#pragma once

#include "problem.h"

namespace moe {

enum class Op { gemm, weight_grad };
enum class Path { fp32, mma, wgmma };

// How many pieces of `size` it takes; in unsigned arithmetic, for rounding up passes 2^31 where the extent comes near it.
__host__ __device__ constexpr int pieces(unsigned extent, unsigned size) { return int((extent + size - 1) / size); }

// Output tiles have 128 rows, and as many columns but for wgmma; a row dot has one partial sum a tile. Narrow ones, for few rows
// an expert, have fewer.
constexpr int kTile = 128;
// At most, which narrow tiles find their way among in 16 bits and in what four blocks leave of shared memory. Of so many experts
// fewer rows are few.
constexpr int kNarrowExperts = 512, kNarrowRows = 65535;
constexpr int kFewRows = 128;  // that they sort by themselves, a thread each
constexpr int kFloatPitch = kTile + 4;  // of a row of a staged float32 operand; the 4 spread rows over the banks

struct Config {
  Op op;
  Path path;
  int tile_k;
  int stages;
  int staged_rows;  // of results that are written at a time
  bool vectorized;  // moves 16 bytes at once: rows and pointers must be 16-byte aligned
  int blocks_per_sm = 2;
  int tile_columns = kTile;
  int tile_rows = kTile;

  __host__ __device__ constexpr bool narrow() const { return tile_rows < kTile; }

  // How many blocks take neighbouring row tiles together.
  __host__ __device__ constexpr int cluster() const { return path == Path::wgmma && op == Op::gemm ? 2 : 1; }

  // Tiles of up to so many rows are half the work, and taken first and in pairs, which makes the last round of tiles as short
  // as it may be. On tensor cores the weights that they read a second time would cost more.
  __host__ __device__ constexpr int short_rows() const { return path == Path::fp32 ? kTile / 2 : 0; }

  __host__ __device__ constexpr int operand_bytes() const {
    return tile_k * (path == Path::fp32 ? kFloatPitch * 4 : kTile * 2);
  }
  __host__ __device__ constexpr int stage_bytes() const {
    if (narrow()) return (tile_rows + tile_columns) * tile_k * (path == Path::fp32 ? 4 : 2);
    return operand_bytes() / kTile * (kTile + tile_columns);
  }

  // Shared memory: the stages, over all of which but the first (it is loaded for the next tile meanwhile) results are staged
  // with two words for each of the tile's rows; behind them, what the loop knows of rows (gemm.cuh, weight_grad.cuh).
  // A narrow tile's results have room of their own.
  __host__ __device__ constexpr int staged_at() const { return narrow() ? stages * stage_bytes() : stage_bytes(); }
  __host__ __device__ constexpr int staged_pitch() const {  // for the banks
    return tile_columns + (path == Path::fp32 || narrow() ? 4 : 8);
  }
  __host__ __device__ constexpr int row_words_at() const { return staged_at() + staged_rows * staged_pitch() * 4; }
  __host__ __device__ constexpr int tables_at() const {
    // On wgmma room of 3 KB for each of eight warps; a weight gradient's four boxes of 8 KB of results.
    if (path == Path::wgmma) return stages * stage_bytes() + (op == Op::gemm ? 8 * 4 * tile_columns * 4 : 4 * 8192);
    if (narrow()) return staged_at() + (tile_columns < 64 ? 5 : 1) * staged_rows * staged_pitch() * 4;
    const int results_end = row_words_at() + 2 * kTile * 4, stages_end = stages * stage_bytes();
    return results_end > stages_end ? results_end : stages_end;
  }
  __host__ __device__ constexpr int table_bytes() const {
    // On wgmma what the producer tells of a tile, then the barriers.
    if (path == Path::wgmma) {
      return (op == Op::gemm ? 2 * (36 + kTile * 8 + 16) : 32 + stages * tile_k * 4 + 16) + 2 * stages * 8;
    }
    if (narrow()) return (stages + 1) * (16 + tile_rows * 4) + 4 * (kNarrowExperts + 2) + tile_rows * 4;
    return op == Op::gemm ? 2 * 16 + kTile * 4 + 16 : 48 + (2 * stages + 1) * tile_k * 4;
  }
  __host__ __device__ constexpr int shared_bytes() const { return tables_at() + table_bytes(); }
};

// For few rows an expert, and for fewer (rows_of_tile in schedule.cuh).
constexpr Config kNarrowGemm{Op::gemm, Path::mma, 64, 4, 16, true, 4, 64, 32};
constexpr Config kFineGemm{Op::gemm, Path::mma, 128, 8, 8, true, 4, 16, 8};
constexpr Config kNarrowFloatGemm{Op::gemm, Path::fp32, 64, 3, 16, true, 2, 64, 32};

// Laid out by the Hopper kernels themselves, of which there is one form each.
constexpr Config kHopperGemm{Op::gemm, Path::wgmma, 64, 5, 0, true, 1, 192};
constexpr Config kHopperWeightGrad{Op::weight_grad, Path::wgmma, 64, 4, 0, true, 1, 256};

// Hopper's tiles are narrower where halves of columns that are contiguous along n are brought by boxes of 64, and where rows
// pass through an activation's gradient, which wants registers of its own.
constexpr int tile_columns(const Config& config, Through through, Major w_major) {
  const bool narrow = through == Through::activation_grad || (through == Through::activation && w_major == Major::mn);
  return config.path == Path::wgmma && narrow ? 128 : config.tile_columns;
}

constexpr Config kConfigs[] = {
    kHopperGemm,
    {Op::gemm, Path::fp32, 16, 2, 32, true},
    {Op::gemm, Path::fp32, 16, 2, 32, false},
    {Op::gemm, Path::mma, 64, 3, 128, true},
    {Op::gemm, Path::mma, 32, 3, 32, true},
    {Op::gemm, Path::mma, 32, 3, 32, false},
    kNarrowFloatGemm,
    kNarrowGemm,
    kFineGemm,
    kHopperWeightGrad,
    {Op::weight_grad, Path::fp32, 16, 2, 32, true},
    {Op::weight_grad, Path::fp32, 16, 2, 32, false},
    {Op::weight_grad, Path::mma, 64, 3, 128, true},
    {Op::weight_grad, Path::mma, 32, 3, 32, true},
    {Op::weight_grad, Path::mma, 32, 3, 32, false},
};
constexpr int kConfigCount = sizeof(kConfigs) / sizeof(kConfigs[0]);

// What of a GPU decides which kernels it may run: its compute capability (90 for 9.0), and its shared memory in bytes: what
// one block may ask for, what an SM has, what the driver keeps of each block.
struct Gpu {
  int capability, shared_per_block, shared_per_sm, shared_reserved;
};

// How many blocks an SM has room for, of those that there should be.
constexpr int blocks_on(const Config& config, const Gpu& gpu) {
  const int room = gpu.shared_per_sm / (config.shared_bytes() + gpu.shared_reserved);
  return config.shared_bytes() > gpu.shared_per_block ? 0 : room < config.blocks_per_sm ? room : config.blocks_per_sm;
}

// Two blocks of a wide tile write in turn, and one alone would wait for itself; narrow tiles do with one.
constexpr bool runs_on(const Config& config, const Gpu& gpu) {
  return (config.path != Path::wgmma || gpu.capability / 10 == 9) &&
         blocks_on(config, gpu) >= (config.narrow() ? 1 : config.blocks_per_sm);
}

// What of a call decides which kernels may serve it. aligned: 16 bytes of its operands may be moved at once; boxed: of all
// its matrices, and the copy engine can bring the operands. plain: no more than weights, a bias and an activation are asked
// for, of few enough experts and rows; along_k: W is contiguous in k. tile_rows: how many rows a tile had best have, of a
// product one of those that there are, 8, 32 or 128.
struct Call {
  Op op;
  DType type;
  bool aligned, boxed;
  bool plain = false, along_k = false;
  int tile_rows = kTile;
};

constexpr bool serves(const Config& config, const Call& call) {
  return config.op == call.op && (config.path == Path::fp32) == (call.type == DType::float32) &&
         (call.aligned || !config.vectorized) && (call.boxed || config.path != Path::wgmma) && (call.plain || !config.narrow()) &&
         (call.along_k || config.tile_columns >= 64);
}

// Bit i of `forced` puts kConfigs[i] before all others for the calls that it can serve.
constexpr int pick_config(const Call& call, const Gpu& gpu, uint64_t forced) {
  for (int i = 0; i < kConfigCount; ++i) {
    if (forced >> i & 1 && serves(kConfigs[i], call)) return i;
  }
  for (int rows = call.tile_rows; rows <= kTile; rows *= 4) {
    for (int i = 0; i < kConfigCount; ++i) {
      if (kConfigs[i].tile_rows == rows && serves(kConfigs[i], call) && runs_on(kConfigs[i], gpu)) return i;
    }
  }
  return -1;
}

}  // namespace moe

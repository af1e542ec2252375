// Starts the kernels of a Multiply (simt/, mma/).
#pragma once

#include "gemm.cuh"
#include "narrow.cuh"
#include "start.cuh"
#include "weight_grad.cuh"

namespace moe {

template <typename Multiply, bool kVector>
cudaError_t start_gemm(const Config& config, const GemmProblem& p, int blocks, cudaStream_t stream) {
  const int64_t tiles = max_row_tiles(p.S, p.E, kTile) * pieces(p.N, kTile);
  return start(gemm<Multiply, kVector>, Multiply::kThreads, config, tiles, blocks, false, stream, p);
}

template <typename Multiply>
cudaError_t start_narrow(const Config& config, const GemmProblem& p, int blocks, cudaStream_t stream) {
  const int64_t row_tiles = p.S / config.tile_rows + int64_t(p.S < p.groups ? p.S : p.groups);
  const int64_t tiles = row_tiles * pieces(p.N, config.tile_columns);
  return start(narrow<Multiply>, Multiply::kThreads, config, tiles, blocks, true, stream, p);
}

template <typename Multiply, bool kVector>
cudaError_t start_weight_grad(const Config& config, const WeightGradProblem& p, int blocks, cudaStream_t stream) {
  const int64_t tiles = int64_t(p.E) * pieces(p.M, kTile) * pieces(p.N, kTile);
  return start(weight_grad<Multiply, kVector>, Multiply::kThreads, config, tiles, blocks, false, stream, p);
}

}  // namespace moe

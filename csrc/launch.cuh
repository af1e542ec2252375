// Starts a persistent kernel: as many blocks as the GPU holds, or fewer where there are fewer tiles.
#pragma once

#include "gemm.cuh"
#include "launch.h"
#include "weight_grad.cuh"

namespace moe {

// Upper bounds; how many tiles there really are is known on the device alone.
inline int64_t max_tiles(const GemmProblem& p) { return max_row_tiles(p.S, p.E, kTile) * pieces(p.N, kTile); }
inline int64_t max_tiles(const WeightGradProblem& p) { return int64_t(p.E) * pieces(p.M, kTile) * pieces(p.N, kTile); }

template <typename Problem>
cudaError_t start(void (*kernel)(Problem), int threads, const Config& config, const Problem& problem, int blocks,
                  cudaStream_t stream) {
  const int64_t wanted = max_tiles(problem);
  if (wanted == 0) return cudaSuccess;
  if (wanted >= (int64_t(1) << 31) - (1 << 20)) return cudaErrorInvalidConfiguration;  // tiles are counted in 32 bits
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes());
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(wanted < blocks ? wanted : blocks), threads, config.shared_bytes(), stream>>>(problem);
  return cudaGetLastError();
}

template <typename Multiply, bool kVector>
cudaError_t start_gemm(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream) {
  return start(gemm<Multiply, kVector>, Multiply::kThreads, config, problem, blocks, stream);
}

template <typename Multiply, bool kVector>
cudaError_t start_weight_grad(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream) {
  return start(weight_grad<Multiply, kVector>, Multiply::kThreads, config, problem, blocks, stream);
}

}  // namespace moe

// Starts a persistent kernel: as many blocks as the GPU holds, or fewer where there are fewer tiles.
#pragma once

#include "gemm.cuh"
#include "launch.h"
#include "weight_grad.cuh"

namespace moe {

inline int64_t tiles(int64_t extent) { return (extent + kTile - 1) / kTile; }

// Upper bounds; how many tiles there really are is known on the device alone.
inline int64_t max_tiles(const GemmProblem& p) { return max_row_tiles(p.S, p.E, kTile) * tiles(p.N); }
inline int64_t max_tiles(const WeightGradProblem& p) { return p.E * tiles(p.M) * tiles(p.N); }

template <typename Problem>
cudaError_t start(void (*kernel)(Problem), int threads, const Config& config, const Problem& problem, int sms,
                  cudaStream_t stream) {
  const int64_t resident = int64_t(sms) * config.blocks_per_sm, wanted = max_tiles(problem);
  if (wanted == 0) return cudaSuccess;
  if (wanted >= (int64_t(1) << 31) - (1 << 20)) return cudaErrorInvalidConfiguration;  // tiles are counted in 32 bits
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes());
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(wanted < resident ? wanted : resident), threads, config.shared_bytes(), stream>>>(problem);
  return cudaGetLastError();
}

// The instantiation of a Multiply for either layout of the weights and, in the weight gradient, of both operands.
template <template <Major, Major> class Multiply, bool kVector>
cudaError_t start_for(const Config& config, const GemmProblem& problem, int sms, cudaStream_t stream) {
  if (problem.w_major == Major::k) {
    using Form = Multiply<Major::k, Major::k>;
    return start(gemm<Form, kVector>, Form::kThreads, config, problem, sms, stream);
  }
  using Form = Multiply<Major::k, Major::mn>;
  return start(gemm<Form, kVector>, Form::kThreads, config, problem, sms, stream);
}

template <template <Major, Major> class Multiply, bool kVector>
cudaError_t start_for(const Config& config, const WeightGradProblem& problem, int sms, cudaStream_t stream) {
  using Form = Multiply<Major::mn, Major::mn>;
  return start(weight_grad<Form, kVector>, Form::kThreads, config, problem, sms, stream);
}

}  // namespace moe

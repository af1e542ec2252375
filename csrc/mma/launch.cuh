// Which instantiation serves a configuration, for one operand type (launch_bf16.cu, launch_fp16.cu).
#pragma once

#include "../launch.cuh"
#include "multiply.cuh"
#include "narrow.cuh"

namespace moe::mma {

template <typename T>
struct Dispatch {
  template <Major kA, Major kB>
  using Deep = Multiply<T, kA, kB, 64, 3, 128>;
  template <Major kA, Major kB>
  using Shallow = Multiply<T, kA, kB, 32, 3, 32>;  // half the shared memory, for GPUs with 100 KB an SM

  template <Major kMajorW>
  static cudaError_t launch_narrow(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream) {
    if constexpr (kMajorW == Major::k) {
      if (config.tile_columns < 64) return start_narrow<NarrowMultiply<T, kMajorW, true>>(config, problem, blocks, stream);
    }
    return start_narrow<NarrowMultiply<T, kMajorW, false>>(config, problem, blocks, stream);
  }

  template <Major kMajorW>
  static cudaError_t launch_for(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream) {
    if (config.narrow()) return launch_narrow<kMajorW>(config, problem, blocks, stream);
    if (!config.vectorized) return start_gemm<Shallow<Major::k, kMajorW>, false>(config, problem, blocks, stream);
    return config.tile_k == 64 ? start_gemm<Deep<Major::k, kMajorW>, true>(config, problem, blocks, stream)
                               : start_gemm<Shallow<Major::k, kMajorW>, true>(config, problem, blocks, stream);
  }

  static cudaError_t launch(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream) {
    return problem.w_major == Major::k ? launch_for<Major::k>(config, problem, blocks, stream)
                                       : launch_for<Major::mn>(config, problem, blocks, stream);
  }

  static cudaError_t launch(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream) {
    constexpr Major kMn = Major::mn;
    if (!config.vectorized) return start_weight_grad<Shallow<kMn, kMn>, false>(config, problem, blocks, stream);
    return config.tile_k == 64 ? start_weight_grad<Deep<kMn, kMn>, true>(config, problem, blocks, stream)
                               : start_weight_grad<Shallow<kMn, kMn>, true>(config, problem, blocks, stream);
  }
};

}  // namespace moe::mma

// Which instantiation serves a configuration, for one operand type (launch_bf16.cu, launch_fp16.cu).
#pragma once

#include "../launch.cuh"
#include "multiply.cuh"

namespace moe::mma {

template <typename T>
struct Dispatch {
  template <Major kA, Major kB>
  using Deep = Multiply<T, kA, kB, 64, 3, 128>;
  template <Major kA, Major kB>
  using Shallow = Multiply<T, kA, kB, 32, 3, 32>;  // half the shared memory, for GPUs with 100 KB an SM

  template <typename Problem>
  static cudaError_t launch(const Config& config, const Problem& problem, int sms, cudaStream_t stream) {
    if (!config.vectorized) return start_for<Shallow, false>(config, problem, sms, stream);
    return config.tile_k == 64 ? start_for<Deep, true>(config, problem, sms, stream)
                               : start_for<Shallow, true>(config, problem, sms, stream);
  }
};

}  // namespace moe::mma

#include "launch.cuh"

namespace moe::mma {

cudaError_t launch_bfloat16(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream) {
  return Dispatch<__nv_bfloat16>::launch(config, problem, blocks, stream);
}

cudaError_t launch_bfloat16(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream) {
  return Dispatch<__nv_bfloat16>::launch(config, problem, blocks, stream);
}

}  // namespace moe::mma

#include "launch.cuh"

namespace moe::wgmma {

cudaError_t launch_float16(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream) {
  return launch<__half>(config, problem, blocks, stream);
}

cudaError_t launch_float16(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream) {
  return launch<__half>(config, problem, blocks, stream);
}

}  // namespace moe::wgmma

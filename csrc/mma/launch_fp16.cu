#include "launch.cuh"

namespace moe::mma {

cudaError_t launch_float16(const Config& config, const GemmProblem& problem, int sms, cudaStream_t stream) {
  return Dispatch<__half>::launch(config, problem, sms, stream);
}

cudaError_t launch_float16(const Config& config, const WeightGradProblem& problem, int sms, cudaStream_t stream) {
  return Dispatch<__half>::launch(config, problem, sms, stream);
}

}  // namespace moe::mma

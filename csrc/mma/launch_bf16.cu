#include "launch.cuh"

namespace moe::mma {

cudaError_t launch_bfloat16(const Config& config, const GemmProblem& problem, int sms, cudaStream_t stream) {
  return Dispatch<__nv_bfloat16>::launch(config, problem, sms, stream);
}

cudaError_t launch_bfloat16(const Config& config, const WeightGradProblem& problem, int sms, cudaStream_t stream) {
  return Dispatch<__nv_bfloat16>::launch(config, problem, sms, stream);
}

}  // namespace moe::mma

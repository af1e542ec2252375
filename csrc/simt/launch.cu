#include "../launch.cuh"
#include "multiply.cuh"

namespace moe::simt {
namespace {

template <Major kA, Major kB>
using Form = Multiply<kA, kB, 16, 3, 32>;

template <typename Problem>
cudaError_t dispatch(const Config& config, const Problem& problem, int sms, cudaStream_t stream) {
  return config.vectorized ? start_for<Form, true>(config, problem, sms, stream)
                           : start_for<Form, false>(config, problem, sms, stream);
}

}  // namespace

cudaError_t launch(const Config& config, const GemmProblem& problem, int sms, cudaStream_t stream) {
  return dispatch(config, problem, sms, stream);
}

cudaError_t launch(const Config& config, const WeightGradProblem& problem, int sms, cudaStream_t stream) {
  return dispatch(config, problem, sms, stream);
}

}  // namespace moe::simt

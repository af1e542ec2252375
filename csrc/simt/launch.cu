#include "../launch.cuh"
#include "multiply.cuh"
#include "narrow.cuh"

namespace moe::simt {
namespace {

template <Major kMajorB>
using Form = Multiply<kMajorB, 16, 2, 32>;  // a stage takes two microseconds, longer than its loads

}  // namespace

cudaError_t launch(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream) {
  if (config.narrow()) {
    return problem.w_major == Major::k ? start_narrow<NarrowMultiply<Major::k>>(config, problem, blocks, stream)
                                       : start_narrow<NarrowMultiply<Major::mn>>(config, problem, blocks, stream);
  }
  // Rows along k are moved a value at a time, so that for them there is one kernel whatever their alignment.
  if (problem.w_major == Major::k) return start_gemm<Form<Major::k>, false>(config, problem, blocks, stream);
  return config.vectorized ? start_gemm<Form<Major::mn>, true>(config, problem, blocks, stream)
                           : start_gemm<Form<Major::mn>, false>(config, problem, blocks, stream);
}

cudaError_t launch(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream) {
  return config.vectorized ? start_weight_grad<Form<Major::mn>, true>(config, problem, blocks, stream)
                           : start_weight_grad<Form<Major::mn>, false>(config, problem, blocks, stream);
}

}  // namespace moe::simt

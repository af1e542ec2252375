// Entry points from the binding into the kernels; each returns CUDA's own error. `blocks`: the most that run at once.
#pragma once

#include "config.h"

namespace moe {

namespace simt {
cudaError_t launch(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream);
cudaError_t launch(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream);
}  // namespace simt

namespace mma {
cudaError_t launch_bfloat16(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream);
cudaError_t launch_bfloat16(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream);
cudaError_t launch_float16(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream);
cudaError_t launch_float16(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream);
}  // namespace mma

namespace wgmma {
cudaError_t launch_bfloat16(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream);
cudaError_t launch_bfloat16(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream);
cudaError_t launch_float16(const Config& config, const GemmProblem& problem, int blocks, cudaStream_t stream);
cudaError_t launch_float16(const Config& config, const WeightGradProblem& problem, int blocks, cudaStream_t stream);
}  // namespace wgmma

// out[t] = sum over j of rows[t * top_k + j] in the order of j, in float32.
struct SumRowsProblem {
  int64_t T, N;
  int top_k;
  const void* rows;
  int64_t rows_stride;
  DType rows_type;
  void* out;
  int64_t out_stride;
  DType out_type;
  bool vector;
};
cudaError_t launch_sum_rows(const SumRowsProblem& problem, int sms, cudaStream_t stream);

// offs[e]: the sum of the sizes up to e, within [-1, 2^31 - 1].
cudaError_t launch_group_ends(const void* sizes, IdType type, int E, int* offs, cudaStream_t stream);

// row_assignment: the stable sort of the S assignments by id, those outside [0, E) last; offs: where each expert ends.
struct RouteProblem {
  int S, E;
  const void* ids;  // [S]
  IdType id_type;
  int* row_assignment;  // [S]
  int* offs;            // [E]
};
int64_t route_words(int S, int E);  // of scratch
cudaError_t launch_route(const RouteProblem& problem, int* scratch, cudaStream_t stream);

}  // namespace moe

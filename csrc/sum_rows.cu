// The deterministic combine's second half: a token's rows, already weighted, added in slot order.
#include "epilogue.cuh"
#include "launch.h"

namespace moe {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SumRowsProblem p) {
  const int64_t words = (p.N + 3) / 4;  // of four columns
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < p.T * words; i += int64_t(gridDim.x) * kThreads) {
    const int64_t token = i / words, column = i % words * 4;
    const int valid = int(min(p.N - column, int64_t(4)));
    Four<float> sum = {};
    for (int j = 0; j < p.top_k; ++j) {
      const int64_t row = token * p.top_k + j;
      const Four<float> value = load_4(p.rows, p.rows_type, row * p.rows_stride + column, valid, p.vector);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum.value[k] += value.value[k];
    }
    store_4(p.out, p.out_type, token * p.out_stride + column, sum, valid, p.vector);
  }
}

}  // namespace

cudaError_t launch_sum_rows(const SumRowsProblem& problem, int sms, cudaStream_t stream) {
  const int64_t blocks = (problem.T * ((problem.N + 7) / 8) + kThreads - 1) / kThreads;
  const int64_t resident = int64_t(sms) * (2048 / kThreads);
  if (blocks == 0) return cudaSuccess;
  sum_rows<<<unsigned(blocks < resident ? blocks : resident), kThreads, 0, stream>>>(problem);
  return cudaGetLastError();
}

}  // namespace moe

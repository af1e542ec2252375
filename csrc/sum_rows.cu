// The deterministic combine's second half: a token's rows, already weighted, added in slot order.
#include "epilogue.cuh"
#include "start.cuh"

namespace moe {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SumRowsProblem p) {
  const int64_t words = (p.N + 3) / 4;  // of four columns
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < p.T * words; i += int64_t(gridDim.x) * kThreads) {
    const int64_t token = i / words, column = i % words * 4;
    const int valid = int(min(p.N - column, int64_t(4)));
    Four<float> sum = {};
#pragma unroll 4
    for (int j = 0; j < p.top_k; ++j) {
      const int64_t row = token * p.top_k + j;
      typed(p.rows, p.rows_type, [&](const auto* rows) {
        const auto value = load_4(rows + row * p.rows_stride + column, valid, p.vector);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum.value[k] += float(value.value[k]);
      });
    }
    typed(p.out, p.out_type, [&](auto* out) { store_4(out + token * p.out_stride + column, sum, valid, p.vector); });
  }
}

}  // namespace

cudaError_t launch_sum_rows(const SumRowsProblem& problem, int sms, cudaStream_t stream) {
  const int64_t blocks = (problem.T * ((problem.N + 3) / 4) + kThreads - 1) / kThreads;
  const int64_t resident = int64_t(sms) * (2048 / kThreads);
  if (blocks == 0) return cudaSuccess;
  return launch_kernel(sum_rows, unsigned(blocks < resident ? blocks : resident), kThreads, 0, false, stream, problem);
}

}  // namespace moe

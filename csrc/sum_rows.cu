// The deterministic combine's second half: a token's rows, already weighted, added in slot order.
#include "epilogue.cuh"
#include "start.cuh"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8, kPart = 32 * kColumns;  // of a row are a thread's and a warp's at a time

__host__ __device__ int64_t parts_of(const SumRowsProblem& p) { return (p.N + kPart - 1) / kPart; }

// Neighbouring values; those at or past `valid` are 0. kVector: all are there, and may be moved at once.
template <typename T>
struct alignas(16) Columns {
  T value[kColumns];
};
template <bool kVector, typename T>
__device__ __forceinline__ Columns<T> load_columns(const T* from, int valid) {
  if (kVector) return *reinterpret_cast<const Columns<T>*>(from);
  Columns<T> columns;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) columns.value[i] = i < valid ? from[i] : T(0.f);
  return columns;
}

template <bool kVector, typename T>
__device__ __forceinline__ void add_up(float (&sum)[kColumns], const T* row, int64_t stride, int rows, int valid) {
  constexpr int kTogether = kVector ? 16 / sizeof(T) : 1;  // are on their way before the first of them is added
  for (int first = 0; first < rows; first += kTogether, row += kTogether * stride) {
    Columns<T> columns[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      columns[j] = first + j < rows ? load_columns<kVector>(row + j * stride, valid) : Columns<T>{};
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] += float(columns[j].value[i]);
    }
  }
}

// A warp takes 256 columns of a token at a time, of one token after the other as they lie.
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SumRowsProblem p) {
  wait_for_launch_before();
  const int lane = threadIdx.x % 32;
  const int64_t warp = (blockIdx.x * int64_t(kThreads) + threadIdx.x) / 32, warps = int64_t(gridDim.x) * (kThreads / 32);
  const int64_t parts = parts_of(p), more_tokens = warps / parts, more_parts = warps % parts;  // divided once
  for (int64_t token = warp / parts, part = warp % parts; token < p.T;) {
    const int64_t column = part * kPart + lane * kColumns;
    const int valid = int(max(min(p.N - column, int64_t(kColumns)), int64_t(0)));
    float sum[kColumns] = {};
    typed(p.rows, p.rows_type, [&](const auto* rows) {
      const auto* first = rows + token * p.top_k * p.rows_stride + column;
      if (p.vector && valid >= kColumns) {
        add_up<true>(sum, first, p.rows_stride, p.top_k, kColumns);
      } else {
        add_up<false>(sum, first, p.rows_stride, p.top_k, valid);
      }
    });
    typed(p.out, p.out_type, [&](auto* out) {
      auto* to = out + token * p.out_stride + column;
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) store_4(to + i, {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]}, valid - i, p.vector);
    });
    token += more_tokens, part += more_parts;
    if (part >= parts) ++token, part -= parts;
  }
}

}  // namespace

cudaError_t launch_sum_rows(const SumRowsProblem& problem, int sms, cudaStream_t stream) {
  if (problem.T == 0 || problem.N == 0) return cudaSuccess;
  const int64_t parts = problem.T * parts_of(problem);
  const int64_t blocks = (parts + kThreads / 32 - 1) / (kThreads / 32), resident = int64_t(sms) * (2048 / kThreads);
  return launch_kernel(sum_rows, unsigned(blocks < resident ? blocks : resident), kThreads, 0, true, stream, problem);
}

}  // namespace moe

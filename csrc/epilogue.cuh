// From accumulators to memory: bias and routing weight in registers, then rows staged as float32 in shared memory, from
// where whole warps store them or the copy engine adds them to their tokens' rows of the output. A row dot is taken on the
// way, of the staged rows, before they are weighted.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "config.h"
#include "problem.h"
#include "ptx/copy.cuh"

namespace moe {

// Four neighbouring values as they lie in memory.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};

// Those at or past `valid` are 0.
template <typename T>
__device__ __forceinline__ Four<T> load_4(const T* from, int valid, bool vector) {
  if (vector && valid >= 4) return *reinterpret_cast<const Four<T>*>(from);
  Four<T> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.value[i] = i < valid ? from[i] : T(0.f);
  return four;
}

// Rounded once, in pairs, which is an instruction each.
__device__ __forceinline__ Four<float> round_to(const Four<float>& four, float) { return four; }
__device__ __forceinline__ Four<__nv_bfloat16> round_to(const Four<float>& four, __nv_bfloat16) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(four.value[0], four.value[1]);
  const __nv_bfloat162 high = __floats2bfloat162_rn(four.value[2], four.value[3]);
  return {low.x, low.y, high.x, high.y};
}
__device__ __forceinline__ Four<__half> round_to(const Four<float>& four, __half) {
  const __half2 low = __floats2half2_rn(four.value[0], four.value[1]), high = __floats2half2_rn(four.value[2], four.value[3]);
  return {low.x, low.y, high.x, high.y};
}

template <typename T>
__device__ __forceinline__ void store_4(T* to, const Four<float>& four, int valid, bool vector) {
  const Four<T> converted = round_to(four, T());
  if (vector && valid >= 4) {
    *reinterpret_cast<Four<T>*>(to) = converted;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < valid) to[i] = converted.value[i];
  }
}

__device__ __forceinline__ Four<float> operator*(float factor, Four<float> four) {
#pragma unroll
  for (int i = 0; i < 4; ++i) four.value[i] *= factor;
  return four;
}

template <typename T>
__device__ __forceinline__ void add(Four<float>& to, const Four<T>& four) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to.value[i] += float(four.value[i]);
}

// Eight neighbouring values.
template <typename T>
struct Eight {
  Four<T> low, high;
};

// All there and to be moved at once, 16 bytes at a time.
template <typename T>
__device__ __forceinline__ void store_8(T* to, const Eight<float>& eight) {
  struct alignas(16) {
    Four<T> low, high;
  } const rounded{round_to(eight.low, T()), round_to(eight.high, T())};
  const uint4* from = reinterpret_cast<const uint4*>(&rounded);
#pragma unroll
  for (int i = 0; i < int(sizeof(rounded) / sizeof(uint4)); ++i) reinterpret_cast<uint4*>(to)[i] = from[i];
}

template <typename T, typename Like>
using MatchConst = std::conditional_t<std::is_const_v<Like>, const T, T>;

// Calls use with a matrix whose type is known at run time.
template <typename Void, typename Use>
__device__ __forceinline__ void typed(Void* matrix, DType type, Use use) {
  switch (type) {
    case DType::float32: return use(static_cast<MatchConst<float, Void>*>(matrix));
    case DType::bfloat16: return use(static_cast<MatchConst<__nv_bfloat16, Void>*>(matrix));
    case DType::float16: return use(static_cast<MatchConst<__half, Void>*>(matrix));
  }
}

// What a Multiply's threads hold of a tile: sum(i, j) at row(i) and column(j), the columns in pairs with kPairs.
template <typename T, typename Multiply>
__device__ __forceinline__ void add_bias(Multiply& multiply, const T* bias, int columns) {
#pragma unroll
  for (int j = 0; j < Multiply::kColumns; ++j) {
    const float value = multiply.column(j) < columns ? float(bias[multiply.column(j)]) : 0.f;
#pragma unroll
    for (int i = 0; i < Multiply::kRows; ++i) multiply.sum(i, j) += value;
  }
}

template <typename Multiply>
__device__ __forceinline__ void scale_rows(Multiply& multiply, const float* row_weight) {
#pragma unroll
  for (int i = 0; i < Multiply::kRows; ++i) {
    const float weight = row_weight[multiply.row(i)];
#pragma unroll
    for (int j = 0; j < Multiply::kColumns; ++j) multiply.sum(i, j) *= weight;
  }
}

// Rows first to first + kStagedRows - 1 of the tile. Sums go two at a time where a thread has them side by side (kPairs); wider
// stores would tie more of the registers that the main loop multiplies in.
template <int kPitch, typename Multiply>
__device__ __forceinline__ void stage_rows(Multiply& multiply, float* staged, int first) {
#pragma unroll
  for (int i = 0; i < Multiply::kRows; ++i) {
    const int row = multiply.row(i) - first;
    if (unsigned(row) >= Multiply::kStagedRows) continue;
    const uint32_t to = ptx::shared_address(staged + row * kPitch);
#pragma unroll
    for (int j = 0; j < Multiply::kColumns; j += 1 + Multiply::kPairs) {
      const uint32_t at = to + multiply.column(j) * 4;
      if constexpr (Multiply::kPairs) {
        ptx::store_shared_8(at, multiply.sum(i, j), multiply.sum(i, j + 1));
      } else {
        ptx::store_shared_4(at, multiply.sum(i, j));
      }
    }
  }
}

// Makes ordinary writes to shared memory, behind the barrier that follows, visible to the copy engine where there is one.
__device__ __forceinline__ void before_bulk_add() {
#if __CUDA_ARCH__ >= 900
  ptx::fence_shared_for_async();
#endif
}

// Adds staged rows to their tokens' rows of the output, which are `stride` apart and begin at `out`; all threads together.
template <int kThreads, int kPitch>
__device__ __forceinline__ void add_rows(float* out, int64_t stride, bool vector, const float* staged, const int* assignment,
                                         int rows, int columns, int top_k) {
#if __CUDA_ARCH__ >= 900
  if (vector) {
    static_assert(kThreads == kTile);
    const int row = threadIdx.x;
    if (row < rows) {
      ptx::bulk_add(out + (assignment[row] / top_k) * stride, ptx::shared_address(staged + row * kPitch), columns * 4);
      ptx::commit_bulk();
    }
    ptx::wait_bulk_read<0>();  // the staged rows may be overwritten once every thread is past this
    return;
  }
#endif
  if (threadIdx.x >= columns) return;
#pragma unroll 4
  for (int row = 0; row < rows; ++row) {
    atomicAdd(out + (assignment[row] / top_k) * stride + threadIdx.x, staged[row * kPitch + threadIdx.x]);
  }
}

// Sums each of a lane's values with those of a warp's other lanes. In the end sum[0] holds that of the value whose number is
// returned. Each exchange halves both the lanes that share a sum and the sums that a lane holds.
template <int kSums>
__device__ __forceinline__ int sum_over_lanes(float (&sum)[kSums]) {
  int own = 0;
#pragma unroll
  for (int half = kSums / 2, step = 16; step > 0; half /= 2, step /= 2) {
    const bool upper = half && threadIdx.x & step;
    own += upper ? half : 0;
#pragma unroll
    for (int i = 0; i < max(half, 1); ++i) {
      const float kept = upper ? sum[i + half] : sum[i], sent = upper ? sum[i] : sum[i + half];
      sum[i] = kept + __shfl_xor_sync(~0u, sent, step);
    }
  }
  return own;
}

// The row dots of staged rows, which are weighted then. `with` begins at the first row's columns (by_row) or, rows being
// looked up by token, at token 0's; dot is indexed by assignment.
template <int kThreads, int kPitch, typename T>
__device__ __forceinline__ void dot_rows(const T* with, int64_t stride, bool by_row, bool vector, float* dot, float* staged,
                                         const int* assignment, const float* row_weight, int rows, int columns, int top_k) {
  // A warp takes a row at a time, its lanes four columns each. Many of its rows' loads are in flight before the first is
  // needed.
  constexpr int kWarps = kThreads / 32, kTogether = 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, left = columns - lane * 4;
  static_assert(kTile == 32 * 4);
#pragma unroll 1
  for (int first = warp; first < rows; first += kWarps * kTogether) {
    const T* from[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = min(first + i * kWarps, rows - 1);
      from[i] = with + (by_row ? row : assignment[row] / top_k) * stride + lane * 4;
    }
    ptx::Words<sizeof(T)> other[kTogether];  // four values each, which the compiler takes apart only where they are used
    if (vector && left >= 4) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) other[i] = ptx::load_words<sizeof(T)>(from[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        reinterpret_cast<Four<T>&>(other[i]) = load_4(from[i], left, false);
      }
    }
    float sum[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = first + i * kWarps;
      if (row >= rows) break;
      Four<float>& values = *reinterpret_cast<Four<float>*>(staged + row * kPitch + lane * 4);
      Four<float> scaled = values;
      const float weight = row_weight[row];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float with_value = float(reinterpret_cast<const Four<T>&>(other[i]).value[j]);
        sum[i] = j < left ? fmaf(scaled.value[j], with_value, sum[i]) : sum[i];
        scaled.value[j] *= weight;
      }
      values = scaled;
    }
    const int row = first + sum_over_lanes(sum) * kWarps;
    if (lane % (32 / kTogether) == 0 && row < rows) dot[assignment[row]] = sum[0];
  }
}

// Stores staged rows: row r at out + r * stride (assignment null) or, rows placed by assignment, at out + assignment[r] *
// stride. accumulate: adds them to what is there.
template <int kThreads, int kPitch, typename T>
__device__ __forceinline__ void store_rows(T* out, int64_t stride, bool vector, const float* staged, const int* assignment,
                                           int rows, int columns, bool accumulate) {
  const int lane = threadIdx.x % 32, left = columns - lane * 4;
#pragma unroll 4
  for (int row = threadIdx.x / 32; row < rows; row += kThreads / 32) {
    T* to = out + (assignment ? assignment[row] : row) * stride + lane * 4;
    Four<float> four = load_4(staged + row * kPitch + lane * 4, 4, true);
    if (accumulate) {
      const Four<T> old = load_4(to, left, vector);
#pragma unroll
      for (int i = 0; i < 4; ++i) four.value[i] += float(old.value[i]);
    }
    store_4(to, four, left, vector);
  }
}

// The same turned: column c at out + c * stride.
template <int kThreads, int kPitch, typename T>
__device__ __forceinline__ void store_columns(T* out, int64_t stride, const float* staged, int rows, int columns) {
  for (int column = threadIdx.x / 32; column < columns; column += kThreads / 32) {
    for (int row = threadIdx.x % 32; row < rows; row += 32) out[column * stride + row] = T(staged[row * kPitch + column]);
  }
}

// Writes staged rows of a product where they belong: by row from `row` on, or by assignment.
template <int kThreads, int kPitch>
__device__ __forceinline__ void store_product(const Epilogue& to, const float* staged, int row, int column,
                                              const int* assignment, int rows, int columns) {
  const bool by_row = to.destination == Destination::row;
  typed(to.out, to.out_type, [&](auto* out) {
    if (to.out_turned) {
      store_columns<kThreads, kPitch>(out + column * to.out_stride + row, to.out_stride, staged, rows, columns);
    } else {
      const int64_t start = by_row ? row * to.out_stride : 0;
      store_rows<kThreads, kPitch>(out + start + column, to.out_stride, to.out_vector, staged,
                                   by_row ? nullptr : assignment, rows, columns, false);
    }
  });
}

}  // namespace moe

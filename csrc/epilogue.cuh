// From accumulators to memory. A kernel stages half a tile as float32 in shared memory, and whole warps write it row by
// row: bias, row dot, routing weight, then a store or an addition to the token's row of the output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "config.h"
#include "problem.h"
#include "ptx/copy.cuh"

namespace moe {

constexpr int kStagedRows = kTile / 2;
constexpr int kStagedPitch = kTile + 8;  // floats; the 8 spread the fragments' rows over the banks
constexpr int kStagedBytes = kStagedRows * kStagedPitch * 4;

// Eight neighbouring values as they lie in memory: 16 bytes, or 32 of float32.
template <typename T>
struct alignas(16) Eight {
  T value[8];
};

// Those at or past `valid` are 0.
template <typename T>
__device__ __forceinline__ Eight<T> load_8(const T* from, int valid, bool vector) {
  if (vector && valid >= 8) return *reinterpret_cast<const Eight<T>*>(from);
  Eight<T> eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.value[i] = i < valid ? from[i] : T(0.f);
  return eight;
}

template <typename To, typename From>
__device__ __forceinline__ Eight<To> convert(const Eight<From>& from) {
  Eight<To> to;
#pragma unroll
  for (int i = 0; i < 8; ++i) to.value[i] = To(from.value[i]);
  return to;
}

template <typename T>
__device__ __forceinline__ void store_8(T* to, const Eight<float>& eight, int valid, bool vector) {
  const Eight<T> converted = convert<T>(eight);
  if (vector && valid >= 8) {
    *reinterpret_cast<Eight<T>*>(to) = converted;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < valid) to[i] = converted.value[i];
  }
}

// The same for a matrix whose type is known at run time.
__device__ __forceinline__ void store_8(void* to, DType type, int64_t index, const Eight<float>& eight, int valid,
                                        bool vector) {
  switch (type) {
    case DType::float32: return store_8(static_cast<float*>(to) + index, eight, valid, vector);
    case DType::bfloat16: return store_8(static_cast<__nv_bfloat16*>(to) + index, eight, valid, vector);
    case DType::float16: return store_8(static_cast<__half*>(to) + index, eight, valid, vector);
  }
}

__device__ __forceinline__ Eight<float> load_8(const void* from, DType type, int64_t index, int valid, bool vector) {
  switch (type) {
    case DType::bfloat16: return convert<float>(load_8(static_cast<const __nv_bfloat16*>(from) + index, valid, vector));
    case DType::float16: return convert<float>(load_8(static_cast<const __half*>(from) + index, valid, vector));
    default: return load_8(static_cast<const float*>(from) + index, valid, vector);
  }
}

// Adds a staged row of `columns` floats to `to`: by four lanes of a warp, `quarter` 0 to 3, of which each has written its
// own part of the row.
__device__ __forceinline__ void add_row(float* to, const float* staged, int columns, bool vector, int quarter) {
#if __CUDA_ARCH__ >= 900
  if (vector) {  // the copy engine adds the row while the warps go on
    if (quarter == 0) {
      ptx::bulk_add(to, ptx::shared_address(staged), columns * 4);
      ptx::commit_bulk();
    }
    return;
  }
#endif
  for (int i = quarter; i < columns; i += 4) atomicAdd(to + i, staged[i]);
}

// Writes staged rows [0, rows) of columns [column, column + columns). `row` is the first one's place in expert order;
// `assignment` and `row_weight` (shared memory) hold each one's. Four lanes share a row, so a warp has eight in flight.
template <typename T, int kThreads>
__device__ __forceinline__ void write_rows(const Epilogue& to, float* staged, const int* assignment, const float* row_weight,
                                           int expert, int row, int rows, int column, int columns, int S, int top_k) {
  constexpr int kWords = kTile / 32;  // of eight columns, a lane's share of a row
  const int quarter = threadIdx.x % 4;
  const bool combine = to.destination == Destination::token, by_row = to.destination == Destination::row;
#pragma unroll 1
  for (int r = threadIdx.x / 4; r < kStagedRows; r += kThreads / 4) {
    const bool inside = r < rows, live = inside && expert >= 0;
    float* values = staged + r * kStagedPitch;
    const int a = inside ? assignment[r] : 0, token = a / top_k;
    const int64_t target = by_row ? row + r : combine ? token : a;
    const float weight = row_weight[r];

    const int64_t with_row = by_row ? row + r : token;
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int at = 32 * i + 8 * quarter, valid = columns - at;
      Eight<float> v = *reinterpret_cast<const Eight<float>*>(values + at);
      if (live && to.bias) {
        const T* first = static_cast<const T*>(to.bias) + expert * to.bias_stride + column;
        const Eight<T> bias = load_8(first + at, valid, to.bias_vector);
#pragma unroll
        for (int j = 0; j < 8; ++j) v.value[j] += float(bias.value[j]);
      }
      if (live && to.dot_with) {
        const T* first = static_cast<const T*>(to.dot_with) + with_row * to.dot_with_stride + column;
        const Eight<T> with = load_8(first + at, valid, to.dot_vector);
#pragma unroll
        for (int j = 0; j < 8; ++j) dot = j < valid ? fmaf(v.value[j], float(with.value[j]), dot) : dot;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) v.value[j] *= weight;
      if (combine) {
        *reinterpret_cast<Eight<float>*>(values + at) = v;
      } else if (inside) {
        store_8(to.out, to.out_type, target * to.out_stride + column + at, v, valid, to.out_vector);
      }
    }
    if (to.dot_with) {
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      if (live && quarter == 0) to.dot[int64_t(column / kTile) * S + a] = dot;
    }
    if (combine && to.out) {
#if __CUDA_ARCH__ >= 900
      ptx::fence_shared_for_bulk();
#endif
      __syncwarp();  // the row's four parts are written
      if (live) add_row(static_cast<float*>(to.out) + target * to.out_stride + column, values, columns, to.out_vector, quarter);
    }
  }
#if __CUDA_ARCH__ >= 900
  if (combine) ptx::wait_bulk_read();  // the staged rows may be overwritten once every thread is past this
#endif
}

}  // namespace moe

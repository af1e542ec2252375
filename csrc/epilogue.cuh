// From accumulators to memory. A warp stages eight rows of its block at a time as float32 in shared memory and writes them
// row by row: bias, row dot, routing weight, then a store or an addition to the token's row of the output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "config.h"
#include "problem.h"
#include "ptx/copy.cuh"

namespace moe {

constexpr int kStagedRows = 8, kStagedPitch = kBlock + 8;  // floats; the 8 spread the fragments' rows over the banks
constexpr int kStagedFloats = kStagedRows * kStagedPitch;  // of each warp

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

// Writes a warp's block of the tile `rows` into columns [column, column + columns) of the output. `assignment` and
// `row_weight` (shared memory) hold what they say for each row of the block. Four lanes share each of eight rows. kWhole
// says that there is a row dot of whole blocks in 16-byte words: those of the next eight rows are loaded while these are
// written.
template <typename T, bool kWhole, typename Multiply>
__device__ __forceinline__ void write_block(const Epilogue& to, const Multiply& multiply, float* staged, const int* assignment,
                                            const float* row_weight, const RowTile& rows, int column, int columns, int S,
                                            int top_k) {
  constexpr int kWords = kBlock / 32, kPasses = kBlock / kStagedRows;  // words of eight columns, a lane's share of a row
  const int quarter = threadIdx.x % 4;
  const bool combine = to.destination == Destination::token, by_row = to.destination == Destination::row;
  float* values = staged + threadIdx.x % 32 / 4 * kStagedPitch;

  const auto with_row = [&](int r) {  // of row r of the block
    const int row = rows.row + multiply.warp_m + r;
    return static_cast<const T*>(to.dot_with) + int64_t(by_row ? row : assignment[r] / top_k) * to.dot_with_stride +
           column;
  };
  const auto inside = [&](int r) { return multiply.warp_m + r < rows.rows; };
  Eight<T> with[kWords], next_with[kWords];
  const auto load_ahead = [&](int pass) {
    const int r = multiply.pass_row(pass);
    if (!inside(r) || rows.expert < 0) return;
#pragma unroll
    for (int i = 0; i < kWords; ++i) next_with[i] = reinterpret_cast<const Eight<T>*>(with_row(r))[4 * i + quarter];
  };
  if (kWhole) load_ahead(0);

#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int r = multiply.pass_row(pass);
    const bool live = inside(r) && rows.expert >= 0;
    if (kWhole) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) with[i] = next_with[i];
      if (pass + 1 < kPasses) load_ahead(pass + 1);
    }
#if __CUDA_ARCH__ >= 900
    if (combine) ptx::wait_bulk_read();
#endif
    __syncwarp();  // the rows staged before have been read
    multiply.stage_rows(pass, staged);
    __syncwarp();

    const int a = assignment[r];
    const float weight = row_weight[r];
    const int64_t target = by_row ? rows.row + multiply.warp_m + r : combine ? a / top_k : a;
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int at = 32 * i + 8 * quarter, valid = columns - at;
      Eight<float> v = *reinterpret_cast<const Eight<float>*>(values + at);
      if (live && to.bias) {
        const T* bias_row = static_cast<const T*>(to.bias) + rows.expert * to.bias_stride + column;
        const Eight<T> bias = load_8(bias_row + at, valid, to.bias_vector);
#pragma unroll
        for (int j = 0; j < 8; ++j) v.value[j] += float(bias.value[j]);
      }
      if (live && to.dot_with) {
        if (!kWhole) with[i] = load_8(with_row(r) + at, valid, to.dot_vector);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (kWhole || j < valid) dot = fmaf(v.value[j], float(with[i].value[j]), dot);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) v.value[j] *= weight;
      if (combine) {
        *reinterpret_cast<Eight<float>*>(values + at) = v;
      } else if (inside(r)) {
        store_8(to.out, to.out_type, target * to.out_stride + column + at, v, valid, to.out_vector);
      }
    }
    if (to.dot_with) {
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      if (live && quarter == 0) to.dot[int64_t(column / kBlock) * S + a] = dot;
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
  if (combine) ptx::wait_bulk_read();
#endif
}

}  // namespace moe

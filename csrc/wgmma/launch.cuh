// Tensor maps and launches of the Hopper kernels, for one operand type (launch_bf16.cu, launch_fp16.cu).
#pragma once

#include <cudaTypedefs.h>

#include <type_traits>

#include "../schedule.cuh"
#include "../start.cuh"
#include "gemm.cuh"
#include "weight_grad.cuh"

namespace moe::wgmma {

// The driver's encoder, found at run time, so that the library loads where there is no driver.
inline PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

template <typename T>
constexpr DType kType = std::is_same_v<T, __half> ? DType::float16 : DType::bfloat16;

struct Dimension {
  uint64_t size, bytes;  // from one to the next; the first one is contiguous
};

inline CUtensorMapDataType map_type(DType type) {
  switch (type) {
    case DType::float32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::bfloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  }
}

// A map whose boxes lie in shared memory with their rows of 128 bytes swizzled.
template <int kDimensions>
cudaError_t make_map(CUtensorMap* map, DType type, const void* data, const Dimension (&dimensions)[kDimensions],
                     int columns, int rows) {
  cuuint64_t sizes[kDimensions], strides[kDimensions];
  cuuint32_t box[kDimensions], steps[kDimensions];
  for (int i = 0; i < kDimensions; ++i) {
    sizes[i] = dimensions[i].size;
    // A dimension of one element has no stride to speak of, but is asked for one.
    strides[i] = dimensions[i].size > 1 ? dimensions[i].bytes : 16;
    box[i] = i == 0 ? columns : i == 1 ? rows : 1;
    steps[i] = 1;
  }
  if (!encoder()) return cudaErrorInsufficientDriver;
  const CUresult result = encoder()(map, map_type(type), kDimensions, const_cast<void*>(data), sizes, strides + 1, box, steps,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, Major kMajorW, Term kTerm>
cudaError_t start_gemm(const Config& config, const GemmProblem& p, int blocks, cudaStream_t stream) {
  CUtensorMap a_map{}, w_map;
  if (!p.a.gather) {
    const Dimension dimensions[] = {{uint64_t(p.K), 0}, {uint64_t(p.S), p.a.row_bytes}};
    if (const cudaError_t error = make_map(&a_map, kType<T>, p.a.data, dimensions, kTileK, kTile)) return error;
  }
  constexpr int kTileN = kTileColumns<kMajorW, kTerm>;
  using Piece = Pieces<kMajorW, kTileN>;
  const uint64_t N = p.N, K = p.K;
  const Dimension dimensions[] = {
      {Piece::kAlongK ? K : N, 0}, {Piece::kAlongK ? N : K, p.w_row_bytes}, {uint64_t(p.E), uint64_t(p.w_expert_bytes)}};
  if (const cudaError_t error = make_map(&w_map, kType<T>, p.w, dimensions, Piece::kColumns, Piece::kRows)) return error;

  const int64_t pairs = (max_row_tiles(p.S, p.E, kTile) + kCluster - 1) / kCluster * pieces(p.N, kTileN);
  return start<kCluster>(gemm<T, kMajorW, kTerm>, kThreads, config, pairs, blocks, true, stream, p, a_map, w_map);
}

template <typename T, Major kMajorW>
cudaError_t start_gemm(const Config& config, const GemmProblem& p, int blocks, cudaStream_t stream) {
  if (p.epilogue.through == Through::activation) return start_gemm<T, kMajorW, Term::activation>(config, p, blocks, stream);
  if (p.epilogue.through == Through::activation_grad) {
    return start_gemm<T, kMajorW, Term::activation_grad>(config, p, blocks, stream);
  }
  if (p.epilogue.bias) return start_gemm<T, kMajorW, Term::bias>(config, p, blocks, stream);
  if (p.epilogue.dot_with) return start_gemm<T, kMajorW, Term::dot>(config, p, blocks, stream);
  return start_gemm<T, kMajorW, Term::none>(config, p, blocks, stream);
}

template <typename T>
cudaError_t launch(const Config& config, const GemmProblem& p, int blocks, cudaStream_t stream) {
  return p.w_major == Major::k ? start_gemm<T, Major::k>(config, p, blocks, stream)
                               : start_gemm<T, Major::mn>(config, p, blocks, stream);
}

template <typename T>
cudaError_t launch(const Config& config, const WeightGradProblem& p, int blocks, cudaStream_t stream) {
  CUtensorMap out_map;
  const uint64_t bytes = size_of(p.out_type);
  const Dimension dimensions[] = {
      {uint64_t(p.N), 0}, {uint64_t(p.M), p.out_stride * bytes}, {uint64_t(p.E), p.out_expert_stride * bytes}};
  const int columns = int(128 / bytes);
  if (const cudaError_t error = make_map(&out_map, p.out_type, p.out, dimensions, columns, kRows)) return error;
  const int64_t tiles = int64_t(p.E) * pieces(p.M, kTile) * pieces(p.N, kGradColumns);
  return start(weight_grad<T>, kThreads, config, tiles, blocks, true, stream, p, out_map);
}

}  // namespace moe::wgmma

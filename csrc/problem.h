// What a launch needs: pointers, sizes and strides, with no word of torch. Strides count elements unless named bytes.
//
// T tokens, k = top_k experts a token, S rows (one per assignment of a token to an expert), E experts.
// Assignment a = t * k + j is token t's j-th expert; row_assignment[r] is the assignment at row r of the expert order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe {

enum class DType { float32, bfloat16, float16 };
__host__ __device__ constexpr int size_of(DType type) { return type == DType::float32 ? 4 : 2; }

// The dimension of a matrix operand that is contiguous in memory: the summed one, or that of the output.
enum class Major { k, mn };

// A tile of consecutive rows of one expert; expert -1: rows past the last group, which are written as zeros.
struct RowTile {
  int expert;
  int row;
  int rows;
  int unused;  // 16 bytes, so that one load brings a tile
};

// Filled on the device by build_schedule() from the group offsets, for one launch.
struct Schedule {
  const int* bounds;       // [E + 1]: expert e owns rows bounds[e] to bounds[e + 1]; rising, within [0, S]
  const int* tile_count;   // how many of `tiles` are in use, from the first one on
  const int* short_count;  // and how many from the last one back, with so few rows that two of them are one tile's work
  const RowTile* tiles;
  int tiles_size;
  int* claimed;  // tiles taken beyond the blocks' first ones
};

// The order of the tiles: column tiles are taken a strip at a time; inside a strip row tiles are, a group at a time; inside a
// group the rows advance first. What a strip's columns and a group's rows read and add to is meant to stay in L2 meanwhile.
struct Raster {
  int group, strip;  // in row tiles, or clusters of them; in column tiles
};

// Rows of a matrix, read in expert order or, gathered, by the token of each row's assignment.
struct Rows {
  const char* data;
  uint32_t row_bytes;  // from one row to the next; 32 bits, so that a row's address costs one instruction
  bool gather;
};

struct RowMap {
  const int* row_assignment;  // null: row r is assignment r
  int top_k;
};

// Where a row of results goes.
enum class Destination {
  row,         // out[r]
  assignment,  // out[row_assignment[r]]
  token,       // added to out[row_assignment[r] / top_k]
};

// What products are led through on the way, by row.
enum class Through { nothing, activation, activation_grad };

// Of an expert MLP, as torch-ext/grouped_gemm_moe/activation.py describes it.
enum class ActivationKind { silu, gelu, gelu_tanh, relu, relu2 };

struct Activation {
  ActivationKind kind;
  bool gated, interleaved;
  float limit, alpha, up_offset;
};

struct Epilogue {
  Destination destination;
  Through through;
  void* out;  // null: not wanted
  int64_t out_stride;
  DType out_type;
  const float* row_weight;  // by assignment, or null
  const void* bias;         // [E, N] in the operand type, or null
  int64_t bias_stride;
  const void* dot_with;  // rows like those of `out` in the operand type
  int64_t dot_with_stride;
  float* dot;  // [ceil(N / 128), S], by assignment: cleared by the caller; sums over the first dimension are the dots
  bool out_vector, dot_vector;  // 16 bytes may be moved at once
  bool out_turned;              // `out`, of rows by row, is contiguous along them, and its columns are out_stride apart

  // Through::activation writes what is activated to `pre`, unless null; its gradient reads it there and writes the gradient to
  // it to `d_pre`, to `out` the activation once more, weighted, and to `dot` what product and activation have in common; each
  // unless null. By row and in the operand type.
  Activation activation;
  void *pre, *d_pre;
  int64_t pre_stride, d_pre_stride;
  bool pre_vector;  // of both, and of a bias before the activation
};

enum class IdType { int8, uint8, int16, int32, int64 };

// Memory to be filled with zeros on the way.
struct Clear {
  float* data;
  int64_t count;
};

struct GemmProblem {
  int S, N, K, E;
  // For narrow tiles, which find their rows by themselves.
  const int* offs;  // [E]: where each expert's rows end
  const void* ids;  // [S], of few assignments, instead of offs and a map of rows; or null
  IdType id_type;
  int groups;   // E, or one more where the rows past the last expert's are written too
  bool early;   // the launch before waits for what wrote ids, offs and w, then lets this one begin, which may read them at once
  Clear clear;  // what a product behind this one adds to
  Rows a;
  RowMap map;
  const char* w;
  int64_t w_expert_bytes;
  uint32_t w_row_bytes;  // rows of w lie along its contiguous dimension
  Major w_major;
  bool split;  // a tile's columns are of either half of w's,
  int gap;     // between which there are so many; 0: they lie side by side
  Schedule schedule;
  Raster raster;
  Epilogue epilogue;
};

// out[e][m][n] (+)= sum over the rows r of e of row_weight[r] * a[r][m] * b[r][n]
struct WeightGradProblem {
  int M, N, E;
  Rows a, b;
  RowMap map;
  const float* row_weight;
  Schedule schedule;
  void* out;
  int64_t out_expert_stride, out_stride;
  DType out_type;
  bool out_vector;
  bool accumulate;
};

}  // namespace moe

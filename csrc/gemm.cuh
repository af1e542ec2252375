// The grouped GEMM: out = A * W[expert]^T over tiles of one expert's rows, rows of A read through an index, rows of the
// output written through one. `Multiply` says how a stage in shared memory becomes accumulators (simt/, mma/).
#pragma once

#include "config.h"
#include "epilogue.cuh"
#include "load.cuh"
#include "schedule.cuh"

namespace moe {

template <typename Multiply, bool kVector>
__global__ void __launch_bounds__(Multiply::kThreads, 2) gemm(const __grid_constant__ GemmProblem p) {
  using T = typename Multiply::Value;
  constexpr int kThreads = Multiply::kThreads, kTileK = Multiply::kTileK, kStages = Multiply::kStages;
  constexpr Config kConfig{Op::gemm, sizeof(T) == 4 ? Path::fp32 : Path::mma, kTileK, kStages, kVector};
  constexpr int kStageBytes = kConfig.stage_bytes();
  constexpr int kOperandBytes = kStageBytes / 2;
  static_assert(kStagedBytes <= kStages * kStageBytes, "half a tile is staged where the stages were");

  constexpr Major kRowsOfW = Multiply::kMajorB;
  using ShareA = Share<T, kTile, kTileK, kThreads>;
  using ShareB = std::conditional_t<kRowsOfW == Major::k, ShareA, Share<T, kTileK, kTile, kThreads>>;

  // Shared memory: the stages (A, then B), later half a tile of results; the tile's row table.
  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared);
  int* source_row = reinterpret_cast<int*>(shared + kStages * kStageBytes);
  float* row_weight = reinterpret_cast<float*>(source_row);  // after the last load
  int* assignment = source_row + kTile;
  int* next_tile = reinterpret_cast<int*>(staged + kTile);  // in the padding of a staged row

  const int column_tiles = (p.N + kTile - 1) / kTile, row_tiles = *p.schedule.tile_count;
  // Outputs that are added to must stay in L2 until all experts have passed; plain stores share the weights more widely.
  const int strip = p.epilogue.destination == Destination::token ? 2 : 8;

  for (int tile = blockIdx.x; tile < row_tiles * column_tiles; tile = *next_tile) {
    const TilePosition position = tile_position(tile, row_tiles, column_tiles, strip);
    const RowTile rows = p.schedule.tiles[position.row_tile];
    const int column = position.column_tile * kTile, columns = min(kTile, p.N - column);

    // Rows past the tile's last read its first one again: their products are never written.
    static_assert(kThreads == kTile, "a thread looks after a row");
    const int row = rows.row + (int(threadIdx.x) < rows.rows ? int(threadIdx.x) : 0);
    const int a = p.map.row_assignment ? p.map.row_assignment[row] : row;
    assignment[threadIdx.x] = a;
    source_row[threadIdx.x] = p.a.gather ? a / p.map.top_k : row;
    __syncthreads();

    // This thread's chunks of the operands at k = 0.
    const char* a_own = p.a.data + ShareA::chunk() * 16;
    const char* w_own = p.w + max(rows.expert, 0) * p.w_expert_bytes + ShareB::chunk() * 16;
    w_own = kRowsOfW == Major::k ? row_address(w_own, column + ShareB::first(), p.w_row_bytes)
                                 : row_address(w_own, ShareB::first(), p.w_row_bytes) + int64_t(column) * sizeof(T);
    const int k_stages = rows.expert < 0 ? 0 : (p.K + kTileK - 1) / kTileK;
    const auto load = [&](int stage, int part, auto parts) {
      constexpr int kParts = decltype(parts)::value;
      if (stage >= k_stages) return;
      const int k = stage * kTileK, k_left = p.K - k;
      const uint32_t to = ptx::shared_address(shared) + stage % kStages * kStageBytes;
      load_tile<ShareA, kVector, kParts>(
          to, part, k_left,
          [&](int i) { return row_address(a_own + k * sizeof(T), source_row[ShareA::first() + i], p.a.row_bytes); },
          [](int) { return true; });
      if constexpr (kRowsOfW == Major::k) {
        load_tile<ShareB, kVector, kParts>(
            to + kOperandBytes, part, k_left, [&](int i) { return row_address(w_own + k * sizeof(T), i, p.w_row_bytes); },
            [&](int i) { return ShareB::first() + i < columns; });
      } else {
        load_tile<ShareB, kVector, kParts>(
            to + kOperandBytes, part, columns, [&](int i) { return row_address(w_own, k + i, p.w_row_bytes); },
            [&](int i) { return ShareB::first() + i < k_left; });
      }
    };
    const auto advance = [] {
      ptx::commit_copies();  // an empty group where nothing was left to load, so that the count tells the stage
      ptx::wait_copies<kStages - 2>();
      __syncthreads();  // the next stage has landed for everyone, and everyone is done with this one
    };

#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      load(stage, 0, std::integral_constant<int, 1>{});
      if (stage < kStages - 2) ptx::commit_copies();
    }
    advance();
    Multiply multiply(rows.rows, columns);
    const auto operand = [&](int stage) { return shared + stage % kStages * kStageBytes; };
    if (k_stages) multiply.begin(operand(0), operand(0) + kOperandBytes, nullptr);
    for (int stage = 0; stage < k_stages; ++stage) {
      multiply.stage(
          operand(stage), operand(stage) + kOperandBytes, nullptr, operand(stage + 1), operand(stage + 1) + kOperandBytes,
          nullptr, [&](int part, auto parts) { load(stage + kStages - 1, part, parts); }, advance);
    }
    ptx::wait_copies<0>();
    // Both arrive while the first half of the tile is staged.
    const float own_weight = p.epilogue.row_weight && rows.expert >= 0 ? p.epilogue.row_weight[assignment[threadIdx.x]] : 1.f;
    const int claimed = threadIdx.x == 0 ? claim_tile(p.schedule) : 0;

    for (int half = 0; half < 2; ++half) {
      const int first = half * kStagedRows, live = rows.expert < 0 ? 0 : min(kStagedRows, rows.rows - first);
      prefetch_rows<T, kThreads>(p.epilogue, assignment + first, rows.row + first, live, column, columns, p.map.top_k);
      __syncthreads();  // the stages, or the half before, are no longer read
      multiply.write_half(staged, half);
      if (half == 0) row_weight[threadIdx.x] = own_weight;
      __syncthreads();
      write_rows<T, kThreads>(p.epilogue, staged, assignment + first, row_weight + first, rows.expert, rows.row + first,
                              min(kStagedRows, rows.rows - first), column, columns, p.S, p.map.top_k);
    }
    if (threadIdx.x == 0) *next_tile = claimed;
    __syncthreads();
  }
}

}  // namespace moe

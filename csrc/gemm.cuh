// The grouped GEMM: out = A * W[expert]^T over tiles of one expert's rows, rows of A read through an index, rows of the
// output written through one. `Multiply` says how a stage in shared memory becomes accumulators (simt/, mma/).
//
// Only eight warps run on an SM, so that every instruction beside the multiplications costs its latency. Hence the loop
// is unrolled over the stages, which makes all shared-memory addresses constant offsets, and addresses in global memory
// are held in registers and moved on once a trip.
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
  constexpr int kParts = Multiply::kParts;
  constexpr Config kConfig{Op::gemm, sizeof(T) == 4 ? Path::fp32 : Path::mma, kTileK, kStages, kVector};
  constexpr int kStageBytes = kConfig.stage_bytes(), kOperandBytes = kStageBytes / 2;
  static_assert(kStagedBytes <= kStages * kStageBytes, "half a tile is staged where the stages were");
  constexpr bool kAlongK = Multiply::kMajorB == Major::k;  // a row of W is a column of the output, else a step of k
  using ShareA = Share<T, kTile, kTileK, kThreads>;
  using ShareW = std::conditional_t<kAlongK, ShareA, Share<T, kTileK, kTile, kThreads>>;

  // Shared memory: the stages (A, then W), later half a tile of results; two words for each row of the tile.
  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared);
  int* source_row = reinterpret_cast<int*>(shared + kStages * kStageBytes);
  float* row_weight = reinterpret_cast<float*>(source_row);  // once the sources have been read
  int* assignment = source_row + kTile;
  int* next_tile = reinterpret_cast<int*>(staged + kTile);  // in the padding of a staged row

  const int column_tiles = (p.N + kTile - 1) / kTile, row_tiles = *p.schedule.tile_count;

  for (int tile = blockIdx.x; tile < row_tiles * column_tiles; tile = *next_tile) {
    const TilePosition position = tile_position(tile, row_tiles, column_tiles);
    const RowTile rows = p.schedule.tiles[position.row_tile];
    const int column = position.column_tile * kTile, columns = min(kTile, p.N - column);
    const int k_stages = rows.expert < 0 ? 0 : (p.K + kTileK - 1) / kTileK;

    // Rows past the tile's last read its first one again: their products are never written.
    static_assert(kThreads == kTile, "a thread looks after a row");
    const int row = rows.row + (int(threadIdx.x) < rows.rows ? int(threadIdx.x) : 0);
    const int own_assignment = p.map.row_assignment ? p.map.row_assignment[row] : row;
    assignment[threadIdx.x] = own_assignment;
    source_row[threadIdx.x] = p.a.gather ? own_assignment / p.map.top_k : row;
    __syncthreads();

    // This thread's chunks: every row of A has an address of its own, those of W lie w_row_bytes apart. Columns past the
    // last read it again, for they are not written either.
    const char* a_from[ShareA::kRows];
#pragma unroll
    for (int i = 0; i < ShareA::kRows; ++i) {
      const int source = source_row[ShareA::first() + i * ShareA::kStride];
      a_from[i] = row_address(p.a.data, source, p.a.row_bytes) + ShareA::chunk() * 16;
    }
    const char* w_from = p.w + max(rows.expert, 0) * p.w_expert_bytes + ShareW::chunk() * 16;
    if constexpr (!kAlongK) w_from += int64_t(column) * sizeof(T) + uint64_t(ShareW::first()) * p.w_row_bytes;
    const uint32_t a_to = ptx::shared_address(shared) + ShareA::offset();
    const uint32_t w_to = ptx::shared_address(shared) + kOperandBytes + ShareW::offset();
    int stage = 0;

    // Part of kParts of stage `stage` + ahead. Past the last stage this writes zeros that nobody reads.
    const auto load = [&](auto ahead, int part, int parts) {
      const int slot = ahead % kStages * kStageBytes, k = ahead * kTileK;
      const int k_left = (stage < k_stages ? p.K : 0) - (stage * kTileK + k);
      const int k_valid = ShareA::valid(k_left);
#pragma unroll
      for (int i = part * ShareA::kRows / parts; i < (part + 1) * ShareA::kRows / parts; ++i) {
        load_chunk<ShareA, kVector>(a_to + slot, i, a_from[i] + k * sizeof(T), k_valid);
      }
#pragma unroll
      for (int i = part * ShareW::kRows / parts; i < (part + 1) * ShareW::kRows / parts; ++i) {
        const int w_row = i * ShareW::kStride;
        if constexpr (kAlongK) {
          const int n = min(column + ShareW::first() + w_row, p.N - 1);
          load_chunk<ShareW, kVector>(w_to + slot, i, row_address(w_from, n, p.w_row_bytes) + k * sizeof(T), k_valid);
        } else {
          load_chunk<ShareW, kVector>(w_to + slot, i, w_from + uint64_t(k + w_row) * p.w_row_bytes,
                                      ShareW::first() + w_row < k_left ? ShareW::valid(columns) : 0);
        }
      }
    };
    const auto advance = [] {
      ptx::commit_copies();
      ptx::wait_copies<kStages - 2>();
      __syncthreads();  // the next stage has landed for everyone, and everyone is done with this one
    };

    unrolled<kStages - 1>([&](auto ahead) {
      load(ahead, 0, 1);
      if (ahead < kStages - 2) ptx::commit_copies();
      return true;
    });
    advance();
    Multiply multiply(shared, shared + kOperandBytes, rows.rows, columns);
    if (k_stages) multiply.template begin<false>(nullptr);
    for (; stage < k_stages; stage += kStages) {
      unrolled<kStages>([&](auto s) {
        constexpr int kNext = (s + 1) % kStages;
        constexpr Constant<s + kStages - 1> kAhead;
        const auto refill = [&](int part) { load(kAhead, part, kParts); };
        multiply.template stage<false>(s * kStageBytes, kNext * kStageBytes, nullptr, nullptr, refill, advance);
        return stage + s + 1 < k_stages;
      });
#pragma unroll
      for (int i = 0; i < ShareA::kRows; ++i) a_from[i] += kStages * kTileK * sizeof(T);
      w_from += kAlongK ? kStages * kTileK * sizeof(T) : uint64_t(kStages * kTileK) * p.w_row_bytes;
    }
    ptx::wait_copies<0>();
    // Both arrive while the first half of the tile is staged.
    const float own_weight = p.epilogue.row_weight && rows.expert >= 0 ? p.epilogue.row_weight[assignment[threadIdx.x]] : 1.f;
    const int claimed = threadIdx.x == 0 ? claim_tile(p.schedule) : 0;

    for (int half = 0; half < 2; ++half) {
      const int first = half * kStagedRows;
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

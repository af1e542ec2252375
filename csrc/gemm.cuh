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
  constexpr bool kAlongK = Multiply::kMajorB == Major::k;  // a row of W is a column of the output, else a step of k
  using ShareA = Share<T, kTile, kTileK, kThreads>;
  using ShareW = std::conditional_t<kAlongK, ShareA, Share<T, kTileK, kTile, kThreads>>;

  // Shared memory: the stages (A, then W), later the results as they are written; two words for each row of the tile.
  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared) + threadIdx.x / 32 * kStagedFloats;
  int* source_row = reinterpret_cast<int*>(shared + kStages * kStageBytes);
  float* row_weight = reinterpret_cast<float*>(source_row);  // once the sources have been read
  int* assignment = source_row + kTile;
  int* next_tile = reinterpret_cast<int*>(shared) + kBlock;  // in the padding of a staged row

  const int column_tiles = (p.N + kTile - 1) / kTile;
  // Outputs that are added to must stay in L2 until all experts have passed; plain stores share the weights more widely.
  const int strip = p.strip;

  for (int tile = blockIdx.x; tile < *p.schedule.tile_count * column_tiles; tile = *next_tile) {
    TilePosition position = tile_position(tile, *p.schedule.tile_count, column_tiles, strip);
    RowTile rows = p.schedule.tiles[position.row_tile];
    int column = position.column_tile * kTile, columns = min(kTile, p.N - column);
    const int k_stages = rows.expert < 0 ? 0 : (p.K + kTileK - 1) / kTileK;

    // Rows past the tile's last read its first one again: their products are never written.
    static_assert(kThreads == kTile, "a thread looks after a row");
    const int row = rows.row + (int(threadIdx.x) < rows.rows ? int(threadIdx.x) : 0);
    const int own_assignment = p.map.row_assignment ? p.map.row_assignment[row] : row;
    assignment[threadIdx.x] = own_assignment;
    source_row[threadIdx.x] = p.a.gather ? own_assignment / p.map.top_k : row;
    __syncthreads();

    // This thread's chunks: every row of A has an address of its own, those of W lie evenly. Columns past the
    // last read it again, for they are not written either.
    const char* a_from[ShareA::kRows];
#pragma unroll
    for (int i = 0; i < ShareA::kRows; ++i) {
      const int source = source_row[ShareA::first() + i * ShareA::kStride];
      a_from[i] = row_address(p.a.data, source, p.a.row_bytes) + ShareA::chunk() * 16;
    }
    const char* w_from = p.w + max(rows.expert, 0) * p.w_expert_bytes + ShareW::chunk() * 16;
    if constexpr (!kAlongK) w_from += int64_t(column) * sizeof(T) + uint64_t(ShareW::first()) * p.w_k_bytes;
    const uint32_t a_to = ptx::shared_address(shared) + ShareA::offset();
    const uint32_t w_to = ptx::shared_address(shared) + kOperandBytes + ShareW::offset();
    int stage = 0;

    // Part of kParts of stage `stage` + ahead.
    const auto load = [&](auto ahead, int part, int parts) {
      if (stage + ahead >= k_stages) return;
      const int slot = ahead % kStages * kStageBytes, k = ahead * kTileK;
      const int k_left = p.K - (stage * kTileK + k);
      const int k_valid = ShareA::valid(k_left);
#pragma unroll
      for (int i = part * ShareA::kRows / parts; i < (part + 1) * ShareA::kRows / parts; ++i) {
        load_chunk<ShareA, kVector>(a_to + slot, i, a_from[i] + k * sizeof(T), k_valid);
      }
#pragma unroll
      for (int i = part * ShareW::kRows / parts; i < (part + 1) * ShareW::kRows / parts; ++i) {
        const int w_row = i * ShareW::kStride;
        if constexpr (kAlongK) {
          const int n = min(ptx::keep(column + ShareW::first()) + w_row, p.N - 1);
          load_chunk<ShareW, kVector>(w_to + slot, i, row_address(w_from, n, p.w_n_bytes), k_valid);
        } else {
          load_chunk<ShareW, kVector>(w_to + slot, i, w_from + uint64_t(w_row) * p.w_k_bytes,
                                      w_row < k_left - ShareW::first() ? ShareW::valid(columns) : 0);
        }
      }
      // W moves on with every stage, by a number that the compiler doesn't know: it would hold all rows' addresses instead.
      if (part + 1 == parts) w_from += uint64_t(kTileK) * p.w_k_bytes;
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
    if (k_stages) multiply.begin();
    for (; stage < k_stages; stage += kStages) {
      unrolled<kStages>([&](auto s) {
        constexpr int kNext = (s + 1) % kStages;
        const auto refill = [&](int part) { load(Constant<s + kStages - 1>{}, part, kParts); };
        multiply.template stage<false>(s * kStageBytes, kNext * kStageBytes, nullptr, nullptr, [](int) {}, refill, advance);
        return stage + s + 1 < k_stages;
      });
#pragma unroll
      for (int i = 0; i < ShareA::kRows; ++i) a_from[i] += kStages * kTileK * sizeof(T);
    }
    ptx::wait_copies<0>();
    // Found anew rather than held in registers through the loop.
    position = tile_position(tile, *p.schedule.tile_count, column_tiles, strip);
    rows = p.schedule.tiles[position.row_tile];
    column = position.column_tile * kTile, columns = min(kTile, p.N - column);

    const float own_weight = p.epilogue.row_weight && rows.expert >= 0 ? p.epilogue.row_weight[assignment[threadIdx.x]] : 1.f;
    const int claimed = threadIdx.x == 0 ? claim_tile(p.schedule) : 0;

    row_weight[threadIdx.x] = own_weight;
    __syncthreads();  // the stages are no longer read
    const int warp_column = column + multiply.warp_n, warp_columns = min(kBlock, columns - multiply.warp_n);
    const auto write = [&](auto whole) {
      write_block<T, whole>(p.epilogue, multiply, staged, assignment + multiply.warp_m, row_weight + multiply.warp_m, rows,
                            warp_column, warp_columns, p.S, p.map.top_k);
    };
    if (multiply.active) {
      const bool whole = p.epilogue.dot_with && p.epilogue.dot_vector && warp_columns == kBlock;
      whole ? write(Constant<true>{}) : write(Constant<false>{});
    }
    if (threadIdx.x == 0) *next_tile = claimed;
    __syncthreads();
  }
}

}  // namespace moe

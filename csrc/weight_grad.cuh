// The weight gradient: out[expert] (+)= sum over the expert's rows of weight * a_row^T * b_row. The ragged dimension is
// the one summed, so rows of both operands are looked up stage by stage.
#pragma once

#include "config.h"
#include "epilogue.cuh"
#include "load.cuh"
#include "schedule.cuh"

namespace moe {

template <typename Multiply, bool kVector>
__global__ void __launch_bounds__(Multiply::kThreads, 2) weight_grad(const __grid_constant__ WeightGradProblem p) {
  using T = typename Multiply::Value;
  constexpr int kThreads = Multiply::kThreads, kTileK = Multiply::kTileK, kStages = Multiply::kStages;
  constexpr Config kConfig{Op::weight_grad, sizeof(T) == 4 ? Path::fp32 : Path::mma, kTileK, kStages, kVector};
  constexpr int kStageBytes = kConfig.stage_bytes();
  constexpr int kOperandBytes = kStageBytes / 2;
  constexpr int kLooked = kStages - 1;  // stages whose rows are looked up ahead
  static_assert(kStagedBytes <= kStages * kStageBytes, "half a tile is staged where the stages were");
  static_assert(kTileK <= kThreads, "a thread looks after one row of each stage");

  using Operand = Share<T, kTileK, kTile, kThreads>;

  // Shared memory: the stages (A, then B), later half a tile of results; row tables; routing weights by stage.
  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared);
  int* a_row = reinterpret_cast<int*>(shared + kStages * kStageBytes);
  int* b_row = a_row + kLooked * kTileK;
  float* weight = reinterpret_cast<float*>(b_row + kLooked * kTileK);
  int* claimed = reinterpret_cast<int*>(shared + (kStages - 1) * kStageBytes);  // before this stage is first loaded

  const int m_tiles = (p.M + kTile - 1) / kTile, n_tiles = (p.N + kTile - 1) / kTile;
  const int expert_tiles = m_tiles * n_tiles;

  for (int tile = blockIdx.x, next_tile; tile < p.E * expert_tiles; tile = next_tile) {
    if (threadIdx.x == 0) *claimed = claim_tile(p.schedule);
    const int expert = tile / expert_tiles;
    const TilePosition position = tile_position(tile % expert_tiles, n_tiles, m_tiles, 8);
    const int m = position.column_tile * kTile, n = position.row_tile * kTile;
    const int m_left = min(kTile, p.M - m), n_left = min(kTile, p.N - n);
    const int begin = p.schedule.bounds[expert], end = p.schedule.bounds[expert + 1];
    const int k_stages = (end - begin + kTileK - 1) / kTileK;

    // Thread i < kTileK looks after row i of every stage: it finds the row's assignment a stage before the stage is
    // loaded, publishes where both operands have the row, and brings its routing weight.
    const auto look_up = [&](int stage) {
      const int row = begin + stage * kTileK + int(threadIdx.x);
      if (threadIdx.x >= kTileK || row >= end) return -1;
      return p.map.row_assignment ? p.map.row_assignment[row] : row;
    };
    const auto publish = [&](int stage, int assignment) {
      if (threadIdx.x >= kTileK) return;
      const int slot = stage % kLooked * kTileK + int(threadIdx.x);
      const int token = assignment / p.map.top_k, row = begin + stage * kTileK + int(threadIdx.x);
      a_row[slot] = p.a.gather ? token : row;
      b_row[slot] = p.b.gather ? token : row;
    };
    const char* a_own = p.a.data + int64_t(m) * sizeof(T) + Operand::chunk() * 16;
    const char* b_own = p.b.data + int64_t(n) * sizeof(T) + Operand::chunk() * 16;
    const auto load = [&](int stage, int assignment, int part, auto parts) {
      constexpr int kParts = decltype(parts)::value;
      if (stage >= k_stages) return;
      const uint32_t to = ptx::shared_address(shared) + stage % kStages * kStageBytes;
      const int slot = stage % kLooked * kTileK, rows_left = end - begin - stage * kTileK;
      const auto live = [&](int i) { return Operand::first() + i < rows_left; };
      load_tile<Operand, kVector, kParts>(
          to, part, m_left, [&](int i) { return row_address(a_own, a_row[slot + Operand::first() + i], p.a.row_bytes); },
          live);
      load_tile<Operand, kVector, kParts>(
          to + kOperandBytes, part, n_left,
          [&](int i) { return row_address(b_own, b_row[slot + Operand::first() + i], p.b.row_bytes); }, live);
      if (part == 0 && p.row_weight && threadIdx.x < kTileK) {
        ptx::copy_4_or_zero(ptx::shared_address(weight + stage % kStages * kTileK + threadIdx.x),
                            p.row_weight + assignment, assignment >= 0);
      }
    };
    const auto advance = [] {
      ptx::commit_copies();  // an empty group where nothing was left to load, so that the count tells the stage
      ptx::wait_copies<kStages - 2>();
      __syncthreads();  // the next stage has landed for everyone, and everyone is done with this one
    };

    int first_assignments[kLooked], next = look_up(kLooked);
#pragma unroll
    for (int stage = 0; stage < kLooked; ++stage) first_assignments[stage] = look_up(stage);
#pragma unroll
    for (int stage = 0; stage < kLooked; ++stage) publish(stage, first_assignments[stage]);
    __syncthreads();
    next_tile = *claimed;
#pragma unroll
    for (int stage = 0; stage < kLooked; ++stage) {
      load(stage, first_assignments[stage], 0, std::integral_constant<int, 1>{});
      if (stage < kLooked - 1) ptx::commit_copies();
    }
    __syncthreads();  // the tables of the first stages have been read
    publish(kLooked, next);
    advance();

    Multiply multiply(m_left, n_left);
    const auto operand = [&](int stage) { return shared + stage % kStages * kStageBytes; };
    const auto weights = [&](int stage) { return p.row_weight ? weight + stage % kStages * kTileK : nullptr; };
    if (k_stages) multiply.begin(operand(0), operand(0) + kOperandBytes, weights(0));
    for (int stage = 0; stage < k_stages; ++stage) {
      const int loaded = next;
      multiply.stage(
          operand(stage), operand(stage) + kOperandBytes, weights(stage), operand(stage + 1),
          operand(stage + 1) + kOperandBytes, weights(stage + 1),
          [&](int part, auto parts) {
            load(stage + kLooked, loaded, part, parts);
            if (part == 0) next = look_up(stage + kLooked + 1);  // arrives while the stage is multiplied
          },
          [&] {
            publish(stage + kLooked + 1, next);
            advance();
          });
    }
    ptx::wait_copies<0>();

    for (int half = 0; half < 2; ++half) {
      if (k_stages == 0 && p.accumulate) break;  // nothing to add
      const int first = half * kStagedRows;
      __syncthreads();  // the stages, or the half before, are no longer read
      multiply.write_half(staged, half);
      __syncthreads();
      for (int i = threadIdx.x / 16; i < min(kStagedRows, m_left - first); i += kThreads / 16) {
        const int at = threadIdx.x % 16 * 8;
        Eight<float> v = load_8(staged + i * kStagedPitch + at, 8, true);
        const int64_t index = expert * p.out_expert_stride + (m + first + i) * p.out_stride + n + at;
        if (p.accumulate) {
          const Eight<float> old = load_8(p.out, p.out_type, index, n_left - at, p.out_vector);
#pragma unroll
          for (int j = 0; j < 8; ++j) v.value[j] += old.value[j];
        }
        store_8(p.out, p.out_type, index, v, n_left - at, p.out_vector);
      }
    }
    __syncthreads();
  }
}

}  // namespace moe

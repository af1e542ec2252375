// The weight gradient: out[expert] (+)= sum over the expert's rows of weight * a_row^T * b_row. The ragged dimension is
// the one summed, so the rows of both operands are looked up stage by stage. The loop is unrolled as in gemm.cuh.
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
  constexpr int kParts = Multiply::kParts;
  constexpr Config kConfig{Op::weight_grad, sizeof(T) == 4 ? Path::fp32 : Path::mma, kTileK, kStages, kVector};
  constexpr int kStageBytes = kConfig.stage_bytes(), kOperandBytes = kStageBytes / 2;
  static_assert(kStagedBytes <= kStages * kStageBytes, "half a tile is staged where the stages were");
  static_assert(kTileK <= kThreads, "a thread looks after a row of each stage");
  using Operand = Share<T, kTileK, kTile, kThreads>;

  // Shared memory: the stages (A, then B), later half a tile of results; for each stage, the token and the routing weight
  // of each row. A thread's rows of `token` lie side by side.
  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared);
  int* token = reinterpret_cast<int*>(shared + kStages * kStageBytes);
  unsigned char* weight = reinterpret_cast<unsigned char*>(token + kStages * kTileK);
  int* next_tile = reinterpret_cast<int*>(staged + kTile);  // in the padding of a staged row
  constexpr int kWeightBytes = kTileK * 4;

  const int m_tiles = (p.M + kTile - 1) / kTile, n_tiles = (p.N + kTile - 1) / kTile;
  const int expert_tiles = m_tiles * n_tiles;

  for (int tile = blockIdx.x; tile < p.E * expert_tiles; tile = *next_tile) {
    const int expert = tile / expert_tiles;
    const TilePosition position = tile_position(tile % expert_tiles, n_tiles, m_tiles);
    const int m = position.column_tile * kTile, n = position.row_tile * kTile;
    const int m_left = min(kTile, p.M - m), n_left = min(kTile, p.N - n);
    const int begin = p.schedule.bounds[expert], end = p.schedule.bounds[expert + 1];
    const int k_stages = (end - begin + kTileK - 1) / kTileK;

    // Thread i < kTileK looks after row i of every stage: it finds the row's assignment and from it the token and the
    // weight, in time for them to arrive before they are published.
    const auto look_up = [&](int stage) {
      const int row = begin + stage * kTileK + int(threadIdx.x);
      if (threadIdx.x >= kTileK || row >= end) return -1;
      return p.map.row_assignment ? p.map.row_assignment[row] : row;
    };
    const auto weight_of = [&](int assignment) {
      return p.row_weight && assignment >= 0 ? p.row_weight[assignment] : 0.f;
    };
    const auto publish_token = [&](int slot, int assignment) {
      if (threadIdx.x >= kTileK) return;
      token[slot * kTileK + threadIdx.x % Operand::kStride * Operand::kRows + threadIdx.x / Operand::kStride] =
          assignment / p.map.top_k;
    };
    const auto publish_weight = [&](int slot, float value) {
      if (p.row_weight && threadIdx.x < kTileK) Multiply::store_weight(weight + slot * kWeightBytes, threadIdx.x, value);
    };

    __syncthreads();  // the next tile's number has been read by everyone
    int own[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) own[s] = look_up(s);
#pragma unroll
    for (int s = 0; s < kStages; ++s) publish_token(s, own[s]);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) publish_weight(s, weight_of(own[s]));
    int next = own[kStages - 1];  // whose weight is still to be published
    __syncthreads();

    const char* a_own = ptx::keep(p.a.data + int64_t(m) * sizeof(T) + Operand::chunk() * 16);
    const char* b_own = ptx::keep(p.b.data + int64_t(n) * sizeof(T) + Operand::chunk() * 16);
    const int a_valid = Operand::valid(m_left), b_valid = Operand::valid(n_left);
    const uint32_t to = ptx::shared_address(shared) + Operand::offset();
    int stage = 0;

    // Part of kParts of stage `stage` + ahead, in two steps: which tokens its rows are, and their loads. Past the last
    // stage this writes zeros that nobody reads.
    int tokens[Operand::kRows];
    const auto find = [&](auto ahead, int part, int parts) {
#pragma unroll
      for (int i = part * Operand::kRows / parts; i < (part + 1) * Operand::kRows / parts; ++i) {
        tokens[i] = token[ahead % kStages * kTileK + Operand::first() * Operand::kRows + i];
      }
    };
    const auto load = [&](auto ahead, int part, int parts) {
      constexpr int kSlot = ahead % kStages;
      const int row = begin + (stage + ahead) * kTileK + Operand::first();
#pragma unroll
      for (int i = part * Operand::kRows / parts; i < (part + 1) * Operand::kRows / parts; ++i) {
        const int own_row = row + i * Operand::kStride;
        const bool live = i * Operand::kStride < end - row;
        load_chunk<Operand, kVector>(to + kSlot * kStageBytes, i,
                                     row_address(a_own, p.a.gather ? tokens[i] : own_row, p.a.row_bytes), live ? a_valid : 0);
        load_chunk<Operand, kVector>(to + kSlot * kStageBytes + kOperandBytes, i,
                                     row_address(b_own, p.b.gather ? tokens[i] : own_row, p.b.row_bytes), live ? b_valid : 0);
      }
    };
    const auto advance = [] {
      ptx::commit_copies();
      ptx::wait_copies<kStages - 2>();
      __syncthreads();  // the next stage has landed for everyone, and everyone is done with this one
    };

    unrolled<kStages - 1>([&](auto ahead) {
      find(ahead, 0, 1);
      load(ahead, 0, 1);
      if (ahead < kStages - 2) ptx::commit_copies();
      return true;
    });
    advance();
    Multiply multiply(shared, shared + kOperandBytes, m_left, n_left);
    const auto run = [&](auto weighted) {
      constexpr bool kWeighted = weighted != 0;
      if (k_stages) multiply.template begin<kWeighted>(weight);
      for (; stage < k_stages; stage += kStages) {
        unrolled<kStages>([&](auto s) {
          constexpr int kNext = (s + 1) % kStages, kLoaded = (s + kStages - 1) % kStages;
          constexpr Constant<s + kStages - 1> kAhead;
          float next_weight;
          int after;
          const auto refill = [&](int part) {
            if (part == 0) find(kAhead, 0, kParts);
            load(kAhead, part, kParts);
            if (part + 1 < kParts) find(kAhead, part + 1, kParts);  // arrives while this part's step is multiplied
            if (part == 0) next_weight = weight_of(next), after = look_up(stage + s + kStages);
          };
          const auto publish_and_advance = [&] {
            publish_weight(kLoaded, next_weight);
            publish_token(s, after);
            next = after;
            advance();
          };
          multiply.template stage<kWeighted>(s * kStageBytes, kNext * kStageBytes, weight + s * kWeightBytes,
                                            weight + kNext * kWeightBytes, refill, publish_and_advance);
          return stage + s + 1 < k_stages;
        });
      }
    };
    p.row_weight ? run(Constant<1>{}) : run(Constant<0>{});
    ptx::wait_copies<0>();
    const int claimed = threadIdx.x == 0 ? claim_tile(p.schedule) : 0;  // arrives while the tile is written

    for (int half = 0; half < 2; ++half) {
      const int first = half * kStagedRows;
      __syncthreads();  // the stages, or the half before, are no longer read
      multiply.write_half(staged, half);
      __syncthreads();
      if (k_stages == 0 && p.accumulate) continue;  // nothing to add
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
    if (threadIdx.x == 0) *next_tile = claimed;
    __syncthreads();
  }
}

}  // namespace moe

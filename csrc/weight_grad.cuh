// The weight gradient: out[expert] (+)= sum over the expert's rows of weight * a_row^T * b_row. The ragged dimension is
// the one summed, so the rows of both operands are looked up stage by stage, ahead of their loads. The loop is as in gemm.cuh.
#pragma once

#include "config.h"
#include "epilogue.cuh"
#include "load.cuh"
#include "schedule.cuh"

namespace moe {

// A tile of the output and the rows it sums; expert past the last one: there are no more. Rows are unsigned throughout, for
// the loop counts past the last one, which may be the 2^31st.
struct WeightGradTile {
  int expert, m, n;
  unsigned begin, end;
};

template <int kStages, int kTileK>
struct WeightGradTables {
  WeightGradTile tile[2];  // the one being multiplied, and the next
  int unused[2];
  int source[kStages][kTileK];                                // of the rows of a stage, by its slot
  alignas(16) unsigned char weight[kStages + 1][kTileK * 4];  // the same, by stage (Multiply::store_weight)
};

// Looks up the next tile, by one thread, in steps of which each uses what the one before asked memory for.
struct WeightGradLookUp {
  static constexpr int kSteps = 3;

  int value[2];

  __device__ __forceinline__ void run(int step, const WeightGradProblem& p, WeightGradTile& tile) {
    const int m_tiles = pieces(p.M, kTile), n_tiles = pieces(p.N, kTile);
    switch (step) {
      case 0: value[0] = claim_tile(p.schedule); break;
      case 1: {
        const int expert = value[0] / (m_tiles * n_tiles);
        const TilePosition position = tile_position(value[0] % (m_tiles * n_tiles), n_tiles, m_tiles, kGradRaster);
        tile.expert = expert, tile.m = position.column_tile * kTile, tile.n = position.row_tile * kTile;
        value[0] = expert < p.E ? p.schedule.bounds[expert] : 0;
        value[1] = expert < p.E ? p.schedule.bounds[expert + 1] : 0;
        break;
      }
      case 2: tile.begin = value[0], tile.end = value[1]; break;
    }
  }
};

template <typename Multiply, bool kVector>
__global__ void __launch_bounds__(Multiply::kThreads, 2) weight_grad(const __grid_constant__ WeightGradProblem p) {
  using T = typename Multiply::Value;
  constexpr int kThreads = Multiply::kThreads, kTileK = Multiply::kTileK, kStages = Multiply::kStages;
  constexpr int kParts = Multiply::kParts, kStagedRows = Multiply::kStagedRows;
  constexpr Config kConfig{Op::weight_grad, sizeof(T) == 4 ? Path::fp32 : Path::mma, kTileK, kStages, kStagedRows, kVector};
  constexpr int kStageBytes = kConfig.stage_bytes(), kOperandBytes = kConfig.operand_bytes();
  constexpr int kPitch = kConfig.staged_pitch();
  constexpr bool kTwoLoops = kVector && Multiply::kUnrolled;  // as in gemm.cuh
  using Operand = typename Multiply::template Operand<Major::mn, kVector>;
  static_assert(kTileK <= kThreads, "a thread looks after a row of each stage");
  using Tables = WeightGradTables<kStages, kTileK>;
  static_assert(sizeof(Tables) == kConfig.table_bytes());

  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared + kConfig.staged_at());
  Tables& tables = *reinterpret_cast<Tables*>(shared + kConfig.tables_at());

  WeightGradLookUp look_up;
  if (threadIdx.x == 0) {
    look_up.value[0] = blockIdx.x;
    for (int step = 1; step < look_up.kSteps; ++step) look_up.run(step, p, tables.tile[0]);
  }
  __syncthreads();

  int slot = 0;  // of tables.tile
  int stages, stage;
  unsigned first_row;  // of this thread's rows of stage `stage`

  // Thread i < kTileK looks after row i of every stage: it finds the assignment, and from it the source and the weight, in
  // time for both to arrive before they are published; -1 and 0 past the last row.
  const bool looks = threadIdx.x < kTileK;
  const auto look = [&](int of_stage) {
    const WeightGradTile& tile = tables.tile[slot];
    const unsigned row = tile.begin + of_stage * kTileK + threadIdx.x;
    if (!looks || row >= tile.end) return -1;
    return p.map.row_assignment ? p.map.row_assignment[row] : int(row);
  };
  const auto weigh = [&](int assignment) { return p.row_weight && assignment >= 0 ? p.row_weight[assignment] : 0.f; };
  const auto weights = [&](int of_stage) { return tables.weight[of_stage % (kStages + 1)]; };
  const auto publish = [&](int of_slot, int of_stage, int assignment, float weight) {
    if (!looks) return;
    const unsigned row = ptx::keep(threadIdx.x);  // what follows from it is not held in registers
    // A thread's rows of a stage lie side by side.
    tables.source[of_slot][row % Operand::kStride * Operand::kRows + row / Operand::kStride] = assignment / p.map.top_k;
    if (p.row_weight) Multiply::store_weight(weights(of_stage), row, weight);
  };

  const char *a_own, *b_own;
  const uint32_t to = ptx::shared_address(shared) + Operand::offset();
  const auto aim = [&] {
    const WeightGradTile& tile = tables.tile[slot];
    const int bytes = Operand::bytes(ptx::keep(threadIdx.x));  // not held in a register from tile to tile
    a_own = ptx::keep(p.a.data + int64_t(tile.m) * sizeof(T) + bytes);
    b_own = ptx::keep(p.b.data + int64_t(tile.n) * sizeof(T) + bytes);
    stages = pieces(tile.end - tile.begin, kTileK);
    stage = 0;
    first_row = tile.begin + Operand::first();
  };
  int source[Operand::kRows];
  const auto find = [&](int of_slot) {
#pragma unroll
    for (int i = 0; i < Operand::kRows; ++i) source[i] = tables.source[of_slot][Operand::first() * Operand::kRows + i];
  };
  // Part of `parts` of stage `stage` + ahead, whose sources have been found. kInside: the tile is as large as any, and the
  // stage not the last one.
  const auto load = [&](auto inside, auto ahead, int part, int parts) {
    constexpr bool kInside = inside != 0;
    const int at = ahead % kStages * kStageBytes;
    const WeightGradTile& tile = tables.tile[slot];
    const int a_left = kInside ? kTile : Operand::left(p.M - tile.m);
    const int b_left = kInside ? kTile : Operand::left(p.N - tile.n);
#pragma unroll
    for (int i = part * Operand::kRows / parts; i < (part + 1) * Operand::kRows / parts; ++i) {
      const unsigned own_row = first_row + ahead * kTileK + i * Operand::kStride;
      const bool live = kInside || own_row < tile.end;
      load_row<Operand, kVector>(to + at, i, row_address(a_own, p.a.gather ? source[i] : own_row, p.a.row_bytes),
                                 live ? a_left : 0);
      load_row<Operand, kVector>(to + at + kOperandBytes, i,
                                 row_address(b_own, p.b.gather ? source[i] : own_row, p.b.row_bytes), live ? b_left : 0);
    }
  };
  const auto fill = [&](auto s) {
    if (s < stages) {
      find(s);
      load(Constant<0>{}, s, 0, 1);
    }
    ptx::commit_copies();
  };
  const auto advance = [&](int next_slot, int next_stage) {
    ptx::wait_copies<kStages - 2>();
    if constexpr (!Multiply::kWeighsFragments) {
      unsigned char* own_values = shared + next_slot * kStageBytes + Operand::offset();
      if (p.row_weight) Multiply::template weigh_own<Operand>(own_values, weights(next_stage));
    }
    __syncthreads();  // the next stage has landed for everyone, and everyone is done with this one
  };

  int first[kStages], own;  // assignments of the first stages' rows, and of the next stage's to be published
  const auto look_first = [&] {
#pragma unroll
    for (int s = 0; s < kStages; ++s) first[s] = look(s);
  };
  const auto publish_first = [&] {
    float weight[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) weight[s] = weigh(first[s]);
#pragma unroll
    for (int s = 0; s < kStages; ++s) publish(s, s, first[s], weight[s]);
  };
  aim();
  look_first();
  publish_first();
  __syncthreads();
  if (tables.tile[0].expert < p.E) fill(Constant<0>{});

  while (tables.tile[slot].expert < p.E) {
    own = look(kStages);
    count<kStages - 1>([&](auto s) {
      if (s > 0) fill(s);
      return true;
    });
    advance(0, 0);

    Multiply multiply(shared, shared + kOperandBytes);
    const bool whole = p.M - tables.tile[slot].m >= kTile && p.N - tables.tile[slot].n >= kTile;
    const auto run = [&](auto weighted) {
      auto scale = multiply.template begin<weighted != 0>(weights(0));
      int trip = 0;
      const int looking = max((stages + kStages - 1) / kStages - look_up.kSteps, 0);  // from this trip on, as in gemm.cuh
      const auto take = [&](auto inside) {
        constexpr bool kInside = inside != 0;
        if (threadIdx.x == 0 && trip >= looking) look_up.run(trip - looking, p, tables.tile[slot ^ 1]);
        count<kStages, Multiply::kUnrolled>([&](auto s) {
          constexpr int kFirst = kParts > 1;
          const auto ahead = s + Constant<kStages - 1>{};
          const int next_slot = (s + 1) % kStages;
          const bool more = kInside || stage + ahead < stages;
          int after;
          float weight;
          const auto refill = [&](int part) {
            if (part == 0 && more) find(ahead % kStages);
            if (part >= kFirst) {
              if (!kTwoLoops && whole && stage + ahead + 1 < stages) {
                load(Constant<1>{}, ahead, part - kFirst, kParts - kFirst);
              } else if (more) {
                load(inside, ahead, part - kFirst, kParts - kFirst);
              }
            }
            if (part == kParts - 1) ptx::commit_copies();
            if (part == 0) weight = weigh(own), after = look(stage + s + kStages + 1);
          };
          const auto publish_and_advance = [&] {
            publish(s, stage + s + kStages, own, weight);
            own = after;
            advance(next_slot, stage + s + 1);
          };
          const auto work = multiply.template work<kInside>(p.M - tables.tile[slot].m, p.N - tables.tile[slot].n);
          multiply.stage(work, s * kStageBytes, next_slot * kStageBytes, scale, weights(stage + s), weights(stage + s + 1),
                         refill, publish_and_advance);
          return kInside || stage + s + 1 < stages;
        });
        stage += kStages, ++trip, first_row += kStages * kTileK;
      };
      while (kTwoLoops && whole && stage + 2 * kStages - 1 < stages) take(Constant<1>{});
      while (stage < stages) take(Constant<0>{});
      if (threadIdx.x == 0) {
        for (int step = trip - looking; step < look_up.kSteps; ++step) look_up.run(step, p, tables.tile[slot ^ 1]);
      }
    };
    Multiply::kWeighsFragments && p.row_weight ? run(Constant<Multiply::kWeighsFragments>{}) : run(Constant<0>{});
    __syncthreads();  // the stages have been read, the next tile is known

    const WeightGradTile tile = tables.tile[slot];
    const int64_t start = tile.expert * p.out_expert_stride + tile.m * p.out_stride + tile.n;
    const int m_left = min(kTile, p.M - tile.m), n_left = min(kTile, p.N - tile.n);
    const bool nothing = stages == 0 && p.accumulate;
    slot ^= 1;
    aim();
    look_first();
    for (int row = 0; kStagedRows == kTile ? row == 0 : row < m_left; row += kStagedRows) {
      if (row) __syncthreads();  // the rows before are no longer read
      stage_rows<kPitch>(multiply, staged, row);
      if (row == 0) publish_first();
      __syncthreads();
      if (row == 0 && tables.tile[slot].expert < p.E) fill(Constant<0>{});
      if (nothing) continue;
      typed(p.out, p.out_type, [&](auto* out) {
        store_rows<kThreads, kPitch>(out + start + row * p.out_stride, p.out_stride, p.out_vector, staged, nullptr,
                                     min(kStagedRows, m_left - row), n_left, p.accumulate);
      });
    }
    __syncthreads();
  }
}

}  // namespace moe

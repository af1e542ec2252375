// The grouped GEMM: out = A * W[expert]^T over tiles of one expert's rows, rows of A read through an index, rows of the
// output written through one. `Multiply` says how a stage in shared memory becomes accumulators (simt/, mma/).
//
// Only eight warps run on an SM, so that every instruction beside the multiplications costs its latency. Hence addresses in
// global memory are held in registers and moved on once a trip; what the next tile needs is looked up, and its first stage
// loaded, before this one is written; and on the tensor cores (kUnrolled) the loop is unrolled over the stages, which makes
// all shared-memory addresses constant offsets, and trips of whole tiles away from the end of K ask no questions. The SM's
// two blocks write their tiles at different times: there one alone reaches nine tenths of the speed of both.
#pragma once

#include "activation.cuh"
#include "config.h"
#include "epilogue.cuh"
#include "load.cuh"
#include "schedule.cuh"

namespace moe {

// A tile of the output; rows 0: there are no more.
struct alignas(16) GemmTile {
  int expert, row, rows, column;
};

// What a block knows of tiles while it multiplies. Of the two slots one is the tile in hand, the other the next.
struct GemmTables {
  GemmTile tile[2];
  int row[kTile];  // the assignments of the tile in hand; between tiles those of the next one, then their sources
  int second;      // ~ the number of a short tile that comes with the one looked up last, or 0
  int unused[3];
};

// Looks up a tile and its assignments, by one warp, in steps of which each uses what the one before asked memory for.
struct GemmLookUp {
  static constexpr int kSteps = 3, kOwn = kTile / 32;  // rows a lane looks up

  int value[kOwn];  // asked for by the last step

  __device__ __forceinline__ void run(int step, const GemmProblem& p, GemmTables& tables, int slot) {
    const int lane = threadIdx.x % 32;
    GemmTile& tile = tables.tile[slot];
    switch (step) {
      case 0: {  // which tile, or pair of short ones
        if (lane == 0) value[0] = tables.second ? tables.second : claim_tile(p.schedule);
        break;
      }
      case 1: {  // which rows and columns
        const int claimed = __shfl_sync(~0u, value[0], 0);
        const int column_tiles = pieces(p.N, kTile), pairs = pieces(column_tiles, 2);
        const int row_tiles = *p.schedule.tile_count, short_pairs = *p.schedule.short_count * pairs;
        const int number = claimed - short_pairs;  // of the other tiles
        const bool is_short = number < 0, exists = number < row_tiles * column_tiles;
        const int short_tile = claimed < 0 ? ~claimed : claimed / pairs * column_tiles + claimed % pairs * 2;
        TilePosition position = tile_position(!is_short && exists ? number : 0, max(row_tiles, 1), column_tiles, p.raster);
        if (is_short) position = {p.schedule.tiles_size - 1 - short_tile / column_tiles, short_tile % column_tiles};
        if (lane == 0) {
          tile.column = position.column_tile * kTile;
          tables.second = is_short && claimed >= 0 && position.column_tile + 1 < column_tiles ? ~(short_tile + 1) : 0;
        }
        const RowTile rows = exists ? p.schedule.tiles[position.row_tile] : RowTile{-1, 0, 0, 0};
        value[0] = rows.expert, value[1] = rows.row, value[2] = rows.rows;
        break;
      }
      case 2: {  // which assignments; rows past the last repeat the first one, and their products are never written
        const int row = value[1], rows = value[2];
        if (lane == 0) tile.expert = value[0], tile.row = row, tile.rows = rows;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const int own = row + (lane + 32 * i < rows ? lane + 32 * i : 0);
          value[i] = p.map.row_assignment && rows ? p.map.row_assignment[own] : own;
        }
        break;
      }
    }
  }

  __device__ __forceinline__ void publish(GemmTables& tables) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) tables.row[threadIdx.x % 32 + 32 * i] = value[i];
  }
};

template <typename Multiply, bool kVector>
__global__ void __launch_bounds__(Multiply::kThreads, 2) gemm(const __grid_constant__ GemmProblem p) {
  using T = typename Multiply::Value;
  constexpr int kThreads = Multiply::kThreads, kTileK = Multiply::kTileK, kStages = Multiply::kStages;
  constexpr int kParts = Multiply::kParts, kStagedRows = Multiply::kStagedRows;
  constexpr Config kConfig{Op::gemm, sizeof(T) == 4 ? Path::fp32 : Path::mma, kTileK, kStages, kStagedRows, kVector};
  constexpr int kStageBytes = kConfig.stage_bytes(), kOperandBytes = kConfig.operand_bytes();
  constexpr int kPitch = kConfig.staged_pitch();
  constexpr bool kAlongK = Multiply::kMajorB == Major::k;  // a row of W is a column of the output, else a step of k
  // Trips without questions have a loop of their own, or else the loads alone are made twice.
  constexpr bool kTwoLoops = kVector && Multiply::kUnrolled;
  using ShareA = typename Multiply::template Operand<Major::k, kVector>;
  using ShareW = typename Multiply::template Operand<Multiply::kMajorB, kVector>;
  static_assert(sizeof(GemmTables) == kConfig.table_bytes());

  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared + kConfig.staged_at());
  int* assignment = reinterpret_cast<int*>(shared + kConfig.row_words_at());  // of the staged tile, as its weights are
  float* row_weight = reinterpret_cast<float*>(assignment + kTile);
  GemmTables& tables = *reinterpret_cast<GemmTables*>(shared + kConfig.tables_at());

  const bool looks_up = threadIdx.x < 32;
  GemmLookUp look_up;
  if (looks_up) {
    look_up.value[0] = blockIdx.x;
    for (int step = 1; step < look_up.kSteps; ++step) look_up.run(step, p, tables, 0);
    look_up.publish(tables);
  }
  __syncthreads();

  // This thread's values: every row of A has an address of its own, those of W lie w_row_bytes apart.
  const char* a_from[ShareA::kRows];
  const char* w_from;
  const uint32_t a_to = ptx::shared_address(shared) + ShareA::offset();
  const uint32_t w_to = ptx::shared_address(shared) + kOperandBytes + ShareW::offset();
  const int stages = pieces(p.K, kTileK);
  // The last trips look up the next tile, and not the first: a block that is slow must not claim what others could take.
  const int looking = max((stages + kStages - 1) / kStages - look_up.kSteps, 0) * kStages;
  int stage;
  const auto columns_of = [&](int slot) { return min(kTile, p.N - tables.tile[slot].column); };
  // How many columns of W lie between a tile's and its first one that are none of the tile's, for they may be two halves.
  constexpr int kHalf = kTile / 2;
  const auto gap_before = [&](int column) { return column >= kHalf ? p.gap : 0; };
  const auto side_by_side = [&](int columns) { return p.split ? columns / 2 : columns; };

  static_assert(kThreads == kTile, "a thread looks after a row");
  int own_assignment;  // not held during the loop

  // Turns to the tile in `slot`; all threads together, for the assignments are replaced by the rows' sources.
  const auto aim = [&](int slot) {
    const GemmTile& tile = tables.tile[slot];
    const unsigned thread = ptx::keep(threadIdx.x);  // what follows from it is not held in registers from tile to tile
    own_assignment = tables.row[thread];
    tables.row[thread] = p.a.gather ? own_assignment / p.map.top_k : tile.row + (int(thread) < tile.rows ? int(thread) : 0);
    __syncthreads();
    const char* data = p.a.data + ShareA::bytes(thread);
#pragma unroll
    for (int i = 0; i < ShareA::kRows; ++i) {
      a_from[i] = row_address(data, tables.row[ShareA::first(thread) + i * ShareA::kStride], p.a.row_bytes);
    }
    const int column = side_by_side(tile.column);
    w_from = p.w + max(tile.expert, 0) * p.w_expert_bytes;
    if constexpr (kAlongK) {
      w_from = row_address(w_from + ShareW::bytes(thread), unsigned(column) + ShareW::first(thread), p.w_row_bytes);
    } else {
      const int own = ShareW::chunk(thread) * ShareW::kValues, in_w = column + own + gap_before(own);
      w_from = row_address(w_from + int64_t(in_w) * sizeof(T), ShareW::first(thread), p.w_row_bytes);
    }
    stage = 0;
  };
  // Part of `parts` of stage `stage` + ahead. kInside: the tile is as wide as any and the stage not the last one; else
  // columns past the last read it again, for they are not written, and there are zeros past the last k.
  const auto load = [&](auto inside, int tile, auto ahead, int part, int parts) {
    constexpr bool kInside = inside != 0;
    const int columns = kInside ? kTile : side_by_side(columns_of(tile));
    const int slot = ahead % kStages * kStageBytes, k = ahead * kTileK;
    const int k_left = kInside ? kTileK : int(unsigned(p.K) - unsigned(stage * kTileK + k));
    const int a_left = kInside ? kTileK : ShareA::left(k_left);
    const uint32_t w_row_bytes = ptx::keep(p.w_row_bytes);  // no address of W is kept for the next stage
#pragma unroll
    for (int i = part * ShareA::kRows / parts; i < (part + 1) * ShareA::kRows / parts; ++i) {
      load_row<ShareA, kVector>(a_to + slot, i, a_from[i] + k * sizeof(T), a_left);
    }
#pragma unroll
    for (int i = part * ShareW::kRows / parts; i < (part + 1) * ShareW::kRows / parts; ++i) {
      if constexpr (kAlongK) {
        const int n = i * ShareW::kStride, before = p.split && n >= kHalf ? kHalf : 0;
        const int last = columns - 1 - ShareW::first() + before;
        const char* from = kInside ? row_address(w_from, n + gap_before(n), w_row_bytes)
                                   : w_from + (min(n, last) + gap_before(n)) * int64_t(w_row_bytes);
        load_row<ShareW, kVector>(w_to + slot, i, from + k * sizeof(T), a_left);
      } else {
        const int w_row = i * ShareW::kStride;
        // Where values go one by one there is no register to hold it in.
        const int before = ShareW::chunk(kVector ? threadIdx.x : ptx::keep(threadIdx.x)) * ShareW::kValues;
        const int w_left = kInside ? kTile : columns - (before & (p.split ? kHalf - 1 : kTile - 1));
        load_row<ShareW, kVector>(w_to + slot, i, row_address(w_from, k + w_row, w_row_bytes),
                                  ShareW::first() + w_row < k_left ? w_left : 0, p.split, p.gap);
      }
    }
  };
  const auto fill = [&](int slot, auto s) {
    if (s < stages && tables.tile[slot].expert >= 0) load(Constant<0>{}, slot, s, 0, 1);
    ptx::commit_copies();
  };
  const auto advance = [] {
    ptx::wait_copies<kStages - 2>();
    __syncthreads();  // the next stage has landed for everyone, and everyone is done with this one
  };

  aim(0);
  fill(0, Constant<0>{});
  for (int slot = 0; tables.tile[slot].rows > 0; slot ^= 1) {
    count<kStages - 1>([&](auto s) {
      if (s > 0) fill(slot, s);
      return true;
    });
    advance();
    tables.row[ptx::keep(threadIdx.x)] = own_assignment;

    Multiply multiply(shared, shared + kOperandBytes);
    const int end = tables.tile[slot].expert >= 0 ? stages : 0;  // of the stages to multiply
    // Stages below this one ask no questions: every warp has work and they are not the last one.
    const int inside_end = tables.tile[slot].rows > kTile / 2 && columns_of(slot) == kTile ? end - 1 : 0;
    auto scale = multiply.template begin<false>(nullptr);
    const auto trip = [&](auto inside) {
      constexpr bool kInside = inside != 0;
      if (looks_up && stage >= looking) look_up.run((stage - looking) / kStages, p, tables, slot ^ 1);
      count<kStages, Multiply::kUnrolled>([&](auto s) {
        const auto ahead = s + Constant<kStages - 1>{};
        const auto refill = [&](int part) {
          if (!kTwoLoops && stage + ahead < inside_end) {
            load(Constant<1>{}, slot, ahead, part, kParts);
          } else if (kInside || stage + ahead < stages) {
            load(inside, slot, ahead, part, kParts);
          }
          if (part == kParts - 1) ptx::commit_copies();
        };
        const auto work = multiply.template work<kInside>(tables.tile[slot].rows, p.split ? kTile : columns_of(slot));
        multiply.stage(work, s * kStageBytes, (s + 1) % kStages * kStageBytes, scale, nullptr, nullptr, refill, advance);
        return kInside || stage + s + 1 < stages;
      });
#pragma unroll
      for (int i = 0; i < ShareA::kRows; ++i) a_from[i] += kStages * kTileK * sizeof(T);
      w_from += kAlongK ? kStages * kTileK * sizeof(T) : uint64_t(kStages * kTileK) * p.w_row_bytes;
      stage += kStages;
    };
    while (kTwoLoops && stage + 2 * kStages - 2 < inside_end) trip(Constant<1>{});
    while (stage < end) trip(Constant<0>{});
    if (looks_up) {
      for (int step = max(stage - looking, 0) / kStages; step < look_up.kSteps; ++step) look_up.run(step, p, tables, slot ^ 1);
    }
    const unsigned own = ptx::keep(threadIdx.x);  // not held meanwhile either
    own_assignment = tables.row[own];
    const bool weighted = p.epilogue.row_weight && tables.tile[slot].expert >= 0;
    const float own_weight = weighted ? p.epilogue.row_weight[own_assignment] : 1.f;
    __syncthreads();  // the stages have been read, the next tile is known, the assignments are in registers
    if (looks_up) look_up.publish(tables);
    assignment[own] = own_assignment;
    row_weight[own] = own_weight;
    __syncthreads();

    const GemmTile tile = tables.tile[slot];
    const int columns = columns_of(slot);
    aim(slot ^ 1);
    fill(slot ^ 1, Constant<0>{});

    const Epilogue& to = p.epilogue;
    const bool combine = to.destination == Destination::token, by_row = to.destination == Destination::row;
    const bool dot = to.dot_with && tile.expert >= 0, through = to.through != Through::nothing;
    if (to.bias && tile.expert >= 0 && !through) {
      add_bias(multiply, static_cast<const T*>(to.bias) + tile.expert * to.bias_stride + tile.column, columns);
    }
    if (to.row_weight && !dot && !through) scale_rows(multiply, row_weight);
    // Where all rows are staged at once, the sums are not needed from then on, and the compiler must see it.
    for (int first = 0; kStagedRows == kTile ? first == 0 : first < tile.rows; first += kStagedRows) {
      const int rows = min(kStagedRows, tile.rows - first);
      if (first) __syncthreads();  // the rows before are no longer read
      stage_rows<kPitch>(multiply, staged, first);
      if (combine) before_bulk_add();
      __syncthreads();
      if (through) {
        const StagedRows<kPitch> staged_rows{staged};
        const int row = tile.row + first, thread = ptx::keep(threadIdx.x);
        if (to.through == Through::activation) {
          activate_rows<kThreads, kHalf, T>(to, tile.expert, p.N, row, tile.column, columns, staged_rows, rows, thread);
        } else {
          constexpr int kTogether = kStagedRows == kTile ? 4 : 1;  // the sums still take registers otherwise
          activation_grad_rows<kThreads, kTogether, T>(to, tile.expert, p.S, p.N, row, tile.column, columns, staged_rows,
                                                       assignment + first, row_weight + first, rows, thread);
        }
        continue;
      }
      if (dot) {
        const T* with = static_cast<const T*>(to.dot_with) + tile.column;
        if (by_row) with += (tile.row + first) * to.dot_with_stride;
        dot_rows<kThreads, kPitch>(with, to.dot_with_stride, by_row, to.dot_vector,
                                   to.dot + int64_t(tile.column / kTile) * p.S, staged, assignment + first,
                                   row_weight + first, rows, columns, p.map.top_k);
        if (combine) before_bulk_add();
        __syncthreads();
      }
      if (!to.out) continue;
      if (combine) {
        add_rows<kThreads, kPitch>(static_cast<float*>(to.out) + tile.column, to.out_stride, to.out_vector, staged,
                                   assignment + first, rows, columns, p.map.top_k);
      } else {
        store_product<kThreads, kPitch>(to, staged, tile.row + first, tile.column, assignment + first, rows, columns);
      }
    }
    __syncthreads();
  }
}

}  // namespace moe

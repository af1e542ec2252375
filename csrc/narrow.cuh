// The grouped GEMM for few rows an expert: each weight is read once, at the rate of memory, and that is all the time it takes.
//
// Weights are the wide side: a tile is 16 or 64 columns of the output, which are rows of W, by up to 8 or 32 rows of A. Blocks
// take tiles in turn, and what they bring is one stream over the ends of their tiles, so that memory always has something to
// do. There is no launch that makes a schedule: a block finds the tiles by itself, and of few assignments their order too. The
// second product of an MLP asks for its first weights while the last tiles of the first one end.
#pragma once

#include "activation.cuh"
#include "config.h"
#include "epilogue.cuh"
#include "integers.cuh"
#include "load.cuh"
#include "scan.cuh"
#include "schedule.cuh"
#include "start.cuh"

namespace moe {

// A tile, what is brought of it or multiplied; rows -1: there are no more.
template <int kRows>
struct NarrowTile {
  int expert, row, rows, column;
  int assignment[kRows];
};

// Where each group's rows and tiles end, those of group g in [g + 1]. Behind the experts may come the group of the rows past
// them.
struct Groups {
  uint16_t row[kNarrowExperts + 2], tile[kNarrowExperts + 2];
};

// Offsets become a running maximum within [0, S], as those of a schedule do; all threads together.
template <int kThreads>
__device__ __forceinline__ void find_groups(const GemmProblem& p, int tile_rows, Groups& groups, int* warp_totals) {
  int tiles_before = 0;
  if (threadIdx.x == 0) groups.row[0] = groups.tile[0] = 0;
  for (int first = 0; first < p.E; first += kThreads) {
    const int expert = first + threadIdx.x;
    const bool own = expert < p.E;
    const int given = own ? min(max(__ldcg(p.offs + expert), 0), p.S) : 0;
    const int highest = block_scan(given, Max{}, warp_totals);
    const int end = max(highest, int(groups.row[first]));
    if (own) groups.row[expert + 1] = end;
    __syncthreads();
    const int tiles = own ? pieces(end - groups.row[expert], tile_rows) : 0;
    const int tile = tiles_before + block_scan(tiles, Sum{}, warp_totals);
    if (own) groups.tile[expert + 1] = tile;
    tiles_before += warp_totals[kThreads / 32 - 1];
  }
  __syncthreads();
  if (p.groups > p.E && threadIdx.x == 0) {
    groups.row[p.groups] = p.S, groups.tile[p.groups] = groups.tile[p.E] + pieces(p.S - groups.row[p.E], tile_rows);
  }
  __syncthreads();
}

// Of few assignments: the tiles, and the assignment of each row. Group E is that of ids that are no expert's.
struct FewTiles {
  int count;
  uint16_t group[kFewRows];
  uint8_t row[kFewRows], rows[kFewRows], assignment[kFewRows];
};

// All threads together, of which each looks after an assignment.
template <int kThreads>
__device__ __forceinline__ void find_tiles(const GemmProblem& p, int tile_rows, FewTiles& tiles, int* scratch) {
  static_assert(kThreads == kFewRows);
  int* const groups = scratch;                                            // by assignment
  unsigned* const starts = reinterpret_cast<unsigned*>(scratch + kFewRows);  // a bit a row: whether a tile starts there
  const int assignment = threadIdx.x;
  const bool own = assignment < p.S;
  int group = 0;
  integers(p.ids, p.id_type, [&](const auto* ids) {
    if (own) group = expert_of(ids, assignment, p.E);
  });
  groups[assignment] = group;
  if (assignment < kFewRows / 32) starts[assignment] = 0;
  __syncthreads();
  int smaller = 0, before = 0, equal = 0;  // assignments of smaller groups; of the same one, those before this one and all
  for (int other = 0; other < p.S; ++other) {
    smaller += groups[other] < group;
    before += groups[other] == group && other < assignment;
    equal += groups[other] == group;
  }
  const int row = smaller + before;
  const bool starts_tile = own && before % tile_rows == 0 && group < p.groups;
  if (own) tiles.assignment[row] = assignment;
  if (starts_tile) atomicOr(&starts[row / 32], 1u << row % 32);
  __syncthreads();
  int tile = 0, count = 0;
#pragma unroll
  for (int i = 0; i < kFewRows / 32; ++i) {
    const unsigned earlier = i < row / 32 ? ~0u : i == row / 32 ? (1u << row % 32) - 1 : 0;
    tile += __popc(starts[i] & earlier), count += __popc(starts[i]);
  }
  if (starts_tile) tiles.group[tile] = group, tiles.row[tile] = row, tiles.rows[tile] = min(tile_rows, equal - before);
  if (assignment == 0) tiles.count = count;
  __syncthreads();
}

template <typename Multiply>
__global__ void __launch_bounds__(Multiply::kThreads, Multiply::kConfig.blocks_per_sm)
    narrow(const __grid_constant__ GemmProblem p) {
  using T = typename Multiply::Value;
  constexpr Config kConfig = Multiply::kConfig;
  constexpr int kThreads = Multiply::kThreads, kTileK = kConfig.tile_k, kStages = kConfig.stages;
  constexpr int kRows = kConfig.tile_rows, kColumns = kConfig.tile_columns, kHalf = kColumns / 2;
  constexpr int kBytesW = kColumns * kTileK * sizeof(T), kStageBytes = kConfig.stage_bytes(), kPitch = kConfig.staged_pitch();
  constexpr int kTables = kStages + 1;  // those of which stages may be in the ring, and the one in hand
  constexpr bool kAlongK = Multiply::kMajorW == Major::k;
  using ShareA = SwizzledShare<T, kRows, kTileK, kThreads>;
  using ShareW = std::conditional_t<kAlongK, SwizzledShare<T, kColumns, kTileK, kThreads>,
                                    SwizzledShare<T, kTileK, kColumns, kThreads>>;
  using Tile = NarrowTile<kRows>;
  static_assert(kConfig.tables_at() - kConfig.staged_at() >= (kFewRows + 4) * int(sizeof(int)), "scratch is there too");
  static_assert(kTables * sizeof(Tile) + sizeof(Groups) + kRows * sizeof(float) == kConfig.table_bytes());
  static_assert(sizeof(FewTiles) <= sizeof(Groups));

  extern __shared__ __align__(128) unsigned char shared[];
  float* const staged = reinterpret_cast<float*>(shared + kConfig.staged_at());
  Tile* const tiles = reinterpret_cast<Tile*>(shared + kConfig.tables_at());
  Groups& groups = *reinterpret_cast<Groups*>(tiles + kTables);
  FewTiles& few = *reinterpret_cast<FewTiles*>(&groups);
  float* const row_weight = reinterpret_cast<float*>(&groups + 1);  // of the tile in hand
  const uint32_t stages_at = ptx::shared_address(shared);
  if (!p.early) wait_for_launch_before();

  const Epilogue& to = p.epilogue;
  const bool combine = to.destination == Destination::token;
  const int column_tiles = pieces(p.N, kColumns);
  // Zeros for rows of no expert take one.
  const auto stages_of = [&](int expert) { return expert >= 0 ? max(pieces(p.K, kTileK), 1) : 1; };
  int* const scratch = reinterpret_cast<int*>(staged);
  if (p.ids) {
    find_tiles<kThreads>(p, kRows, few, scratch);
  } else {
    find_groups<kThreads>(p, kRows, groups, scratch);
  }
  const auto side_by_side = [&](int columns) { return p.split ? columns / 2 : columns; };

  // The tile that comes next (group -1: there are no more), and the assignments of this thread's rows of it.
  unsigned number = blockIdx.x;
  int next_group, next_row, next_rows, next_column, next_assignment[ShareA::kRows];
  const auto look_up_tile = [&] {
    const int row_tile = int(number / unsigned(column_tiles));
    next_group = -1, next_row = 0, next_rows = -1;
    if (p.ids) {
      if (row_tile < few.count) next_group = few.group[row_tile], next_row = few.row[row_tile], next_rows = few.rows[row_tile];
    } else if (row_tile < groups.tile[p.groups]) {
      next_group = last_up_to(groups.tile, p.groups, row_tile);
      next_row = groups.row[next_group] + (row_tile - groups.tile[next_group]) * kRows;
      next_rows = min(kRows, groups.row[next_group + 1] - next_row);
    }
    next_column = int(number % unsigned(column_tiles)) * kColumns;
    number += gridDim.x;
  };
  const auto own_row = [&](int i) { return next_row + max(min(ShareA::first() + i * ShareA::kStride, next_rows - 1), 0); };
  const auto look_up_rows = [&] {
#pragma unroll
    for (int i = 0; i < ShareA::kRows; ++i) {
      const int row = own_row(i);
      next_assignment[i] = p.ids ? few.assignment[row] : p.map.row_assignment ? p.map.row_assignment[row] : row;
    }
  };

  // What is being brought: stage `at` of the `stages` of a tile of so many rows and columns, to a slot of the ring. Weights are
  // asked for first; which rows the first of them meet is looked up meanwhile.
  const char *a_from[ShareA::kRows], *w_from;
  int at = 0, stages = 0, rows = 0, columns = 0, slot = 0, table = kTables - 1;  // as behind a tile
  bool works = false, looked_up = false;
  const auto turn_to_next = [&] {
    const int expert = next_group < p.E ? next_group : -1, column = side_by_side(next_column);
    rows = next_rows, works = rows > 0 && expert >= 0, stages = stages_of(expert);
    columns = side_by_side(min(kColumns, p.N - next_column));
    if (++table == kTables) table = 0;
    Tile& tile = tiles[table];
    if (threadIdx.x == 0) tile.expert = expert, tile.row = next_row, tile.rows = rows, tile.column = next_column;
    w_from = p.w + max(expert, 0) * p.w_expert_bytes;
    if constexpr (kAlongK) {
      w_from = row_address(w_from + ShareW::bytes(), unsigned(column) + ShareW::first(), p.w_row_bytes);
    } else {
      const int own = ShareW::chunk() * ShareW::kValues, in_w = column + own + (own >= kHalf ? p.gap : 0);
      w_from = row_address(w_from + int64_t(in_w) * sizeof(T), ShareW::first(), p.w_row_bytes);
    }
    at = 0;
  };
  const auto bring_weights = [&] {
    const uint32_t to_slot = stages_at + slot * kStageBytes + ShareW::offset();
    const int k = at * kTileK, k_left = works ? p.K - k : 0;
#pragma unroll
    for (int i = 0; i < ShareW::kRows; ++i) {
      if constexpr (kAlongK) {
        const int n = i * ShareW::kStride + ShareW::first();  // of the tile's columns
        const bool second = n >= kHalf, inside = n - (second && p.split ? kHalf : 0) < columns;
        const char* from = row_address(w_from + k * sizeof(T), i * ShareW::kStride + (second ? p.gap : 0), p.w_row_bytes);
        load_row<ShareW, true>(to_slot, i, from, inside ? ShareW::left(k_left) : 0);
      } else {
        const int own = ShareW::chunk() * ShareW::kValues, w_left = columns - (p.split ? own % kHalf : own);
        const char* from = row_address(w_from, k + i * ShareW::kStride, p.w_row_bytes);
        load_row<ShareW, true>(to_slot, i, from, ShareW::first() + i * ShareW::kStride < k_left ? w_left : 0);
      }
    }
  };
  const auto aim_rows = [&] {
#pragma unroll
    for (int i = 0; i < ShareA::kRows; ++i) {
      const int source = p.a.gather ? next_assignment[i] / p.map.top_k : own_row(i);
      a_from[i] = row_address(p.a.data + ShareA::bytes(), source, p.a.row_bytes);
      if (ShareA::chunk() == 0) tiles[table].assignment[ShareA::first() + i * ShareA::kStride] = next_assignment[i];
    }
    look_up_tile();
  };
  const auto bring_rows = [&] {
    const uint32_t to_slot = stages_at + slot * kStageBytes + kBytesW + ShareA::offset();
    const int k = at * kTileK, k_left = works ? p.K - k : 0;
#pragma unroll
    for (int i = 0; i < ShareA::kRows; ++i) {
      if (ShareA::first() + i * ShareA::kStride >= rows) continue;  // rows that are not there are multiplied, never written
      load_row<ShareA, true>(to_slot, i, a_from[i] + k * sizeof(T), ShareA::left(k_left));
    }
  };
  const auto bring = [&](bool first = false) {
    const bool turns = at == stages && rows >= 0;
    if (turns) turn_to_next();
    bring_weights();
    if (first) {  // in this order: when the next launch begins, all before this one has ended
      wait_for_launch_before();
      let_next_launch_begin();
    }
    // The next tile's rows are asked for one stage into this one; where it has no other, when they are needed.
    if (turns ? !looked_up : at == 1) look_up_rows();
    looked_up = !turns;
    if (turns) aim_rows();
    bring_rows();
    ptx::commit_copies();
    ++at;
    if (++slot == kStages) slot = 0;
  };

  look_up_tile();
  for (int s = 0; s < kStages - 1; ++s) bring(s == 0);
  fill_with_zeros<kThreads>(p.clear, blockIdx.x, gridDim.x);
  int taken = 0, own = 0;  // the slot and the tile that are multiplied
  while (true) {
    __syncthreads();
    const Tile& tile = tiles[own];
    if (++own == kTables) own = 0;
    if (tile.rows < 0) break;
    const int expert = tile.expert, tile_rows = tile.rows;  // read once, for each reading is waited for
    const bool weighted = to.row_weight && expert >= 0 && int(threadIdx.x) < tile_rows;
    const float own_weight = weighted ? to.row_weight[tile.assignment[threadIdx.x]] : 1.f;
    const int tile_stages = stages_of(expert);
    Multiply multiply;
    for (int s = 0; s < tile_stages; ++s) {
      ptx::wait_copies<kStages - 2>();
      __syncthreads();  // the stage has landed for everyone, and everyone is done with the one before
      bring();
      const uint32_t w = stages_at + taken * kStageBytes;
      if (expert >= 0) multiply.stage(w, w + kBytesW, tile_rows);
      if (++taken == kStages) taken = 0;
    }

    if (threadIdx.x < kRows) row_weight[threadIdx.x] = own_weight;
    __syncthreads();
    const bool activates = to.through == Through::activation;
    const int inside = min(kColumns, p.N - tile.column);
    const T* bias = static_cast<const T*>(to.bias);
    bias = bias && expert >= 0 && !activates ? bias + expert * to.bias_stride + tile.column : nullptr;
    constexpr int kTogether = kConfig.staged_rows;
#pragma unroll
    for (int first = 0; first < kRows; first += kTogether) {
      const int together = min(kTogether, tile_rows - first), row = tile.row + first;
      if (together <= 0) break;
      if (first) __syncthreads();  // the rows before are no longer read
      multiply.stage_rows(first, staged, [&](int row_staged, int column, float sum) {
        if (bias && column < inside) sum += float(bias[column]);
        staged[row_staged * kPitch + column] = activates ? sum : sum * row_weight[first + row_staged];
      });
      if (combine) before_bulk_add();
      __syncthreads();
      if (activates) {
        activate_rows<kThreads, kHalf, T>(to, expert, p.N, row, tile.column, inside, StagedRows<kPitch>{staged}, together,
                                          threadIdx.x);
      } else if (combine) {
        add_rows<kThreads, kPitch>(static_cast<float*>(to.out) + tile.column, to.out_stride, to.out_vector, staged,
                                   tile.assignment + first, together, inside, p.map.top_k);
      } else {
        store_product<kThreads, kPitch>(to, staged, row, tile.column, tile.assignment + first, together, inside);
      }
    }
  }
  ptx::wait_copies<0>();
}

}  // namespace moe

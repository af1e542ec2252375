// The grouped GEMM on Hopper: out = A * W[expert]^T over tiles of 128 rows of one expert by kTileN columns.
//
// Three warpgroups. The first brings operands into a ring of stages in shared memory and runs ahead over the tiles; the other
// two take whole tiles in turn and write their results straight from registers, so that one multiplies while the other
// writes. Gathered rows come by cp.async, for the copy engine knows no index; whatever else is read comes by
// the copy engine. The two CTAs of a cluster take neighbouring row tiles, and where these have one expert each brings half
// of its weights for both: an SM's share of L2 reads is what else would set the pace.
#pragma once

#include <cuda.h>

#include "../config.h"
#include "../load.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../schedule.cuh"
#include "../start.cuh"
#include "write.cuh"

namespace moe::wgmma {

constexpr int kCluster = kHopperGemm.cluster(), kStages = kHopperGemm.stages;
// Of an SM's 64 K registers a thread of 384 gets 168 at first; bringing takes few of them, multiplying many.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

constexpr int kNone = -1, kNoMore = -2;  // instead of an expert
constexpr int kGathering = 1, kTurn = 2;  // named barriers: of the producer; of each consumer

// W is brought in pieces, which the CTAs of a cluster take in turn where they share it: halves of its rows, or where it is
// contiguous along n 64 columns by half of k.
template <Major kMajorW, int kTileN>
struct Pieces {
  static constexpr bool kAlongK = kMajorW == Major::k;
  static constexpr int kColumns = kAlongK ? kTileK : 64, kRows = kAlongK ? kTileN / 2 : kTileK / 2;  // of a box
  static constexpr int kCount = kAlongK ? 2 : kTileN / 64 * 2;
};

template <Major kMajorW, Term kTerm>
constexpr int kTileColumns = tile_columns(kHopperGemm, through(kTerm), kMajorW);

template <typename T, Major kMajorW, Term kTerm>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    gemm(const __grid_constant__ GemmProblem p, const __grid_constant__ CUtensorMap a_map,
         const __grid_constant__ CUtensorMap w_map) {
  constexpr Config kConfig = kHopperGemm;
  constexpr int kTileN = kTileColumns<kMajorW, kTerm>;
  constexpr int kBytesA = kTile * kTileK * 2, kBytesW = kTileN * kTileK * 2, kStageBytes = kBytesA + kBytesW;
  static_assert(sizeof(T) == 2 && kStageBytes <= kConfig.stage_bytes() && kConfig.tile_k == kTileK);
  constexpr int kWarpBytes = (kConfig.tables_at() - kStages * kStageBytes) / (kConsumers * 4) / 16 * 16;  // behind the ring
  static_assert(Writer<T, kTerm, kTileN>::kWarpBytes <= kWarpBytes);
  static_assert(kConfig.table_bytes() == kConsumers * sizeof(Tile) + (2 * kStages + 2 * kConsumers) * 8);

  extern __shared__ __align__(1024) unsigned char shared[];
  Tile* const tiles = reinterpret_cast<Tile*>(shared + kConfig.tables_at());
  const uint32_t stages_at = ptx::shared_address(shared), barriers = ptx::shared_address(tiles + kConsumers);
  const auto full = [&](int slot) { return barriers + slot * 8; };
  const auto empty = [&](int slot) { return barriers + (kStages + slot) * 8; };
  const auto tile_full = [&](int table) { return barriers + (2 * kStages + table) * 8; };
  const auto tile_empty = [&](int table) { return barriers + (2 * kStages + kConsumers + table) * 8; };
  const int rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStages; ++slot) {
      // Every copying thread, and who asks the copy engine; or every warp, so that none falls a round of the ring behind.
      ptx::barrier_init(full(slot), p.a.gather ? kWarpgroup + 1 : kWarpgroup / 32);
      ptx::barrier_init(empty(slot), kCluster * 4);  // every warp of a tile's consumers
    }
    for (int table = 0; table < kConsumers; ++table) {
      ptx::barrier_init(tile_full(table), kWarpgroup);
      ptx::barrier_init(tile_empty(table), kWarpgroup);
    }
    ptx::barrier_init_fence();
  }
  ptx::cluster_barrier();
  wait_for_launch_before();

  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  const int warp = thread / 32, lane = thread % 32;
  Turn<kStages> turn;
  if (warpgroup == 0) {
    ptx::release_registers<kProducerRegisters>();
    // The next tile, looked up in steps, of which each uses what the one before asked memory for.
    int number = blockIdx.x / kCluster;
    RowTile rows;
    int other_expert, column, assignment;  // the other CTA's expert; the assignment of row `thread`
    float weight;
    const auto look_up = [&](int step) {
      if (step == 0) {
        const int row_tiles = *p.schedule.tile_count, row_pairs = pieces(row_tiles, kCluster);
        const int column_tiles = pieces(ptx::keep(p.N), kTileN);  // not held meanwhile
        const bool done = number >= row_pairs * column_tiles;
        const Raster raster{ptx::keep(p.raster.group), ptx::keep(p.raster.strip)};
        const TilePosition position = tile_position(done ? 0 : number, max(row_pairs, 1), column_tiles, raster);
        const int own = position.row_tile * kCluster + rank, other = own ^ 1;
        const RowTile none{done ? kNoMore : kNone, 0, 0, 0};
        rows = !done && own < row_tiles ? p.schedule.tiles[own] : none;
        other_expert = !done && other < row_tiles ? p.schedule.tiles[other].expert : kNone;
        column = position.column_tile * kTileN;
        number += gridDim.x / kCluster;
      } else if (step == 1) {
        const int row = rows.row + (thread < rows.rows ? thread : 0);
        assignment = p.map.row_assignment && rows.rows ? p.map.row_assignment[row] : row;
      } else {
        weight = p.epilogue.row_weight && rows.expert >= 0 ? p.epilogue.row_weight[assignment] : 1.f;
      }
    };
    constexpr int kSteps = 3;
    for (int step = 0; step < kSteps; ++step) look_up(step);

    // A thread copies a 16-byte chunk of every 16th row.
    constexpr int kCopied = kTile / 16;
    const int chunk = thread % 8, first = thread / 8;
    const auto to_slot = [&](int slot) { return stages_at + slot * kStageBytes + first * 128 + (chunk ^ first % 8) * 16; };
    // The sources of the stages of a trip differ by constants, which costs no instruction.
    constexpr int kTrip = 4;

    Turn<kConsumers> table;
    const auto tell = [&] {
      ptx::barrier_wait(tile_empty(table.slot), table.parity ^ 1);
      Tile& tile = tiles[table.slot];
      ptx::named_barrier(kGathering, kWarpgroup);  // every producing thread has read the sources of the tile before
      if (thread == 0) {
        tile.expert = rows.expert, tile.row = rows.row, tile.rows = rows.rows, tile.column = column;
        // The cluster's two CTAs go through the ring together.
        tile.stages = rows.expert >= 0 || other_expert >= 0 ? pieces(ptx::keep(p.K), kTileK) : 0;
        tile.shares = rows.expert >= 0 && rows.expert == other_expert;
        tile.slot = turn.slot, tile.parity = turn.parity, tile.told = table.parity;
      }
      tile.assignment[thread] = assignment;
      tile.weight[thread] = weight;
      ptx::barrier_arrive(tile_full(table.slot));
    };
    for (;; table.advance()) {
      tell();
      if (rows.expert == kNoMore) break;
      const bool live = rows.expert >= 0;
      const Tile& tile = tiles[table.slot];
      ptx::named_barrier(kGathering, kWarpgroup);  // they read the tile too
      const int stages = tile.stages;
      const char* from[kCopied];
      if (p.a.gather) {
#pragma unroll
        for (int i = 0; i < kCopied; ++i) {
          from[i] = row_address(p.a.data + chunk * 16, tile.assignment[first + i * 16] / p.map.top_k, p.a.row_bytes);
        }
      }
      int step = 0;
#pragma unroll 1
      for (int begin = 0; begin < stages || step < kSteps; begin += kTrip) {
#pragma unroll
        for (int s = 0; s < kTrip; ++s) {
          if (begin + s >= stages) break;
          const int k = (begin + s) * kTileK;
          const uint32_t a = stages_at + turn.slot * kStageBytes, w = a + kBytesA, landed = full(turn.slot);
          ptx::barrier_wait(empty(turn.slot), turn.parity ^ 1);
          __syncwarp();  // where lane 0 speaks for all
          if (lane == 0 && warp == s) {
            if (live) {
              ptx::barrier_arrive_expecting(landed, kBytesW + (p.a.gather ? 0 : kBytesA));
              if (!p.a.gather) ptx::load_box(a, &a_map, landed, k, tile.row);
              using Piece = Pieces<kMajorW, kTileN>;
              const int column = p.split ? tile.column / 2 : tile.column;
#pragma unroll 1
              for (int piece = tile.shares ? rank : 0; piece < Piece::kCount; piece += tile.shares ? kCluster : 1) {
                // From the start of the tile; boxes of 128 bytes a row lie one after the other.
                const int part = Piece::kAlongK ? piece : piece / 2, n = part * (Piece::kAlongK ? Piece::kRows : 64);
                const int depth = Piece::kAlongK ? 0 : piece % 2 * Piece::kRows, in_w = column + n + part * p.gap;
                const int x = Piece::kAlongK ? k : in_w, y = Piece::kAlongK ? in_w : k + depth;
                if (tile.shares) {
                  ptx::load_box_for_all<kCluster>(w + (n + depth) * 128, &w_map, landed, x, y, tile.expert);
                } else {
                  ptx::load_box(w + (n + depth) * 128, &w_map, landed, x, y, tile.expert);
                }
              }
            } else {
              ptx::barrier_arrive(landed);
            }
          } else if (!p.a.gather && lane == 0) {
            ptx::barrier_arrive(landed);
          }
          if (p.a.gather) {
            const bool inside = live && k + chunk * 8 < p.K;
            const uint32_t slot_to = to_slot(turn.slot);
#pragma unroll
            for (int i = 0; i < kCopied; ++i) ptx::copy_16_or_zero(slot_to + i * 16 * 128, from[i] + s * 128, inside);
            ptx::barrier_arrive_after_copies(landed);
          }
          turn.advance();
        }
#pragma unroll
        for (int i = 0; i < kCopied; ++i) from[i] += kTrip * 128;
        if (step < kSteps) look_up(step++);
      }
    }
    table.advance();
    tell();  // the other consumer too
  } else {
    ptx::take_registers<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const auto release = [&](int slot) {
      if (lane < kCluster) ptx::barrier_arrive_cluster(ptx::barrier_of(empty(slot), lane));
    };
    // The last turn is taken by no one.
    const auto pass_on = [&] { ptx::named_barrier_arrive(kTurn + (consumer ^ 1), kConsumers * kWarpgroup); };
    if (consumer == 1) pass_on();  // the other one is the first
    const Tile& tile = tiles[consumer];
    const uint32_t operands_at = ptx::within_cta(stages_at);
    unsigned char* const own_bytes = shared + kStages * kStageBytes + (consumer * 4 + warp) * kWarpBytes;
    for (int told = 0;;) {
      ptx::barrier_wait(tile_full(consumer), told);
      if (tile.expert == kNoMore) break;
      const int stages = tile.stages;
      const bool works = tile.expert >= 0;
      turn = {tile.slot, tile.parity};
      const Writer<T, kTerm, kTileN> writer{p, tile, own_bytes};
      writer.begin();
      float sums[2][kTileN / 2] = {};
      // A consumer begins when all stages of the tile before have landed: a stage's mbarrier tells the phase it is in from the
      // one before and from no other.
      ptx::named_barrier(kTurn + consumer, kConsumers * kWarpgroup);
      const auto multiply = [&](auto halves, auto columns) {
        constexpr int kColumns = columns;
        int running = -1;  // the slot whose products may not have ended
#pragma unroll 1
        for (int s = 0; s < stages; ++s, turn.advance()) {
          ptx::barrier_wait(full(turn.slot), turn.parity);
          if (p.a.gather) ptx::fence_shared_for_async();  // cp.async writes as threads do
          // The same in all lanes, and known to be, so that descriptors are made once a warp.
          const uint32_t a = operands_at + __shfl_sync(~0u, turn.slot, 0) * kStageBytes, w = a + kBytesA;
          ptx::wgmma_fence();
#pragma unroll
          for (int k = 0; k < kTileK; k += 16) {
            // Eight rows of 128 bytes are one core; where n is contiguous, cores of 64 columns lie a whole stage apart.
            const uint64_t w_matrix = kMajorW == Major::k ? ptx::matrix_descriptor(w + k * 2, 0, 8 * 128)
                                                          : ptx::matrix_descriptor(w + k * 128, kTileK * 128, 8 * 128);
#pragma unroll
            for (int half = 0; half < halves; ++half) {
              const uint64_t a_matrix = ptx::matrix_descriptor(a + half * kRows * 128 + k * 2, 0, 8 * 128);
              float(&first_sums)[kColumns / 2] = reinterpret_cast<float(&)[kColumns / 2]>(sums[half]);
              ptx::Wgmma<T, kColumns, kMajorW == Major::mn>::multiply(first_sums, a_matrix, w_matrix);
            }
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          if (running >= 0) release(running);
          running = turn.slot;
        }
        pass_on();
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int half = 0; half < halves; ++half) ptx::wgmma_done(sums[half]);
        if (running >= 0) release(running);
      };
      // What lies outside of the matrices is not multiplied, as far as that goes in halves of rows and in 64 columns that are side
      // by side.
      const auto multiply_columns = [&](auto columns) {
        tile.rows <= kRows ? multiply(Constant<1>{}, columns) : multiply(Constant<2>{}, columns);
      };
      const int columns = kTerm == Term::activation ? kTileN : p.N - tile.column;
      if (works && columns <= 64) {
        multiply_columns(Constant<64>{});
      } else if (works && kTileN > 128 && columns <= 128) {
        multiply_columns(Constant<128>{});
      } else if (works) {
        multiply_columns(Constant<kTileN>{});
      } else {
#pragma unroll 1
        for (int s = 0; s < stages; ++s, turn.advance()) {
          ptx::barrier_wait(full(turn.slot), turn.parity);
          __syncwarp();  // the lanes that release speak for all
          release(turn.slot);
        }
        pass_on();
      }

      writer.write(sums);
      told = tile.told ^ 1;
      ptx::barrier_arrive(tile_empty(consumer));
    }
  }
  ptx::cluster_barrier();  // a CTA's shared memory outlives what the other one sends there
}

}  // namespace moe::wgmma

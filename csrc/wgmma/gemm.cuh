// The grouped GEMM on Hopper: out = A * W[expert]^T over tiles of 128 rows of one expert by kTileN columns.
//
// Three warpgroups. The first brings operands into a ring of stages in shared memory and runs ahead over the tiles; the other
// two take whole tiles in turn and write their results straight from registers, so that one multiplies while the other
// writes. Gathered rows come by cp.async, for the copy engine knows no index; whatever else is read comes by
// the copy engine. The two CTAs of a cluster take neighbouring row tiles, and where these have one expert each brings half
// of its weights for both: an SM's share of L2 reads is what else would set the pace.
#pragma once

#include <cuda.h>

#include "../activation.cuh"
#include "../config.h"
#include "../epilogue.cuh"
#include "../load.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../schedule.cuh"
#include "../start.cuh"
#include "warpgroups.cuh"

namespace moe::wgmma {

constexpr int kCluster = kHopperGemm.cluster(), kStages = kHopperGemm.stages;
// Of an SM's 64 K registers a thread of 384 gets 168 at first; bringing takes few of them, multiplying many.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

constexpr int kNone = -1, kNoMore = -2;  // instead of an expert
constexpr int kGathering = 1, kTurn = 2;  // named barriers: of the producer; of each consumer

// What the producer tells the consumers of a tile.
struct Tile {
  int expert, row, rows, column;  // expert kNone: this CTA has none, though the other one may; kNoMore: there are none
  int stages, slot, parity;       // how many, and where in the ring the first one is
  int shares;                     // the cluster's tiles have one expert
  int told;                       // the parity of being told of it, which the consumer has no register for meanwhile
  int assignment[kTile];
  float weight[kTile];
};

// W is brought in pieces, which the CTAs of a cluster take in turn where they share it: halves of its rows, or where it is
// contiguous along n 64 columns by half of k.
template <Major kMajorW, int kTileN>
struct Pieces {
  static constexpr bool kAlongK = kMajorW == Major::k;
  static constexpr int kColumns = kAlongK ? kTileK : 64, kRows = kAlongK ? kTileN / 2 : kTileK / 2;  // of a box
  static constexpr int kCount = kAlongK ? 2 : kTileN / 64 * 2;
};

// What there is besides products and weights; a bias may also be activated.
enum class Term { none, bias, dot, activation, activation_grad };

__host__ __device__ constexpr Through through(Term term) {
  return term == Term::activation        ? Through::activation
         : term == Term::activation_grad ? Through::activation_grad
                                         : Through::nothing;
}

template <Major kMajorW, Term kTerm>
constexpr int kTileColumns = tile_columns(kHopperGemm, through(kTerm), kMajorW);

template <typename T, Major kMajorW, Term kTerm>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    gemm(const __grid_constant__ GemmProblem p, const __grid_constant__ CUtensorMap a_map,
         const __grid_constant__ CUtensorMap w_map) {
  constexpr Config kConfig = kHopperGemm;
  constexpr int kTileN = kTileColumns<kMajorW, kTerm>, kFours = kTileN / 16;  // of each of a thread's rows
  constexpr int kBytesA = kTile * kTileK * 2, kBytesW = kTileN * kTileK * 2, kStageBytes = kBytesA + kBytesW;
  static_assert(sizeof(T) == 2 && kStageBytes <= kConfig.stage_bytes() && kConfig.tile_k == kTileK);
  constexpr int kWarpBytes = (kConfig.tables_at() - kStages * kStageBytes) / (kConsumers * 4) / 16 * 16;  // behind the ring
  static_assert(8 * kTileN * 2 <= kWarpBytes);  // what eight rows of a warp have their dots taken with
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
    const uint32_t with_at = ptx::shared_address(own_bytes) + lane / 4 * kTileN * 2;
    for (int told = 0;;) {
      ptx::barrier_wait(tile_full(consumer), told);
      if (tile.expert == kNoMore) break;
      const int stages = tile.stages;
      const bool works = tile.expert >= 0;
      turn = {tile.slot, tile.parity};
      const Epilogue& to = p.epilogue;
      const bool combine = to.destination == Destination::token, by_row = to.destination == Destination::row;
      const auto token_of = [&](int row) { return tile.assignment[row] / p.map.top_k; };
      // Brings what the dots of eight rows of this warp are taken with, while something else is done.
      const auto bring = [&](int eight) {
        const int row = eight / 2 * kRows + warp * 16 + eight % 2 * 8 + lane / 4, column = tile.column + lane % 4 * 8;
        const bool own = row < tile.rows;
        const int64_t with_row = by_row ? tile.row + (own ? row : 0) : token_of(row);
        const T* with = static_cast<const T*>(to.dot_with) + with_row * to.dot_with_stride + column;
#pragma unroll
        for (int i = 0; i < kTileN / 32; ++i) {
          const int chunk = i * 4 + lane % 4;
          ptx::copy_16_or_zero(with_at + (chunk ^ lane / 4) * 16, with + i * 32, own && i * 32 < p.N - column);
        }
        ptx::commit_copies();
      };
      if (kTerm == Term::dot && works) bring(0);
      float sums[2][kTileN / 2] = {};
      // A consumer begins when all stages of the tile before have landed: a stage's mbarrier tells the phase it is in from the
      // one before and from no other.
      ptx::named_barrier(kTurn + consumer, kConsumers * kWarpgroup);
      const auto multiply = [&](auto halves, auto columns) {
        constexpr int kColumns = decltype(columns)::value;
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
      // What lies outside of the matrices is not multiplied, as far as that goes in halves and in 64 columns that are side by
      // side.
      const bool low = tile.rows <= kRows;
      const auto multiply_rows = [&](auto columns) { low ? multiply(Constant<1>{}, columns) : multiply(Constant<2>{}, columns); };
      if (works && kTileN > 128 && through(kTerm) == Through::nothing && p.N - tile.column <= 128) {
        multiply_rows(Constant<128>{});
      } else if (works) {
        multiply_rows(Constant<kTileN>{});
      } else {
#pragma unroll 1
        for (int s = 0; s < stages; ++s, turn.advance()) {
          ptx::barrier_wait(full(turn.slot), turn.parity);
          __syncwarp();  // the lanes that release speak for all
          release(turn.slot);
        }
        pass_on();
      }

      if constexpr (through(kTerm) != Through::nothing) {
        // Few rows of a warp at a time, by way of shared memory.
        constexpr int kStagedRows = kTileN > 128 ? 4 : 8, kParts = 8 / kStagedRows;
        static_assert(kStagedRows * kTileN * 4 <= kWarpBytes);
        const StagedRows<kTileN, true> staged{reinterpret_cast<float*>(own_bytes)};
#pragma unroll 1
        for (int step = 0; step < 4 * kParts; ++step) {
          const int own_thread = int(ptx::keep(threadIdx.x) % kWarpgroup), lane = own_thread % 32;
          const int first = step / (2 * kParts) * kRows + own_thread / 32 * 16 + step % (2 * kParts) * kStagedRows;
          const int rows = min(kStagedRows, tile.rows - first), own = lane / 4 - step % kParts * kStagedRows;
          if (rows <= 0) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (step / kParts != half * 2 + i || unsigned(own) >= kStagedRows) continue;
              // The four columns of eight that a quarter of the warp writes are turned together.
              const uint32_t turned = own % 4 * 8, at = ptx::shared_address(staged.data + own * kTileN + lane % 4 * 2);
#pragma unroll
              for (int j = 0; j < kTileN / 8; ++j) {
                ptx::store_shared_8(at + (j * 8 ^ turned) * 4, sums[half][j * 4 + i * 2], sums[half][j * 4 + i * 2 + 1]);
              }
            }
          }
          __syncwarp();
          const int columns = min(kTileN, p.N - tile.column);
          with_form(to.activation, [&](auto form) {
            const int row = tile.row + first;
            if constexpr (kTerm == Term::activation) {
              activate_rows<32, kTileN / 2, true, T>(form, to, tile.expert, p.N, row, tile.column, columns, staged, rows, lane);
            } else {
              activation_grad_rows<32, kTileN, 4, true, T>(form, to, tile.expert, p.S, p.N, row, tile.column, columns, staged,
                                                           tile.assignment + first, tile.weight + first, rows, lane);
            }
          });
          __syncwarp();
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (tile.rows <= half * kRows) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            // What follows from the thread's number is not held from row to row.
            const int own_thread = int(ptx::keep(threadIdx.x) % kWarpgroup), lane = own_thread % 32;
            const int row = half * kRows + own_thread / 32 * 16 + i * 8 + lane / 4;  // of the tile
            const int own_column = tile.column + fours_column(lane);
            const bool own = row < tile.rows;
            const auto inside = [&](int j) { return own && own_column < p.N - j * 16; };  // N may be near 2^31

            if (kTerm == Term::dot && works) {
              ptx::wait_copies<0>();
              __syncwarp();
              float dot = 0.f;
#pragma unroll
              for (int j = 0; j < kTileN / 8; ++j) {
                const float2 with = unpack(ptx::load_shared_4(with_at + (j ^ lane / 4) * 16 + lane % 4 * 4), T());
                if (tile.column + j * 8 >= p.N) continue;  // an infinite row of A makes NaN of the zeros there
                const float* pair = &sums[half][j * 4 + i * 2];
                dot = fmaf(pair[0], with.x, fmaf(pair[1], with.y, dot));
              }
              __syncwarp();
              if (i == 0 || (half == 0 && tile.rows > kRows)) bring(half * 2 + i + 1);
              dot += __shfl_xor_sync(~0u, dot, 1);
              dot += __shfl_xor_sync(~0u, dot, 2);
              // A partial sum a tile, of which there are fewer than `dot` has room for.
              if (own && lane % 4 == 0) to.dot[int64_t(tile.column / kTileN) * p.S + tile.assignment[row]] = dot;
            }
            if (!to.out) continue;

            const int by_map = combine ? token_of(row) : tile.assignment[row];
            const int64_t out_row = by_row ? tile.row + row : by_map;
            char* out = static_cast<char*>(to.out) + (out_row * to.out_stride + own_column) * size_of(to.out_type);
            const float weight = tile.weight[row];
            const T* bias = nullptr;
            if (kTerm == Term::bias && works) bias = static_cast<const T*>(to.bias) + tile.expert * to.bias_stride + own_column;
#pragma unroll
            for (int j = 0; j < kFours; ++j) {
              Four<float> four = exchange_for_four(sums[half], i, j, lane);
              if (!inside(j)) continue;
              if (kTerm == Term::bias && works) {
                const Four<T> added = load_4(bias + j * 16, 4, true);
#pragma unroll
                for (int n = 0; n < 4; ++n) four.value[n] += float(added.value[n]);
              }
#pragma unroll
              for (int n = 0; n < 4; ++n) four.value[n] *= weight;
              // What is asked of constants is asked anew each time, for the answers would take registers.
              if (ptx::keep(int(to.destination)) == int(Destination::token)) {
                ptx::add_16(reinterpret_cast<float*>(out) + j * 16, four.value);
              } else {
                const DType type = DType(ptx::keep(int(to.out_type)));
                typed(static_cast<void*>(out), type, [&](auto* to_row) { store_4(to_row + j * 16, four, 4, true); });
              }
            }
          }
        }
      }
      told = tile.told ^ 1;
      ptx::barrier_arrive(tile_empty(consumer));
    }
  }
  ptx::cluster_barrier();  // a CTA's shared memory outlives what the other one sends there
}

}  // namespace moe::wgmma

// The weight gradient on Hopper: out[expert] (+)= sum over the expert's rows of weight * a_row^T * b_row, over tiles of 128 by
// 256. The ragged dimension is the one summed, so a stage is 64 rows of both operands, looked up ahead of their copies.
//
// The rows lie in shared memory as they do in memory, and are summed across. Of b the tensor cores read them so; a passes
// through registers, where it is turned, weighted and rounded once. Both operands have zeros past the expert's last row, for
// 0 times what lies there may be no number.
#pragma once

#include <cuda.h>

#include "../config.h"
#include "../epilogue.cuh"
#include "../load.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../schedule.cuh"
#include "../start.cuh"
#include "warpgroups.cuh"

namespace moe::wgmma {

constexpr int kGradColumns = kHopperWeightGrad.tile_columns, kGradStages = kHopperWeightGrad.stages;
constexpr int kGradProducerRegisters = 56, kGradConsumerRegisters = 224;
constexpr int kBoxBytes = kTileK * 128;  // 64 columns of a stage; 64 rows of results, 128 bytes of each
constexpr int kStagedBoxes = 2;          // of a consumer's results
constexpr int kClaiming = 1, kStaging = 2;  // named barriers: of the producer; of each consumer

// What the producer tells the consumers.
struct alignas(16) GradTile {
  int expert, m, n, stages;
  int done;  // there are no more tiles
  int next;  // the producer's own: the tile it has claimed
  int unused[2];
  float weight[kGradStages][kTileK];  // of the rows of a stage
};

__device__ __forceinline__ uint32_t pack(float first, float second, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float first, float second, __half) {
  const __half2 pair = __floats2half2_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) weight_grad(const __grid_constant__ WeightGradProblem p,
                                                                const __grid_constant__ CUtensorMap out_map) {
  constexpr Config kConfig = kHopperWeightGrad;
  constexpr int kStageBytes = kConfig.stage_bytes(), kBoxesA = kTile / 64, kBoxesB = kGradColumns / 64;
  static_assert(kStageBytes == (kBoxesA + kBoxesB) * kBoxBytes && kConfig.tile_k == kTileK);
  static_assert(kConfig.table_bytes() == sizeof(GradTile) + 2 * (kGradStages + 1) * 8);

  extern __shared__ __align__(1024) unsigned char shared[];
  GradTile& tile = *reinterpret_cast<GradTile*>(shared + kConfig.tables_at());
  const uint32_t stages_at = ptx::shared_address(shared), barriers = ptx::shared_address(&tile + 1);
  const auto full = [&](int slot) { return barriers + slot * 8; };
  const auto empty = [&](int slot) { return barriers + (kGradStages + slot) * 8; };
  const uint32_t tile_full = barriers + 2 * kGradStages * 8, tile_empty = tile_full + 8;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kGradStages; ++slot) {
      ptx::barrier_init(full(slot), kWarpgroup + kWarpgroup / 32);  // every thread's copies, and every warp's weights
      ptx::barrier_init(empty(slot), kConsumers * kWarpgroup);
    }
    ptx::barrier_init(tile_full, 1);
    ptx::barrier_init(tile_empty, kConsumers * kWarpgroup);
  }
  __syncthreads();
  wait_for_launch_before();

  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  const int warp = thread / 32, lane = thread % 32;
  Turn<kGradStages> turn;
  int tile_parity = 0;
  if (warpgroup == 0) {
    ptx::release_registers<kGradProducerRegisters>();
    // A warp brings 16 rows of a stage, four at a time; a thread copies a 16-byte chunk of every 64 columns of four rows. Lanes
    // 0 to 15 look up a row each.
    constexpr int kCopied = 4;
    const int chunk = lane % 8, first = warp * 4 + lane / 8, looked = warp * 4 + lane % 4 + lane / 4 * 16;
    const uint32_t to = stages_at + first * 128 + (chunk ^ first % 8) * 16;
    const int m_tiles = pieces(p.M, kTile), n_tiles = pieces(p.N, kGradColumns);

    for (int number = blockIdx.x;; tile_parity ^= 1) {
      const int expert = number / (m_tiles * n_tiles);
      const bool done = expert >= p.E;
      const TilePosition position = tile_position(number % (m_tiles * n_tiles), n_tiles, m_tiles, kGradRaster);
      const int m = position.column_tile * kTile, n = position.row_tile * kGradColumns;
      const unsigned begin = done ? 0 : p.schedule.bounds[expert], end = done ? 0 : p.schedule.bounds[expert + 1];
      const int stages = pieces(end - begin, kTileK);
      if (thread == 0) {
        ptx::barrier_wait(tile_empty, tile_parity ^ 1);
        tile.expert = expert, tile.m = m, tile.n = n, tile.stages = stages, tile.done = done;
        ptx::barrier_arrive(tile_full);
      }
      if (done) {
        ptx::wait_copies<0>();  // no thread ends before its copies
        break;
      }
      int claimed;
      if (thread == 0) claimed = claim_tile(p.schedule);

      // -1 past the last row.
      const auto assignment_of = [&](int stage) {
        const unsigned row = begin + unsigned(stage) * kTileK + looked;
        if (lane >= 16 || row >= end) return -1;
        return p.map.row_assignment ? p.map.row_assignment[row] : int(row);
      };
      const auto weight_of = [&](int assignment) { return p.row_weight && assignment >= 0 ? p.row_weight[assignment] : 0.f; };
      int assignment[3] = {assignment_of(0), assignment_of(1)};  // of this stage, the next one and the one after
      float weight[2] = {weight_of(assignment[0])};
      const char* a_from = p.a.data + int64_t(m) * sizeof(T) + chunk * 16;
      const char* b_from = p.b.data + int64_t(n) * sizeof(T) + chunk * 16;
      const int m_left = p.M - m - chunk * 8, n_left = p.N - n - chunk * 8;
#pragma unroll 1
      for (int stage = 0; stage < stages; ++stage, turn.advance()) {
        assignment[2] = assignment_of(stage + 2);
        weight[1] = weight_of(assignment[1]);
        const int own_token = assignment[0] < 0 ? -1 : assignment[0] / p.map.top_k;
        ptx::barrier_wait(empty(turn.slot), turn.parity ^ 1);
        if (lane < 16) tile.weight[turn.slot][looked] = weight[0];
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(full(turn.slot));
        const uint32_t slot_to = to + turn.slot * kStageBytes;
#pragma unroll
        for (int i = 0; i < kCopied; ++i) {
          const int token = __shfl_sync(~0u, own_token, i * 4 + lane / 8);
          const unsigned row = begin + unsigned(stage) * kTileK + first + i * 16;
          const char* a = row_address(a_from, p.a.gather ? token : row, p.a.row_bytes);
          const char* b = row_address(b_from, p.b.gather ? token : row, p.b.row_bytes);
          const uint32_t row_to = slot_to + i * 16 * 128;
#pragma unroll
          for (int box = 0; box < kBoxesA; ++box) {
            ptx::copy_16_or_zero(row_to + box * kBoxBytes, a + box * 128, token >= 0 && m_left > box * 64);
          }
#pragma unroll
          for (int box = 0; box < kBoxesB; ++box) {
            ptx::copy_16_or_zero(row_to + (kBoxesA + box) * kBoxBytes, b + box * 128, token >= 0 && n_left > box * 64);
          }
        }
        ptx::barrier_arrive_after_copies(full(turn.slot));
        assignment[0] = assignment[1], assignment[1] = assignment[2], weight[0] = weight[1];
      }
      if (thread == 0) tile.next = claimed;
      ptx::named_barrier(kClaiming, kWarpgroup);
      number = tile.next;
      ptx::named_barrier(kClaiming, kWarpgroup);  // before it is overwritten
    }
  } else {
    ptx::take_registers<kGradConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const uint32_t results_at = stages_at + kGradStages * kStageBytes + consumer * kStagedBoxes * kBoxBytes;
    // Where ldmatrix finds this warp's 16 columns of a: lane l gives the address of 8 of them in row l % 8 or 8 + l % 8.
    const int a_row = lane / 16 * 8 + lane % 8, a_chunk = warp * 2 + lane / 8 % 2;
    const uint32_t a_at = stages_at + consumer * kBoxBytes + a_row * 128 + (a_chunk ^ a_row % 8) * 16;
    for (;; tile_parity ^= 1) {
      ptx::barrier_wait(tile_full, tile_parity);
      if (tile.done) break;
      const int expert = tile.expert, m = tile.m, n = tile.n, stages = tile.stages;
      ptx::barrier_arrive(tile_empty);

      float halves[1][kGradColumns / 2] = {};
      auto& sums = halves[0];
      uint32_t a[2][kTileK / 16][4];  // of two stages: one is multiplied while the other is prepared
      int running = -1;               // the slot whose products may not have ended
      const auto add_stage = [&](uint32_t (&fragments)[kTileK / 16][4]) {
        ptx::barrier_wait(full(turn.slot), turn.parity);
        ptx::fence_shared_for_async();  // cp.async writes as threads do
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
          ptx::load_matrix_transposed(fragments[k], a_at + turn.slot * kStageBytes + k * 16 * 128);
        }
        if (p.row_weight) {
          const float* weights = tile.weight[turn.slot] + lane % 4 * 2;
#pragma unroll
          for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float2 weight = *reinterpret_cast<const float2*>(weights + k * 16 + i / 2 * 8);
              const float2 value = unpack(fragments[k][i], T());
              fragments[k][i] = pack(value.x * weight.x, value.y * weight.y, T());
            }
          }
        }
        const uint32_t b = ptx::within_cta(stages_at) + turn.slot * kStageBytes + kBoxesA * kBoxBytes;
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
          const uint64_t b_matrix = ptx::matrix_descriptor(b + k * 16 * 128, kBoxBytes, 8 * 128);
          ptx::multiply_registers<true>(sums, fragments[k], b_matrix, T());
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (running >= 0) ptx::barrier_arrive(empty(running));
        running = turn.slot;
        turn.advance();
      };
#pragma unroll 1
      for (int stage = 0; stage < stages; stage += 2) {
        add_stage(a[0]);
        if (stage + 1 < stages) add_stage(a[1]);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(sums);
      if (running >= 0) ptx::barrier_arrive(empty(running));
      if (stages == 0 && p.accumulate) continue;

      // Results leave by the copy engine, a box being written while the one before is under way; it leaves out what lies
      // outside of the matrix. What is narrow is rounded once, so it is not what the engine adds to.
      if (p.out_type == DType::float32 || !p.accumulate) {
        const auto staged = [&](int box) { return results_at + box % kStagedBoxes * kBoxBytes; };
        const auto begin_box = [&] {
          if (thread == 0) ptx::wait_bulk_read<kStagedBoxes - 1>();
          ptx::named_barrier(kStaging + consumer, kWarpgroup);
        };
        const auto send_box = [&](int box, int columns) {
          ptx::fence_shared_for_async();
          ptx::named_barrier(kStaging + consumer, kWarpgroup);
          if (thread != 0) return;
          const int x = n + box * columns, y = m + consumer * kRows;
          if (p.accumulate) {
            ptx::add_box(&out_map, x, y, expert, staged(box));
          } else {
            ptx::store_box(&out_map, x, y, expert, staged(box));
          }
          ptx::commit_bulk();
        };
        if (p.out_type == DType::float32) {
#pragma unroll
          for (int box = 0; box < kGradColumns / 32; ++box) {
            begin_box();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const int row = warp * 16 + i * 8 + lane / 4, chunk = j * 2 + lane % 4 / 2;
                const float* pair = &sums[(box * 4 + j) * 4 + i * 2];
                ptx::store_shared_8(staged(box) + row * 128 + (chunk ^ row % 8) * 16 + lane % 2 * 8, pair[0], pair[1]);
              }
            }
            send_box(box, 32);
          }
        } else {
          const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;  // this lane's address is that of a row of 8 columns
#pragma unroll
          for (int box = 0; box < kGradColumns / 64; ++box) {
            begin_box();
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
              const float* first = &sums[(box * 8 + j) * 4];
              const uint32_t matrices[4] = {pack(first[0], first[1], T()), pack(first[2], first[3], T()),
                                            pack(first[4], first[5], T()), pack(first[6], first[7], T())};
              ptx::store_matrix(staged(box) + row * 128 + ((j + lane / 16) ^ row % 8) * 16, matrices);
            }
            send_box(box, 64);
          }
        }
        continue;
      }
      const int own_n = n + fours_column(lane);
      T* out = static_cast<T*>(p.out) + expert * p.out_expert_stride + own_n;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own_m = m + consumer * kRows + warp * 16 + i * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < kGradColumns / 16; ++j) {
          Four<float> four = exchange_for_four(halves, i, j, lane);
          if (own_m >= p.M || own_n + j * 16 >= p.N) continue;
          T* to = out + own_m * p.out_stride + j * 16;
          const Four<T> before = load_4(to, 4, true);
#pragma unroll
          for (int k = 0; k < 4; ++k) four.value[k] += float(before.value[k]);
          store_4(to, four, 4, true);
        }
      }
    }
    if (thread == 0) ptx::wait_bulk_read<0>();  // shared memory outlives what is read of it
  }
}

}  // namespace moe::wgmma

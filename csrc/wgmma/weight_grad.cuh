// The weight gradient on Hopper: out[expert] (+)= sum over the expert's rows of weight * a_row^T * b_row, over tiles of 128 by
// 256. The ragged dimension is the one summed, so a stage is 64 rows of both operands, looked up ahead of their copies.
//
// The rows lie in shared memory as they do in memory, and are summed across. Of b the tensor cores read them so; a passes
// through registers, where it is turned, weighted and rounded once. Both operands have zeros past the expert's last row, for
// 0 times what lies there may be no number.
//
// The two CTAs of a cluster take neighbouring tiles with the same columns of b. Each gathers half of these and sends them to
// the other one, for an SM's share of L2 reads is what else would set the pace. So the two go through the ring of stages
// together, and a slot is empty when the consumers of both have read it: then what was sent from it has arrived, and what
// is sent to it next finds its barrier in the phase that it counts for.
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
#include "warpgroups.cuh"

namespace moe::wgmma {

constexpr int kGradCluster = 2, kGradColumns = 256, kGradStages = 4;
constexpr int kGradProducerRegisters = 88, kGradConsumerRegisters = 208;
constexpr int kBoxBytes = kTileK * 128;  // 64 columns of a stage; 64 rows of results, 128 bytes of each
constexpr int kStagedBoxes = 2;          // of a consumer's results

__device__ __forceinline__ uint32_t pack(float first, float second, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float first, float second, __half) {
  const __half2 pair = __floats2half2_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

// The weights of two rows, each the sum of two bf16 values: of its 16 leading bits and of as many of the rest.
struct WeightPair {
  uint32_t leading, rest;
};

// A product of each of a pair with its weight, rounded once but for the last bits of a weight.
__device__ __forceinline__ uint32_t weighted(uint32_t pair, WeightPair weights, __nv_bfloat16) {
  const auto packed = [](uint32_t& bits) { return reinterpret_cast<__nv_bfloat162&>(bits); };
  __nv_bfloat162 product = __hmul2_rn(packed(pair), packed(weights.rest));
  product = __hfma2(packed(pair), packed(weights.leading), product);
  return reinterpret_cast<uint32_t&>(product);
}
__device__ __forceinline__ uint32_t weighted(uint32_t pair, WeightPair weights, __half) {
  const float2 value = unpack(pair, __half()), leading = unpack(weights.leading, __nv_bfloat16());
  const float2 rest = unpack(weights.rest, __nv_bfloat16());
  return pack(value.x * (leading.x + rest.x), value.y * (leading.y + rest.y), __half());
}

// As it is told to both CTAs; m is each one's own. Expert past the last one: there are no more.
struct GradTile {
  int expert, m, n;
  unsigned begin, end;  // its rows
  int unused[3];        // 32 bytes, which two stores bring
};

struct alignas(16) GradTables {
  GradTile tile;
  WeightPair weight[kGradStages][kTileK / 2];  // of the rows of a stage
};

template <typename T>
__global__ void __cluster_dims__(kGradCluster) __launch_bounds__(kThreads, 1)
    weight_grad(const __grid_constant__ WeightGradProblem p, const __grid_constant__ CUtensorMap out_map) {
  constexpr Config kConfig{Op::weight_grad, Path::wgmma, kTileK, kGradStages, 0, true, 1, kGradColumns};
  constexpr int kStageBytes = kConfig.stage_bytes(), kBoxesA = kTile / 64, kBoxesB = kGradColumns / 64;
  constexpr int kOwnBoxesB = kBoxesB / kGradCluster;  // that a CTA gathers
  static_assert(kStageBytes == (kBoxesA + kBoxesB) * kBoxBytes);
  static_assert(kConfig.table_bytes() == sizeof(GradTables) + (3 * kGradStages + 2) * 8);

  extern __shared__ __align__(1024) unsigned char shared[];
  GradTables& tables = *reinterpret_cast<GradTables*>(shared + kConfig.tables_at());
  const GradTile& tile = tables.tile;
  const uint32_t stages_at = ptx::shared_address(shared), barriers = ptx::shared_address(&tables + 1);
  const auto full = [&](int slot) { return barriers + slot * 8; };                  // by what this CTA gathers
  const auto sent = [&](int slot) { return barriers + (kGradStages + slot) * 8; };  // by the other one
  const auto empty = [&](int slot) { return barriers + (2 * kGradStages + slot) * 8; };
  const uint32_t tile_full = barriers + 3 * kGradStages * 8, tile_empty = tile_full + 8;  // of CTA 0 alone the latter
  const int rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kGradStages; ++slot) {
      ptx::barrier_init(full(slot), kWarpgroup + kWarpgroup / 32);  // every thread's copies, and every warp's weights
      ptx::barrier_init(sent(slot), 1);
      ptx::barrier_init(empty(slot), kGradCluster * kConsumers * 4);
    }
    ptx::barrier_init(tile_full, 1);
    ptx::barrier_init(tile_empty, kGradCluster * kThreads / 32);  // every warp of both
    ptx::barrier_init_fence();
  }
  ptx::cluster_barrier();

  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  const int warp = thread / 32, lane = thread % 32;
  Turn<kGradStages> turn;
  int tile_parity = 0;
  // By a whole warp; when all have come here the next one is told.
  const auto next_tile = [&] {
    ptx::barrier_wait(tile_full, tile_parity);
    tile_parity ^= 1;
    const GradTile told = tile;
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive_cluster(ptx::barrier_of(tile_empty, 0));
    return told;
  };
  const auto stages_of = [](const GradTile& of) { return pieces(of.end - of.begin, kTileK); };
  if (warpgroup == 0) {
    ptx::release_registers<kGradProducerRegisters>();
    // A warp brings 16 rows of a stage, four at a time; a thread copies a 16-byte chunk of every 64 columns of four rows. Lanes
    // 0 to 15 look up a row each.
    constexpr int kCopied = 4;
    const int chunk = lane % 8, first = warp * 4 + lane / 8, looked = warp * 4 + lane % 4 + lane / 4 * 16;
    const uint32_t to = stages_at + first * 128 + (chunk ^ first % 8) * 16;

    // One warp of the cluster claims its tiles and tells all others.
    const bool leads = warp == 0 && rank == 0;
    int number = blockIdx.x / kGradCluster;
    const auto tell = [&] {
      const int n_tiles = pieces(p.N, kGradColumns), m_pairs = pieces(pieces(p.M, kTile), kGradCluster);
      const int claimed = __shfl_sync(~0u, number, 0), expert = claimed / (m_pairs * n_tiles);
      const TilePosition position = tile_position(claimed % (m_pairs * n_tiles), n_tiles, m_pairs, Raster{1, kRaster.strip / kGradCluster});
      const int begin = expert < p.E ? p.schedule.bounds[expert] : 0, end = expert < p.E ? p.schedule.bounds[expert + 1] : 0;
      ptx::barrier_wait(tile_empty, tile_parity ^ 1);
      if (lane >= kGradCluster) return;
      const int m = (position.column_tile * kGradCluster + lane) * kTile, n = position.row_tile * kGradColumns;
      const uint32_t to = ptx::barrier_of(ptx::shared_address(&tile), lane), landed = ptx::barrier_of(tile_full, lane);
      ptx::store_16_to_cta(to, landed, make_uint4(expert, m, n, begin));
      ptx::store_16_to_cta(to + 16, landed, make_uint4(end, 0, 0, 0));
    };
    if (leads) tell();

    for (;;) {
      if (thread == 0) ptx::barrier_arrive_expecting(tile_full, sizeof(GradTile));
      const GradTile told = next_tile();
      if (told.expert >= p.E) break;
      const unsigned begin = told.begin, end = told.end;
      const int m = told.m, n = told.n + rank * kOwnBoxesB * 64, stages = stages_of(told);
      if (leads && lane == 0) number = claim_tile<kGradCluster>(p.schedule);

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
      const int m_left = p.M - m, n_left = p.N - n;
      const bool whole_tile = m_left >= kTile && n_left >= kOwnBoxesB * 64;
      const auto bring = [&](int stage) {
        assignment[2] = assignment_of(stage + 2);
        weight[1] = weight_of(assignment[1]);
        const int own_token = assignment[0] < 0 ? -1 : assignment[0] / p.map.top_k;
        // All addresses first: a register that a copy has taken its address from is not free for a while.
        const char *a[kCopied], *b[kCopied];
        bool inside[kCopied];
#pragma unroll
        for (int i = 0; i < kCopied; ++i) {
          const int token = __shfl_sync(~0u, own_token, i * 4 + lane / 8);
          const unsigned row = begin + unsigned(stage) * kTileK + first + i * 16;
          inside[i] = token >= 0;
          a[i] = ptx::keep(row_address(a_from, p.a.gather ? token : row, p.a.row_bytes));
          b[i] = ptx::keep(row_address(b_from, p.b.gather ? token : row, p.b.row_bytes));
        }
        ptx::barrier_wait(empty(turn.slot), turn.parity ^ 1);
        if (lane < 16) {
          uint16_t* const pair = reinterpret_cast<uint16_t*>(&tables.weight[turn.slot][looked / 2]) + looked % 2;
          const __nv_bfloat16 leading = __float2bfloat16_rn(weight[0]);
          pair[0] = __bfloat16_as_ushort(leading);
          pair[2] = __bfloat16_as_ushort(__float2bfloat16_rn(weight[0] - __bfloat162float(leading)));
        }
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(full(turn.slot));
        const uint32_t a_to = to + turn.slot * kStageBytes, b_to = a_to + (kBoxesA + rank * kOwnBoxesB) * kBoxBytes;
        const auto copy = [&](auto whole) {
#pragma unroll
          for (int i = 0; i < kCopied; ++i) {
#pragma unroll
            for (int box = 0; box < kBoxesA + kOwnBoxesB; ++box) {
              const bool of_a = box < kBoxesA;
              const int ahead = of_a ? box : box - kBoxesA;
              const bool live = whole || (inside[i] && (of_a ? m_left : n_left) > ahead * 64 + chunk * 8);
              const uint32_t box_to = (of_a ? a_to : b_to) + ahead * kBoxBytes;
              ptx::copy_16_or_zero(box_to + i * 16 * 128, (of_a ? a[i] : b[i]) + ahead * 128, live);
            }
          }
        };
        if (whole_tile && (stage + 1) * kTileK <= int(end - begin)) {
          copy(Constant<true>{});
        } else {
          copy(Constant<false>{});
        }
        ptx::barrier_arrive_after_copies(full(turn.slot));
        assignment[0] = assignment[1], assignment[1] = assignment[2], weight[0] = weight[1];
        turn.advance();
      };

      // The next tile is told when all have come to this one, as a slot's second turn shows; where it is shorter they are waited
      // for.
      const int told_at = min(stages, kGradStages);
#pragma unroll 1
      for (int stage = 0; stage <= stages; ++stage) {
        if (stage < stages) bring(stage);
        if (leads && stage == told_at) tell();
      }
    }
  } else {
    ptx::take_registers<kGradConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const auto release = [&](int slot) {
      if (lane < kGradCluster) ptx::barrier_arrive_cluster(ptx::barrier_of(empty(slot), lane));
    };
    // Waits for the next stage that this CTA gathers, of which b goes to the other one too: two stages ahead of their products,
    // for sending takes a while.
    constexpr int kAhead = 2;
    Turn<kGradStages> ahead;
    const auto receive = [&] {
      ptx::barrier_wait(full(ahead.slot), ahead.parity);
      ptx::fence_shared_for_wgmma();  // cp.async writes as threads do
      if (consumer == 0 && thread == 0) {
        constexpr int kBytes = kOwnBoxesB * kBoxBytes;
        const uint32_t from = stages_at + ahead.slot * kStageBytes + kBoxesA * kBoxBytes + rank * kBytes;
        const uint32_t landed = sent(ahead.slot);
        ptx::barrier_arrive_expecting(landed, kBytes);  // as many come from the other CTA
        ptx::bulk_copy_to_cta(ptx::barrier_of(from, rank ^ 1), ptx::barrier_of(landed, rank ^ 1), from, kBytes);
      }
      ahead.advance();
    };
    const uint32_t operands_at = ptx::within_cta(stages_at);
    const uint32_t results_at = stages_at + kGradStages * kStageBytes + consumer * kStagedBoxes * kBoxBytes;
    // Where ldmatrix finds this warp's 16 columns of a: lane l gives the address of 8 of them in row l % 8 or 8 + l % 8.
    const int a_row = lane / 16 * 8 + lane % 8, a_chunk = warp * 2 + lane / 8 % 2;
    const uint32_t a_at = stages_at + consumer * kBoxBytes + a_row * 128 + (a_chunk ^ a_row % 8) * 16;
    for (;;) {
      const GradTile told = next_tile();
      if (told.expert >= p.E) break;
      const int expert = told.expert, m = told.m, n = told.n, stages = stages_of(told);
      if (p.M - m <= consumer * kRows) {  // nothing to multiply, though this CTA gathers for the other one
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage, turn.advance()) {
          receive();
          ptx::barrier_wait(sent(turn.slot), turn.parity);
          release(turn.slot);
        }
        continue;
      }

      float sums[kGradColumns / 2] = {};
      uint32_t a[2][kTileK / 16][4];  // of two stages: one is multiplied while the other is prepared
      int running = -1;               // the slot whose products may not have ended
      const auto add_stage = [&](uint32_t (&fragments)[kTileK / 16][4], bool receives) {
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
          ptx::load_matrix_transposed(fragments[k], a_at + turn.slot * kStageBytes + k * 16 * 128);
        }
        if (p.row_weight) {
          const WeightPair* weights = tables.weight[turn.slot] + lane % 4;
#pragma unroll
          for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              fragments[k][i] = weighted(fragments[k][i], weights[k * 8 + i / 2 * 4], T());
            }
          }
        }
        const uint32_t b = operands_at + turn.slot * kStageBytes + kBoxesA * kBoxBytes;
        ptx::barrier_wait(sent(turn.slot), turn.parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
          const uint64_t b_matrix = ptx::matrix_descriptor(b + k * 16 * 128, kBoxBytes, 8 * 128);
          ptx::multiply_registers<true>(sums, fragments[k], b_matrix, T());
        }
        ptx::wgmma_commit();
        const int slot = turn.slot;
        turn.advance();
        if (receives) receive();
        ptx::wgmma_wait<1>();
        if (running >= 0) release(running);
        running = slot;
      };
      for (int stage = 0; stage < min(stages, kAhead); ++stage) receive();
#pragma unroll 1
      for (int stage = 0; stage < stages; stage += 2) {
        add_stage(a[0], stage + kAhead < stages);
        if (stage + 1 < stages) add_stage(a[1], stage + 1 + kAhead < stages);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(sums);
      if (running >= 0) release(running);
      if (stages == 0 && p.accumulate) continue;

      // Results leave by the copy engine, a box being written while the one before is under way; it leaves out what lies outside
      // of the matrix. What is narrow is rounded once, so it is not what the engine adds to.
      if (p.out_type == DType::float32 || !p.accumulate) {
        const auto staged = [&](int box) { return results_at + box % kStagedBoxes * kBoxBytes; };
        const auto begin_box = [&] {
          if (thread == 0) ptx::wait_bulk_read<kStagedBoxes - 1>();
          ptx::named_barrier(2 + consumer, kWarpgroup);
        };
        const auto send_box = [&](int box, int columns) {
          ptx::fence_shared_for_bulk();
          ptx::named_barrier(2 + consumer, kWarpgroup);
          if (thread != 0) return;
          const int x = n + box * columns, y = m + consumer * kRows;
          p.accumulate ? ptx::add_box(&out_map, x, y, expert, staged(box)) : ptx::store_box(&out_map, x, y, expert, staged(box));
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
          Four<float> four = exchange_for_four(sums, i, j, lane);
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
  ptx::cluster_barrier();  // and what the other CTA sends there
}

}  // namespace moe::wgmma

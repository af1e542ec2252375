// Turns group offsets into tiles, on the device, in one block: no size is ever read by the host. The other blocks clear what
// the tiles' results are added to, which a launch of its own would take longer for.
#include <cstdint>

#include "schedule.cuh"

namespace moe {
namespace {

constexpr int kThreads = 1024;

struct Max {
  __device__ int operator()(int a, int b) const { return max(a, b); }
};
struct Sum {
  __device__ int operator()(int a, int b) const { return a + b; }
};

// Inclusive scan over the block; both operators have 0 as a neutral element here.
template <typename Operator>
__device__ int block_scan(int value, Operator combine, int* warp_totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value = combine(value, below);
  }
  __syncthreads();  // the totals of an earlier scan have been read
  if (lane == 31) warp_totals[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int total = warp_totals[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(~0u, total, step);
      if (lane >= step) total = combine(total, below);
    }
    warp_totals[lane] = total;
  }
  __syncthreads();
  return warp ? combine(warp_totals[warp - 1], value) : value;
}

// All blocks but the first.
__device__ __forceinline__ void fill_with_zeros(const Clear& clear) {
  const bool aligned = reinterpret_cast<uintptr_t>(clear.data) % 16 == 0;
  const int64_t fours = aligned ? clear.count / 4 : 0, step = int64_t(gridDim.x - 1) * kThreads;
  const int64_t first = int64_t(blockIdx.x - 1) * kThreads + threadIdx.x;
#pragma unroll 4
  for (int64_t i = first; i < fours; i += step) reinterpret_cast<float4*>(clear.data)[i] = float4{};
  for (int64_t i = fours * 4 + first; i < clear.count; i += step) clear.data[i] = 0.f;
}

// Offsets become a running maximum within [0, S]: wrong ones may give wrong numbers, never a row outside the operands.
__global__ void __launch_bounds__(kThreads) schedule_kernel(const int* offs, int S, int E, Tiling tiling, Clear clear,
                                                            int* bounds, RowTile* tiles, int tiles_size, int* tile_count,
                                                            int* short_count, int* claimed) {
  if (blockIdx.x > 0) return fill_with_zeros(clear);
  __shared__ int warp_totals[32];
  __shared__ int group_end[kThreads + 1], tiles_end[kThreads + 1];
  int last_end = 0, tiles_before = 0, shorts_before = 0;
  // Group E stands for the rows past the last group.
  for (int first = 0; first <= E; first += kThreads) {
    const int group = first + int(threadIdx.x);
    const int given = group < E ? min(max(offs[group], 0), S) : group == E ? S : 0;
    const int end = max(last_end, block_scan(given, Max{}, warp_totals));
    if (threadIdx.x == 0) group_end[0] = last_end;
    group_end[threadIdx.x + 1] = end;
    if (group < E) bounds[group + 1] = end;
    __syncthreads();
    if (tiling.rows) {
      const bool counted = group < E || (group == E && tiling.cover_rest);
      const int rows = counted ? end - group_end[threadIdx.x] : 0, tail = rows % tiling.rows;
      const bool is_short = group < E && tail && tail <= tiling.short_rows;
      const int shorts = block_scan(is_short, Sum{}, warp_totals);  // up to this group
      if (is_short) tiles[tiles_size - shorts_before - shorts] = {group, end - tail, tail, 0};
      if (threadIdx.x == 0) tiles_end[0] = 0;
      tiles_end[threadIdx.x + 1] = block_scan(pieces(rows, tiling.rows) - is_short, Sum{}, warp_totals);
      __syncthreads();
      const int total = tiles_end[kThreads];
      for (int i = threadIdx.x; i < total; i += kThreads) {
        int low = 0, high = kThreads;  // the group whose tiles hold i
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          (tiles_end[middle] <= i ? low : high) = middle;
        }
        const int row = group_end[low] + (i - tiles_end[low]) * tiling.rows;
        tiles[tiles_before + i] = {first + low < E ? first + low : -1, row, min(tiling.rows, group_end[low + 1] - row), 0};
      }
      tiles_before += total;
      if (threadIdx.x == kThreads - 1) warp_totals[0] = shorts;
      __syncthreads();
      shorts_before += warp_totals[0];
    }
    last_end = group_end[kThreads];
    __syncthreads();  // before the next groups overwrite the shared arrays
  }
  if (threadIdx.x == 0) {
    bounds[0] = 0;
    *tile_count = tiles_before;
    *short_count = shorts_before;
    *claimed = 0;
  }
}

}  // namespace

cudaError_t build_schedule(const int* offs, int S, int E, const Tiling& tiling, const Clear& clear, int sms, int* scratch,
                           cudaStream_t stream, Schedule* schedule) {
  const int tiles_size = int(max_row_tiles(S, E, tiling.rows));
  RowTile* tiles = reinterpret_cast<RowTile*>(scratch);
  int* bounds = scratch + 4 * int64_t(tiles_size);
  int* counters = bounds + E + 1;
  *schedule = {bounds, counters, counters + 1, tiles, tiles_size, counters + 2};
  const int64_t clearing = (clear.count + kThreads * 16 - 1) / (kThreads * 16), resident = 2 * sms;
  const unsigned blocks = 1 + unsigned(clearing < resident ? clearing : resident);
  schedule_kernel<<<blocks, kThreads, 0, stream>>>(offs, S, E, tiling, clear, bounds, tiles, tiles_size, counters, counters + 1,
                                                  counters + 2);
  return cudaGetLastError();
}

}  // namespace moe

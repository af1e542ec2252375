// Turns group offsets into tiles, on the device, in one block: no size is ever read by the host. The other blocks clear what
// the tiles' results are added to, which a launch of its own would take longer for.
#include <cstdint>

#include "scan.cuh"
#include "schedule.cuh"
#include "start.cuh"

namespace moe {
namespace {

// Offsets become a running maximum within [0, S]: wrong ones may give wrong numbers, never a row outside the operands.
__global__ void __launch_bounds__(kScanThreads)
    schedule_kernel(const int* offs, int S, int E, Tiling tiling, Clear clear, int* bounds, RowTile* tiles, int tiles_size,
                    int* tile_count, int* short_count, int* claimed) {
  let_next_launch_begin();  // which waits for the end of this one before it reads or writes anything
  if (blockIdx.x > 0) return fill_with_zeros<kScanThreads>(clear, blockIdx.x - 1, gridDim.x - 1);
  __shared__ int warp_totals[32];
  __shared__ int group_end[kScanThreads + 1], tiles_end[kScanThreads + 1];
  int last_end = 0, tiles_before = 0, shorts_before = 0;
  // Group E stands for the rows past the last group. Unsigned, for the last step passes 2^31 where E comes near it.
  for (unsigned first = 0; first <= unsigned(E); first += kScanThreads) {
    const int group = int(first + threadIdx.x);
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
      const int shorts = block_scan(int(is_short), Sum{}, warp_totals);  // up to this group
      if (is_short) tiles[tiles_size - shorts_before - shorts] = {group, end - tail, tail, 0};
      if (threadIdx.x == 0) tiles_end[0] = 0;
      tiles_end[threadIdx.x + 1] = block_scan(pieces(rows, tiling.rows) - is_short, Sum{}, warp_totals);
      __syncthreads();
      const int total = tiles_end[kScanThreads];
      for (int i = threadIdx.x; i < total; i += kScanThreads) {
        const int own = last_up_to(tiles_end, kScanThreads, i);
        const int row = group_end[own] + (i - tiles_end[own]) * tiling.rows;
        const int of = int(first + own);
        tiles[tiles_before + i] = {of < E ? of : -1, row, min(tiling.rows, group_end[own + 1] - row), 0};
      }
      tiles_before += total;
      if (threadIdx.x == kScanThreads - 1) warp_totals[0] = shorts;
      __syncthreads();
      shorts_before += warp_totals[0];
    }
    last_end = group_end[kScanThreads];
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
  const int64_t clearing = (clear.count + kScanThreads * 16 - 1) / (kScanThreads * 16), resident = 2 * sms;
  const unsigned blocks = 1 + unsigned(clearing < resident ? clearing : resident);
  return launch_kernel(schedule_kernel, blocks, kScanThreads, 0, false, stream, offs, S, E, tiling, clear, bounds, tiles,
                       tiles_size, counters, counters + 1, counters + 2);
}

}  // namespace moe

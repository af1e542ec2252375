// Which tile a block works on: the raster over the row tiles that schedule.cu counts on the device.
#pragma once

#include "config.h"

namespace moe {

struct TilePosition {
  int row_tile, column_tile;
};

__device__ __forceinline__ TilePosition tile_position(int tile, int row_tiles, int column_tiles, Raster raster) {
  const int strip_tiles = row_tiles * min(raster.strip, column_tiles);
  const int first_column = tile / strip_tiles * raster.strip, inside = tile % strip_tiles;
  const int columns = min(raster.strip, column_tiles - first_column);
  const int first_row = inside / (raster.group * columns) * raster.group, of_group = inside % (raster.group * columns);
  const int rows = min(raster.group, row_tiles - first_row);
  return {first_row + of_group % rows, first_column + of_group / rows};
}

// About `in_work` tiles are in work at a time. They are about as many rows as columns, and all columns of a group of rows come
// before the next one, so that each operand is read from memory about once. Where little is multiplied for each sum that is
// added, what is added to has to stay in L2 instead (docs/design.md).
inline Raster raster_of(const GemmProblem& p, int tile_columns, int in_work) {
  if (p.epilogue.destination == Destination::token && p.K <= 1024) return {1, 384 / tile_columns};
  const int columns = pieces(p.N, tile_columns);
  int side = 1;
  while (4 * side * side <= in_work) side *= 2;
  return {columns > 2 * side ? side : 1, columns};
}

// How many rows a tile had best have: few where weights, and not products, are what a call takes its time for. So many rows of
// an expert as its average has are brought at once, or nearly always (docs/design.md).
inline int rows_of_tile(const GemmProblem& p) {
  const int64_t few = int64_t(p.E) * 4;
  return p.S <= few ? kFineGemm.tile_rows : p.S <= 4 * few ? kNarrowGemm.tile_rows : kTile;
}

constexpr Raster kGradRaster{1, 8};  // of a weight gradient

// By `blocks` blocks of so many threads.
template <int kThreads>
__device__ __forceinline__ void fill_with_zeros(const Clear& clear, unsigned block, unsigned blocks) {
  const bool aligned = reinterpret_cast<uintptr_t>(clear.data) % 16 == 0;
  const int64_t fours = aligned ? clear.count / 4 : 0, step = int64_t(blocks) * kThreads;
  const int64_t first = int64_t(block) * kThreads + threadIdx.x;
#pragma unroll 4
  for (int64_t i = first; i < fours; i += step) reinterpret_cast<float4*>(clear.data)[i] = float4{};
  for (int64_t i = fours * 4 + first; i < clear.count; i += step) clear.data[i] = 0.f;
}

// The next tile of this launch that no block has taken: blocks start with the tile of their index and then claim one
// after the other, so that a block with short tiles takes more of them.
__device__ __forceinline__ int claim_tile(const Schedule& schedule) { return gridDim.x + atomicAdd(schedule.claimed, 1); }

// Upper bound of the row tiles of S rows over E experts, with one more group for rows past the last one; none where
// tile_rows is 0.
inline int64_t max_row_tiles(int64_t S, int64_t E, int tile_rows) {
  if (tile_rows == 0) return 0;
  const int64_t bound = S / tile_rows + E + 1;
  return bound < S ? bound : S;
}

// 32-bit words of scratch that build_schedule() fills: tiles (first, for their alignment), bounds and three counters.
inline int64_t schedule_words(int64_t S, int64_t E, int tile_rows) { return 4 * max_row_tiles(S, E, tile_rows) + E + 4; }

// Which tiles there shall be: of up to `rows` rows (0: none), apart those of up to short_rows, and where cover_rest asks for
// them tiles of expert -1 for the rows past the last group.
struct Tiling {
  int rows, short_rows;
  bool cover_rest;
};

// Fills `scratch` from the cumulative group ends `offs` (int32 [E]).
cudaError_t build_schedule(const int* offs, int S, int E, const Tiling& tiling, const Clear& clear, int sms, int* scratch,
                           cudaStream_t stream, Schedule* schedule);

}  // namespace moe

// From accumulators to memory on Hopper: what a consumer does with a tile's sums. Rows are written straight from registers: four
// neighbouring threads have a row, of which they exchange columns until each has 16 bytes side by side.
#pragma once

#include "../activation.cuh"
#include "../load.cuh"
#include "warpgroups.cuh"

namespace moe::wgmma {

// What the producer tells the consumers of a tile.
struct Tile {
  int expert, row, rows, column;  // expert kNone: this CTA has none, though the other one may; kNoMore: there are none
  int stages, slot, parity;       // how many, and where in the ring the first one is
  int shares;                     // the cluster's tiles have one expert
  int told;                       // the parity of being told of it, which the consumer has no register for meanwhile
  int assignment[kTile];
  float weight[kTile];
};

// What there is besides products and weights; a bias may also be activated.
enum class Term { none, bias, dot, activation, activation_grad };

__host__ __device__ constexpr Through through(Term term) {
  return term == Term::activation        ? Through::activation
         : term == Term::activation_grad ? Through::activation_grad
                                         : Through::nothing;
}

// What follows from the thread's number is computed anew for each row, for registers are what there is least of.
__device__ __forceinline__ int own_lane() { return int(ptx::keep(threadIdx.x) % 32); }
// The place in the tile of a row that this thread holds sums of, by its number.
__device__ __forceinline__ int row_held(int number) {
  const int own_thread = int(ptx::keep(threadIdx.x) % kWarpgroup);
  return number / 2 * kRows + own_thread / 32 * 16 + number % 2 * 8 + own_thread % 32 / 4;
}
// How many there are that begin inside of the tile.
__device__ __forceinline__ int rows_held(const Tile& tile) { return tile.rows > kRows ? 4 : 2; }

// Adds what four neighbouring threads have.
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

template <typename T, Term kTerm, int kTileN>
struct Writer {
  static constexpr int kFours = kTileN / 16, kEights = kTileN / 32;  // of each of a thread's rows
  using Sums = const float (&)[2][kTileN / 2];

  // What eight rows of a warp have their dots taken with, or what was activated in them.
  static constexpr int kWarpBytes = kTerm == Term::dot ? 8 * kTileN * 2 : kTerm == Term::activation_grad ? 8 * kTileN * 4 : 0;

  const GemmProblem& p;
  const Tile& tile;
  unsigned char* const own_bytes;  // of the warp

  __device__ __forceinline__ bool works() const { return tile.expert >= 0; }

  // Before the sums are there: what will be needed first is on its way while they are computed.
  __device__ __forceinline__ void begin() const {
    if (kTerm == Term::dot && works()) bring_with(0);
    if (kTerm == Term::activation_grad) {
      const Activated activated(*this, 0);
#pragma unroll
      for (int j = 0; j < kEights; ++j) activated.bring(j);
    }
  }

  __device__ __forceinline__ void write(Sums sums) const {
    if constexpr (kTerm == Term::activation) {
      with_kind(p.epilogue.activation.kind, [&](auto kind) {
#pragma unroll
        for (int number = 0; number < 4; ++number) {
          if (tile.rows <= number / 2 * kRows) continue;
          p.epilogue.activation.gated ? activate<kind, true>(sums, number) : activate<kind, false>(sums, number);
        }
      });
    } else if constexpr (kTerm == Term::activation_grad) {
      with_kind(p.epilogue.activation.kind, [&](auto kind) {
#pragma unroll 1
        for (int number = 0; number < rows_held(tile); number = ptx::keep(number + 1)) lead_back<kind>(sums, number);
      });
      ptx::wait_copies<0>();  // of rows that are not there, too
    } else {
#pragma unroll
      for (int number = 0; number < 4; ++number) {
        if (tile.rows <= number / 2 * kRows) continue;
        if (kTerm == Term::dot && works()) take_dot(sums, number);
        if (kTerm == Term::none && asked(p.epilogue.out_turned)) {
          store_turned(sums, number);
        } else if (p.epilogue.out) {
          store(sums, number);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int64_t token_of(int row) const { return tile.assignment[row] / p.map.top_k; }

  // Brings what the dots of eight rows of this warp are taken with, a row to four threads.
  __device__ __forceinline__ void bring_with(int number) const {
    const Epilogue& to = p.epilogue;
    const int lane = own_lane(), row = row_held(number), column = tile.column + lane % 4 * 8;
    const bool own = row < tile.rows;
    const int64_t with_row = to.destination == Destination::row ? tile.row + (own ? row : 0) : token_of(row);
    const T* with = static_cast<const T*>(to.dot_with) + with_row * to.dot_with_stride + column;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      ptx::copy_16_or_zero(with_at(i * 4 + lane % 4), with + i * 32, own && i * 32 < p.N - column);
    }
    ptx::commit_copies();
  }
  // Where the chunk of 16 bytes is: the rows' are so turned that eight of them lie in all banks.
  __device__ __forceinline__ uint32_t with_at(int chunk) const {
    const int row = own_lane() / 4;
    return ptx::shared_address(own_bytes) + row * kTileN * 2 + (chunk ^ row) * 16;
  }

  __device__ __forceinline__ void take_dot(Sums sums, int number) const {
    ptx::wait_copies<0>();
    __syncwarp();
    const int lane = own_lane(), row = row_held(number);
    float dot = 0.f;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const float2 with = unpack(ptx::load_shared_4(with_at(j) + lane % 4 * 4), T());
      if (tile.column >= p.N - j * 8) continue;  // an infinite row of A makes NaN of the zeros there
      const float* pair = &sums[number / 2][j * 4 + number % 2 * 2];
      dot = fmaf(pair[0], with.x, fmaf(pair[1], with.y, dot));
    }
    __syncwarp();
    if (number + 1 < rows_held(tile)) bring_with(number + 1);
    add_dot(dot, row);
  }

  // A partial sum a tile, of which there are no more than `dot` has room for.
  __device__ __forceinline__ void add_dot(float dot, int row) const {
    dot = sum_of_row(dot);
    if (!p.epilogue.dot || row >= tile.rows || own_lane() % 4) return;
    p.epilogue.dot[int64_t(tile.column / kTileN) * p.S + tile.assignment[row]] = dot;
  }

  __device__ __forceinline__ void store(Sums sums, int number) const {
    const Epilogue& to = p.epilogue;
    const int lane = own_lane(), row = row_held(number);
    const bool by_row = to.destination == Destination::row, combine = to.destination == Destination::token;
    const int64_t out_row = by_row ? tile.row + row : combine ? token_of(row) : tile.assignment[row];
    char* const out = static_cast<char*>(to.out) + out_row * to.out_stride * size_of(to.out_type);
    const float weight = tile.weight[row];
    const T* const bias = static_cast<const T*>(to.bias) + tile.expert * to.bias_stride;
    const auto finish = [&](Four<float> four, int column) {
      if (kTerm == Term::bias && works()) add(four, load_4(bias + column, 4, true));
      return weight * four;
    };
    if (to.out_type != DType::float32) {
      const int first = tile.column + lane % 4 * 8;
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        const Eight<float> eight = exchange_for_eight(sums, number, j, lane);
        if (row >= tile.rows || first >= p.N - j * 32) continue;  // N may be near 2^31
        const int column = first + j * 32;
        const Eight<float> finished{finish(eight.low, column), finish(eight.high, column + 4)};
        typed(static_cast<void*>(out), asked_type(), [&](auto* to_row) { store_8(to_row + column, finished); });
      }
    } else {
      const int first = tile.column + fours_column(lane);
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        const Four<float> four = exchange_for_four(sums, number, j, lane);
        if (row >= tile.rows || first >= p.N - j * 16) continue;
        const Four<float> finished = finish(four, first + j * 16);
        float* const to_row = reinterpret_cast<float*>(out) + first + j * 16;
        if (ptx::keep(int(to.destination)) == int(Destination::token)) {
          ptx::add_16(to_row, finished.value);
        } else {
          store_4(to_row, finished, 4, true);
        }
      }
    }
  }
  // By row, contiguous along the rows: eight of them lie side by side, which begin anywhere.
  __device__ __forceinline__ void store_turned(Sums sums, int number) const {
    const Epilogue& to = p.epilogue;
    const int row = row_held(number), first = tile.column + own_lane() % 4 * 2;
    const float weight = tile.weight[row];
    const auto store_as = [&](auto* out) {
      using Value = std::remove_reference_t<decltype(*out)>;
      out += first * to.out_stride + tile.row + row;
#pragma unroll
      for (int j = 0; j < kTileN / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (row >= tile.rows || first + i >= p.N - j * 8) continue;
          out[(j * 8 + i) * to.out_stride] = Value(weight * sums[number / 2][j * 4 + number % 2 * 2 + i]);
        }
      }
    };
    asked_type() == DType::float32 ? store_as(static_cast<float*>(to.out)) : store_as(static_cast<T*>(to.out));
  }
  __device__ __forceinline__ DType asked_type() const { return DType(ptx::keep(int(p.epilogue.out_type))); }

  // A thread has the gates and the ups of the same results where these are the halves of its tile.
  template <ActivationKind kKind, bool kGated>
  __device__ __forceinline__ void activate(Sums sums, int number) const {
    constexpr int kSteps = kGated ? kFours / 2 : kFours;
    const Epilogue& to = p.epilogue;
    const Activation& f = to.activation;
    const int row = row_held(number), lane = own_lane(), N = results(kGated, ptx::keep(p.N));
    const bool in_turn = kGated && f.interleaved;
    const int first = results(kGated, tile.column) + (in_turn ? lane % 4 * 4 : fours_column(lane));
    const int64_t out_row = tile.row + row;
    T* const pre = static_cast<T*>(to.pre) + out_row * to.pre_stride;
    char* const out = static_cast<char*>(to.out) + (out_row * to.out_stride + first) * size_of(to.out_type);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      Halves<float> z;
      if (!kGated) {
        z = {exchange_for_four(sums, number, j, lane), {}};
      } else if (asked(in_turn)) {
        const Eight<float> eight = exchange_for_eight(sums, number, j, lane);
        z = parted(eight.low, eight.high);
      } else {
        z = {exchange_for_four(sums, number, j, lane), exchange_for_four(sums, number, j + kSteps, lane)};
      }
      if (row >= tile.rows || first >= N - j * 16) continue;
      if (asked(to.bias) && works()) {
        const T* bias = static_cast<const T*>(to.bias) + tile.expert * to.bias_stride;
        const Halves<T> added = load_halves(f, kGated, bias, first + j * 16, N, 4, true);
        add(z.gate, added.gate), add(z.up, added.up);
      }
      if (asked(to.pre)) store_halves(f, kGated, pre, z, first + j * 16, N, 4, true);
      const Four<float> activated = moe::activate<false>(kKind, f, z);
      typed(static_cast<void*>(out), asked_type(), [&](auto* to_row) { store_4(to_row + j * 16, activated, 4, true); });
    }
  }

  // What was activated in a row comes to the thread that has its gradients, of eight columns at a time, while the row before is
  // led back: gates and ups, or four of both in turn and the next four.
  struct Activated {
    const Writer& writer;
    const T* first;
    int column;
    bool inside;

    __device__ __forceinline__ Activated(const Writer& from, int number)
        : writer(from), column(from.tile.column + own_lane() % 4 * 8) {
      const Epilogue& to = from.p.epilogue;
      const int row = row_held(number);
      first = static_cast<const T*>(to.pre) + int64_t(from.tile.row + row) * to.pre_stride + (column << in_turn());
      inside = from.works() && row < from.tile.rows;
    }
    __device__ __forceinline__ int in_turn() const { return writer.p.epilogue.activation.interleaved; }
    __device__ __forceinline__ uint32_t slot(int j, int part) const {
      return ptx::shared_address(writer.own_bytes) + ((j * 2 + part) * 32 + own_lane()) * 16;
    }
    __device__ __forceinline__ void bring(int j) const {
      const T* const from = first + (j * 32 << in_turn());
      const bool there = inside && column < writer.p.N - j * 32;
      ptx::copy_16_or_zero(slot(j, 0), from, there);
      ptx::copy_16_or_zero(slot(j, 1), from + (in_turn() ? 8 : writer.p.N), there && writer.p.epilogue.activation.gated);
      ptx::commit_copies();
    }
  };

  template <ActivationKind kKind>
  __device__ __forceinline__ void lead_back(Sums sums, int number) const {
    const Epilogue& to = p.epilogue;
    const Activation& f = to.activation;
    const int row = row_held(number), lane = own_lane(), first = tile.column + lane % 4 * 8, in_turn = f.interleaved;
    const int64_t out_row = tile.row + row;
    T* const d_pre = static_cast<T*>(to.d_pre) + out_row * to.d_pre_stride + (first << in_turn);
    T* const weighted = static_cast<T*>(to.out) + out_row * to.out_stride + first;
    const Activated next(*this, number + 1);
    const float weight = tile.weight[row];
    float dot = 0.f;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const Eight<float> d = exchange_for_eight(sums, number, j, lane);
      ptx::wait_copies<kEights - 1>();
      Eight<T> parts[2];
      ptx::load_shared_16(reinterpret_cast<float*>(&parts[0]), next.slot(j, 0));
      ptx::load_shared_16(reinterpret_cast<float*>(&parts[1]), next.slot(j, 1));
      next.bring(j);
      if (row >= tile.rows || first >= p.N - j * 32) continue;
      Halves<T> low{parts[0].low, parts[1].low}, high{parts[0].high, parts[1].high};
      if (asked(in_turn)) low = parted(parts[0].low, parts[0].high), high = parted(parts[1].low, parts[1].high);
      const Gradients of_low = activation_gradients<false>(kKind, f, low, weight * d.low);
      const Gradients of_high = activation_gradients<false>(kKind, f, high, weight * d.high);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        dot = fmaf(d.low.value[n], of_low.activated.value[n], dot);
        dot = fmaf(d.high.value[n], of_high.activated.value[n], dot);
      }
      if (asked(to.out)) store_8(weighted + j * 32, {weight * of_low.activated, weight * of_high.activated});
      if (!asked(to.d_pre)) continue;
      T* const gradient = d_pre + (j * 32 << in_turn);
      if (asked(in_turn)) {
        store_8(gradient, interleaved(of_low.pre)), store_8(gradient + 8, interleaved(of_high.pre));
      } else {
        store_8(gradient, {of_low.pre.gate, of_high.pre.gate});
        if (f.gated) store_8(gradient + p.N, {of_low.pre.up, of_high.pre.up});
      }
    }
    add_dot(dot, row);
  }
};

}  // namespace moe::wgmma

// Sorts assignments by expert, stably, without a word to the host: a counting sort in two launches, or in one of a single block.
// The second one runs beside the first, as the product behind it does beside it: each of its blocks sorts ids within shared memory
// and only then waits for the counts of the others. Where there are more than 1023 experts it sorts by some bits of the id at a
// time, lowest first, in two launches each.
#include "integers.cuh"
#include "launch.h"
#include "start.cuh"

namespace moe {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kItems = 4;  // ids of a thread in a tile
constexpr int kTileIds = kItems * kThreads;
constexpr int kDigitBits = 10, kDigits = 1 << kDigitBits;
constexpr int kMaxBlocks = 256;
constexpr int kMaxCounts = 1 << 17;  // of all blocks, for each block reads them all
constexpr int kCountBatch = 20;      // pairs of counts that a thread loads at once

// For two digits: their counts in 16 bits each for each warp, and four words.
constexpr int kPairBytes = (kWarps + 4) * int(sizeof(int));
static_assert(kDigits <= 2 * kThreads, "a thread looks after two digits");
static_assert(kDigitBits <= 16 && kTileIds <= 1 << 15, "both are packed into a word");

// How S ids are shared out, and the bits of the id that one pass sorts by.
struct Plan {
  int passes, bits;
  int chunk;  // ids of a block: whole tiles
  int blocks;
  int planes;  // of counts: the lower 16 bits, and where they do not suffice the upper ones
};

// One pass: `sorted` is `order`, stably sorted by digit. Ids outside [0, E) count as E, so they come last.
struct Pass {
  Plan plan;
  const int* order;  // null: 0, 1, 2, ...
  int* sorted;
  int* offs;         // where each digit but the last ends, or null
  unsigned* counts;  // [planes, blocks, pairs]: two digits a word
  int shift, digits, pairs;
  int groups;  // of threads that add up counts, each those of its share of the blocks
};

int digit_count(int E, int shift, int bits) { return (E >> shift) < (1 << bits) ? (E >> shift) + 1 : 1 << bits; }

Plan make_plan(int S, int E) {
  Plan plan{};
  int bits = 1;
  while (int64_t(E) >> bits) ++bits;
  plan.passes = pieces(bits, kDigitBits);
  plan.bits = pieces(bits, plan.passes);
  const int fit = kMaxCounts / digit_count(E, 0, plan.bits);
  plan.chunk = pieces(pieces(S, kTileIds), fit < kMaxBlocks ? fit : kMaxBlocks) * kTileIds;
  plan.blocks = S ? pieces(S, plan.chunk) : 0;
  plan.planes = plan.chunk >> 16 ? 2 : 1;
  return plan;
}

// A single block keeps its counts to itself.
int64_t count_words(const Plan& plan) {
  return plan.blocks > 1 ? int64_t(plan.planes) * plan.blocks << (plan.bits - 1) : 0;
}

// Where an item of this thread lies in its tile: in the order of warps, then items, then lanes.
__device__ __forceinline__ int offset_of(int item) {
  return threadIdx.x / 32 * (32 * kItems) + 32 * item + threadIdx.x % 32;
}

// The digits of this thread's items of a tile of `count` ids from `begin` on, and the lanes whose item has the same one. Items
// past the end are in no lane's peers. They load the last id, for loads without a condition are the ones that the compiler
// starts all at once. A vote for each bit of the digit takes the same time for any ids, __match_any_sync more for different
// ones.
__device__ __forceinline__ void load(const RouteProblem& p, const Pass& pass, int begin, int count, int (&digit)[kItems],
                                     unsigned (&peers)[kItems]) {
  int assignment[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) assignment[i] = begin + min(offset_of(i), count - 1);
  if (pass.order) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) assignment[i] = pass.order[assignment[i]];
  }
  integers(p.ids, p.id_type, [&](const auto* ids) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) digit[i] = (expert_of(ids, assignment[i], p.E) >> pass.shift) & ((1 << pass.plan.bits) - 1);
  });
#pragma unroll
  for (int i = 0; i < kItems; ++i) peers[i] = __ballot_sync(~0u, offset_of(i) < count);
  for (int bit = 0; bit < pass.plan.bits; ++bit) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool set = digit[i] >> bit & 1;
      const unsigned votes = __ballot_sync(~0u, set);
      peers[i] &= set ? votes : ~votes;
    }
  }
}

// Whether this lane is the one that acts for its peers.
__device__ __forceinline__ bool leads(unsigned peers) { return __ffs(peers) - 1 == int(threadIdx.x % 32); }

__device__ __forceinline__ int ids_of_block(const RouteProblem& p, const Pass& pass) {
  return min(pass.plan.chunk, p.S - int(blockIdx.x) * pass.plan.chunk);
}

// How often each digit occurs in this block's chunk. Equal ones are counted once a warp, so that one expert with all of the
// assignments is no slower. What place reads before it waits is there once these blocks have begun.
__global__ void __launch_bounds__(kThreads) count(const __grid_constant__ RouteProblem p, const __grid_constant__ Pass pass) {
  __shared__ int found[kDigits];
  wait_for_launch_before();
  let_next_launch_begin();
  for (int digit = threadIdx.x; digit < 2 * pass.pairs; digit += kThreads) found[digit] = 0;
  __syncthreads();
  const int ids = ids_of_block(p, pass);
  for (int done = 0; done < ids; done += kTileIds) {
    int digit[kItems];
    unsigned peers[kItems];
    load(p, pass, blockIdx.x * pass.plan.chunk + done, min(kTileIds, ids - done), digit, peers);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (leads(peers[i])) atomicAdd(&found[digit[i]], __popc(peers[i]));
    }
  }
  __syncthreads();
  const int pair = threadIdx.x;
  if (pair >= pass.pairs) return;
  const unsigned low = found[2 * pair], high = found[2 * pair + 1];
  unsigned* counts = pass.counts + blockIdx.x * pass.pairs + pair;
  counts[0] = (low & 0xffff) | high << 16;
  if (pass.plan.planes > 1) counts[gridDim.x * pass.pairs] = low >> 16 | (high & 0xffff0000);
}

// The sums of all blocks' counts, and of those of the blocks before this one, are added to `total` and `before`. Each block
// does this anew, which takes no third launch and nothing that blocks would have to wait for.
__device__ __forceinline__ void add_counts(const Pass& pass, int* total, int* before) {
  const int blocks = gridDim.x, pairs = pass.pairs, groups = pass.groups;
  const int group = threadIdx.x / pairs, pair = threadIdx.x % pairs;
  if (group >= groups) return;
  for (int plane = 0; plane < pass.plan.planes; ++plane) {
    const unsigned* counts = pass.counts + plane * blocks * pairs;
    unsigned all = 0, earlier = 0, all_high = 0, earlier_high = 0;  // of words, and of their upper halves
    for (int first = group; first < blocks; first += kCountBatch * groups) {
      unsigned found[kCountBatch];
#pragma unroll
      for (int j = 0; j < kCountBatch; ++j) {
        found[j] = __ldcg(counts + unsigned(min(first * pairs + pair + j * groups * pairs, (blocks - 1) * pairs + pair)));
      }
#pragma unroll
      for (int j = 0; j < kCountBatch; ++j) {
        const int block = first + j * groups;
        if (block < blocks) all += found[j], all_high += found[j] >> 16;
        if (block < int(blockIdx.x)) earlier += found[j], earlier_high += found[j] >> 16;
      }
    }
    atomicAdd(&total[2 * pair], int((all - (all_high << 16)) << 16 * plane));
    atomicAdd(&total[2 * pair + 1], int(all_high << 16 * plane));
    atomicAdd(&before[2 * pair], int((earlier - (earlier_high << 16)) << 16 * plane));
    atomicAdd(&before[2 * pair + 1], int(earlier_high << 16 * plane));
  }
}

// The sum of `value` over the threads before this one.
__device__ __forceinline__ int sum_before(int value) {
  __shared__ int warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  return sum - value + __reduce_add_sync(~0u, lane < warp ? warp_sums[lane] : 0);
}

// Writes the assignments of this block's chunk where they belong. Each tile is sorted in shared memory first, so that what is
// written one behind the other mostly lies so.
__global__ void __launch_bounds__(kThreads, 2)
    place(const __grid_constant__ RouteProblem p, const __grid_constant__ Pass pass) {
  __shared__ int tile[kTileIds];  // sorted: where in the tile an id was, and its digit
  extern __shared__ int shared[];
  // Before this kernel has waited itself: what waits for its end has then waited for that of the counts too. A single block, which
  // does not wait, was launched in the usual way.
  let_next_launch_begin();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pair = threadIdx.x, pairs = pass.pairs;
  const bool has_pair = pair < pairs;
  int *shifts = shared, *before = shared + 2 * pairs;  // by digit
  unsigned* found = reinterpret_cast<unsigned*>(before + 2 * pairs);  // [kWarps, pairs]: counts, then places in the tile
  uint16_t* mine = reinterpret_cast<uint16_t*>(found + warp * pairs);
  if (has_pair) shifts[2 * pair] = shifts[2 * pair + 1] = before[2 * pair] = before[2 * pair + 1] = 0;
  int next[2] = {};  // where the next assignment of each digit of the pair goes
  const int ids = ids_of_block(p, pass);
  for (int done = 0; done < ids; done += kTileIds) {
    const int begin = blockIdx.x * pass.plan.chunk + done, count = min(kTileIds, ids - done);
    int digit[kItems], rank[kItems];
    unsigned peers[kItems];
    for (int i = lane; i < pairs; i += 32) found[warp * pairs + i] = 0;
    load(p, pass, begin, count, digit, peers);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      __syncwarp();  // the last item's leaders have written
      const int start = mine[digit[i]];
      __syncwarp();  // all have read
      if (leads(peers[i])) mine[digit[i]] = start + __popc(peers[i]);
      rank[i] = start + __popc(peers[i] & ((1u << lane) - 1));
    }
    __syncthreads();

    // From counts to places: of the smaller digits, then of the warps before.
    unsigned counts[kWarps], sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) counts[i] = has_pair ? found[i * pairs + pair] : 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const unsigned warp_count = counts[i];
      counts[i] = sum;
      sum += warp_count;
    }
    const int low = sum & 0xffff, high = sum >> 16;
    const int start = sum_before(low + high);
    if (has_pair) {
      const unsigned starts = start | (start + low) << 16;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) found[i * pairs + pair] = starts + counts[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (offset_of(i) < count) tile[mine[digit[i]] + rank[i]] = offset_of(i) << kDigitBits | digit[i];
    }

    if (done == 0) {
      int total[2] = {low, high};
      next[0] = start, next[1] = start + low;
      if (gridDim.x > 1) {
        wait_for_launch_before();
        add_counts(pass, shifts, before);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) total[i] = has_pair ? shifts[2 * pair + i] : 0;
        next[0] = sum_before(total[0] + total[1]);
        next[1] = next[0] + total[0];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pass.offs && blockIdx.x == 0 && 2 * pair + i < pass.digits - 1) pass.offs[2 * pair + i] = next[i] + total[i];
        if (has_pair) next[i] += before[2 * pair + i];
      }
    }
    if (has_pair) {
      shifts[2 * pair] = next[0] - start, shifts[2 * pair + 1] = next[1] - start - low;
      next[0] += low, next[1] += high;
    }
    __syncthreads();
    int assignment[kItems], row[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int place = threadIdx.x + i * kThreads, item = tile[min(place, count - 1)];
      assignment[i] = begin + (item >> kDigitBits);
      row[i] = shifts[item % kDigits] + place;
    }
    if (pass.order) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) assignment[i] = pass.order[assignment[i]];
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (int(threadIdx.x) + i * kThreads < count) pass.sorted[row[i]] = assignment[i];
    }
  }
}

// Where each expert ends in the sorted rows: at the first one of a larger key.
__global__ void __launch_bounds__(kThreads) find_ends(const __grid_constant__ RouteProblem p) {
  wait_for_launch_before();
  const int64_t expert = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (expert >= p.E) return;
  integers(p.ids, p.id_type, [&](const auto* ids) {
    int low = 0, high = p.S;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (expert_of(ids, p.row_assignment[middle], p.E) <= expert) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    p.offs[expert] = low;
  });
}

}  // namespace

int64_t route_words(int S, int E) {
  const Plan plan = make_plan(S, E);
  return count_words(plan) + (plan.passes > 1 ? S : 0);
}

cudaError_t launch_route(const RouteProblem& p, int* scratch, cudaStream_t stream) {
  if (p.S == 0) return cudaMemsetAsync(p.offs, 0, p.E * sizeof(int), stream);
  const Plan plan = make_plan(p.S, p.E);
  int* other = scratch + count_words(plan);  // the last pass ends in row_assignment, the one before here
  // As much as any launch takes: a call with fewer experts must not lower it under another thread's launch.
  cudaError_t error = cudaFuncSetAttribute(place, cudaFuncAttributeMaxDynamicSharedMemorySize, kPairBytes * kDigits / 2);
  // From the fourth pass on a buffer that has been written twice is read before the wait.
  const bool waits = plan.passes <= 3;
  const int* order = nullptr;
  for (int i = 0; i < plan.passes && error == cudaSuccess; ++i) {
    Pass pass{};
    pass.plan = plan;
    pass.order = order;
    pass.sorted = (plan.passes - i) % 2 ? p.row_assignment : other;
    pass.offs = plan.passes == 1 ? p.offs : nullptr;
    pass.counts = reinterpret_cast<unsigned*>(scratch);
    pass.shift = i * plan.bits;
    pass.digits = digit_count(p.E, pass.shift, plan.bits);
    pass.pairs = pieces(pass.digits, 2);
    const int held = kThreads / pass.pairs, wanted = pieces(plan.blocks, kCountBatch);
    pass.groups = held < wanted ? held : wanted;
    // A single block counts by itself.
    if (plan.blocks > 1) error = launch_kernel(count, plan.blocks, kThreads, 0, waits && i > 0, stream, p, pass);
    const bool early = waits && plan.blocks > 1;
    if (error == cudaSuccess) {
      error = launch_kernel(place, plan.blocks, kThreads, kPairBytes * pass.pairs, early, stream, p, pass);
    }
    order = pass.sorted;
  }
  if (plan.passes > 1 && error == cudaSuccess) {
    error = launch_kernel(find_ends, pieces(p.E, kThreads), kThreads, 0, waits, stream, p);
  }
  return error;
}

}  // namespace moe

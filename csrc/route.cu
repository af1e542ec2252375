// Sorts assignments by expert, stably, without a word to the host: a counting sort in two launches. Where there are more
// than 1023 experts it sorts by ten bits of the id at a time, lowest first, in two launches each.
#include "launch.h"

namespace moe {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kDigitBits = 10, kDigits = 1 << kDigitBits;
constexpr int kMaxBlocks = 128, kMinChunk = 2048;
constexpr int kBatch = 4;        // ids a lane loads at once
constexpr int kCountBatch = 16;  // counts a thread loads at once
constexpr int kAbsent = -1;      // the digit of a lane that has no id

// Two words for each digit, and one for each warp and digit.
constexpr int kSharedBytes = (2 + kWarps) * kDigits * int(sizeof(int));

// One pass: `sorted` is `order`, stably sorted by digit. Ids outside [0, E) count as E, so they come last.
struct Pass {
  const int* order;  // null: 0, 1, 2, ...
  int* sorted;
  int* offs;    // where each digit but the last ends, or null
  int* counts;  // [blocks, digits]
  int shift, digits;
  int chunk;  // of `order` for a block
};

int chunk_size(int S) {
  const int least = int((int64_t(S) + kMaxBlocks - 1) / kMaxBlocks);
  return least <= kMinChunk ? kMinChunk : (least + kThreads - 1) / kThreads * kThreads;
}

int block_count(int S) {
  const int blocks = pieces(S, chunk_size(S));
  return blocks ? blocks : 1;  // no ids have offsets too
}

int digit_count(int E, int shift) { return (E >> shift) < kDigits ? (E >> shift) + 1 : kDigits; }

int pass_count(int E) {
  int passes = 1;
  while (int64_t(E) >> (passes * kDigitBits)) ++passes;
  return passes;
}

// Compared in all 64 bits, before anything is cut off.
template <typename Id>
__device__ __forceinline__ int key(const Id* ids, int assignment, int E) {
  const int64_t id = ids[assignment];
  return 0 <= id && id < E ? int(id) : E;
}

// Calls use with the ids as what they are.
template <typename Use>
__device__ __forceinline__ void typed(const RouteProblem& p, Use use) {
  switch (p.id_type) {
    case IdType::int8: return use(static_cast<const int8_t*>(p.ids));
    case IdType::uint8: return use(static_cast<const uint8_t*>(p.ids));
    case IdType::int16: return use(static_cast<const int16_t*>(p.ids));
    case IdType::int32: return use(static_cast<const int32_t*>(p.ids));
    case IdType::int64: return use(static_cast<const int64_t*>(p.ids));
  }
}

// Calls use(digit, assignment, peers) for the ids of this warp's share of the chunk in order, 32 at a time; `peers` are the
// lanes of an equal digit. All lanes take part: those past the end have the digit kAbsent. They load the last id, for loads
// without a condition are the ones that the compiler starts all at once; so it is with the counts below.
template <typename Use>
__device__ __forceinline__ void for_each(const RouteProblem& p, const Pass& pass, Use use) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = pass.chunk / kWarps;
  const int64_t begin = int64_t(blockIdx.x) * pass.chunk + warp * share;  // which may lie behind S
  const int count = int(min(int64_t(share), p.S - begin));
  for (int first = 0; first < count; first += 32 * kBatch) {
    int assignment[kBatch], digit[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) assignment[i] = int(begin) + min(first + 32 * i + lane, count - 1);
    if (pass.order) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) assignment[i] = pass.order[assignment[i]];
    }
    typed(p, [&](const auto* ids) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) digit[i] = (key(ids, assignment[i], p.E) >> pass.shift) % kDigits;
    });
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + 32 * i + lane >= count) digit[i] = kAbsent;
      use(digit[i], assignment[i], __match_any_sync(~0u, digit[i]));
    }
  }
}

// Whether this lane is the one that acts for its peers.
__device__ __forceinline__ bool leads(unsigned peers) { return __ffs(peers) - 1 == int(threadIdx.x % 32); }

// How often each digit occurs in this block's chunk. Equal ones are counted once a warp, so that one expert with all of the
// assignments is no slower.
__global__ void __launch_bounds__(kThreads) count(const __grid_constant__ RouteProblem p, const __grid_constant__ Pass pass) {
  __shared__ int found[kDigits];
  for (int digit = threadIdx.x; digit < pass.digits; digit += kThreads) found[digit] = 0;
  __syncthreads();
  for_each(p, pass, [&](int digit, int, unsigned peers) {
    if (digit != kAbsent && leads(peers)) atomicAdd(&found[digit], __popc(peers));
  });
  __syncthreads();
  int* counts = pass.counts + blockIdx.x * pass.digits;
  for (int digit = threadIdx.x; digit < pass.digits; digit += kThreads) counts[digit] = found[digit];
}

// The sums of all blocks' counts, and of those of the blocks before this one, are added to `total` and `before`. Each block
// does this anew, which takes no third launch and nothing that blocks would have to wait for.
__device__ __forceinline__ void add_counts(const Pass& pass, int* total, int* before) {
  const int blocks = gridDim.x, digits = pass.digits;
  const int groups = max(min(kThreads / digits, kWarps), 1);  // of threads, each with its share of the blocks
  for (int i = threadIdx.x; i < groups * digits; i += kThreads) {
    const int digit = i % digits;
    int all = 0, earlier = 0;
    for (int first = i / digits; first < blocks; first += kCountBatch * groups) {
      int found[kCountBatch];
#pragma unroll
      for (int j = 0; j < kCountBatch; ++j) {
        found[j] = pass.counts[min(first + j * groups, blocks - 1) * digits + digit];
      }
#pragma unroll
      for (int j = 0; j < kCountBatch; ++j) {
        const int block = first + j * groups;
        all += block < blocks ? found[j] : 0;
        earlier += block < int(blockIdx.x) ? found[j] : 0;
      }
    }
    atomicAdd(&total[digit], all);
    atomicAdd(&before[digit], earlier);
  }
}

// `total` becomes the place of each digit's first assignment of this block: behind the smaller digits, and behind the equal
// ones of the blocks before. A thread has two digits.
__device__ __forceinline__ void totals_to_starts(const Pass& pass, int* total, const int* before) {
  __shared__ int warp_totals[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = 2 * threadIdx.x;
  int count[2], end = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    count[i] = first + i < pass.digits ? total[first + i] : 0;
    end += count[i];
  }
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, end, step);
    if (lane >= step) end += below;
  }
  if (lane == 31) warp_totals[warp] = end;
  __syncthreads();
  for (int i = 0; i < warp; ++i) end += warp_totals[i];
  int start = end - count[0] - count[1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int digit = first + i;
    if (digit < pass.digits) {
      total[digit] = start + before[digit];
      start += count[i];
      if (pass.offs && blockIdx.x == 0 && digit < pass.digits - 1) pass.offs[digit] = start;
    }
  }
}

// Writes the assignments of this block's chunk where they belong.
__global__ void __launch_bounds__(kThreads) place(const __grid_constant__ RouteProblem p, const __grid_constant__ Pass pass) {
  extern __shared__ int shared[];
  const int digits = pass.digits;
  int *total = shared, *before = total + digits;
  int* next = before + digits;  // [kWarps, digits]: counts, then where each warp's next assignment of a digit goes
  int* mine = next + threadIdx.x / 32 * digits;
  for (int i = threadIdx.x; i < (2 + kWarps) * digits; i += kThreads) shared[i] = 0;
  __syncthreads();
  add_counts(pass, total, before);
  for_each(p, pass, [&](int digit, int, unsigned peers) {
    if (digit != kAbsent && leads(peers)) mine[digit] += __popc(peers);
    __syncwarp();  // the digit's next leader is another lane
  });
  __syncthreads();
  totals_to_starts(pass, total, before);
  __syncthreads();
  for (int digit = threadIdx.x; digit < digits; digit += kThreads) {
    int found[kWarps], start = total[digit];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) found[warp] = next[warp * digits + digit];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      next[warp * digits + digit] = start;
      start += found[warp];
    }
  }
  __syncthreads();
  const unsigned lower_lanes = (1u << threadIdx.x % 32) - 1;
  for_each(p, pass, [&](int digit, int assignment, unsigned peers) {
    const int start = digit != kAbsent ? mine[digit] : 0;
    __syncwarp();  // all have read before a leader writes, and it has written before they read again
    if (digit != kAbsent && leads(peers)) mine[digit] = start + __popc(peers);
    __syncwarp();
    if (digit != kAbsent) pass.sorted[start + __popc(peers & lower_lanes)] = assignment;
  });
}

// Where each expert ends in the sorted rows: at the first one of a larger key.
__global__ void __launch_bounds__(kThreads) find_ends(const __grid_constant__ RouteProblem p) {
  const int64_t expert = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (expert >= p.E) return;
  typed(p, [&](const auto* ids) {
    int low = 0, high = p.S;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (key(ids, p.row_assignment[middle], p.E) <= expert) {
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
  return int64_t(block_count(S)) * digit_count(E, 0) + (pass_count(E) > 1 ? S : 0);
}

cudaError_t launch_route(const RouteProblem& p, int* scratch, cudaStream_t stream) {
  const int blocks = block_count(p.S), passes = pass_count(p.E);
  int* other = scratch + int64_t(blocks) * digit_count(p.E, 0);  // the last pass ends in row_assignment, the one before here
  // As much as any launch takes: a call with fewer experts must not lower it under another thread's launch.
  cudaError_t error = cudaFuncSetAttribute(place, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  const int* order = nullptr;
  for (int i = 0; i < passes && error == cudaSuccess; ++i) {
    Pass pass{};
    pass.order = order;
    pass.sorted = (passes - i) % 2 ? p.row_assignment : other;
    pass.offs = passes == 1 ? p.offs : nullptr;
    pass.counts = scratch;
    pass.shift = i * kDigitBits;
    pass.digits = digit_count(p.E, pass.shift);
    pass.chunk = chunk_size(p.S);
    count<<<blocks, kThreads, 0, stream>>>(p, pass);
    place<<<blocks, kThreads, kSharedBytes / kDigits * pass.digits, stream>>>(p, pass);
    error = cudaGetLastError();
    order = pass.sorted;
  }
  if (passes > 1 && error == cudaSuccess) {
    find_ends<<<pieces(p.E, kThreads), kThreads, 0, stream>>>(p);
    error = cudaGetLastError();
  }
  return error;
}

}  // namespace moe

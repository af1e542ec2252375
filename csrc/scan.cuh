// Running sums and maxima over the threads of a block.
#pragma once

namespace moe {

constexpr int kScanThreads = 1024;  // of a block that does nothing else

struct Max {
  template <typename Value>
  __device__ Value operator()(Value a, Value b) const {
    return a > b ? a : b;
  }
};
struct Sum {
  template <typename Value>
  __device__ Value operator()(Value a, Value b) const {
    return a + b;
  }
};

// This thread's value combined with those of all threads before it; all threads of the block together.
// warp_totals[32]: that of the last warp is that of all values afterwards; those of warps that are not there may be anything.
template <typename Value, typename Operator>
__device__ Value block_scan(Value value, Operator combine, Value* warp_totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const Value below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value = combine(value, below);
  }
  __syncthreads();  // the totals of an earlier scan have been read
  if (lane == 31) warp_totals[warp] = value;
  __syncthreads();
  if (warp == 0) {
    Value total = warp_totals[lane];
    for (int step = 1; step < 32; step *= 2) {
      const Value below = __shfl_up_sync(~0u, total, step);
      if (lane >= step) total = combine(total, below);
    }
    warp_totals[lane] = total;
  }
  __syncthreads();
  return warp ? combine(warp_totals[warp - 1], value) : value;
}

// The last of `count` running sums that is no larger than `value`; the first one is.
template <typename Value>
__device__ __forceinline__ int last_up_to(const Value* sums, int count, int value) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (sums[middle] <= value ? low : high) = middle;
  }
  return low;
}

}  // namespace moe

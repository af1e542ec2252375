// Running sums of group sizes, in one block and one launch.
#include "integers.cuh"
#include "scan.cuh"
#include "start.cuh"

namespace moe {
namespace {

constexpr int64_t kMost = 0x7fffffff;

// Saturated to int32 on the way down, so that a wrong sum cannot wrap to a plausible one.
__global__ void __launch_bounds__(kScanThreads) group_ends_kernel(const void* sizes, IdType type, int E, int* offs) {
  __shared__ int64_t warp_totals[32];
  int64_t before = 0;
  for (unsigned first = 0; first < unsigned(E); first += kScanThreads) {
    const unsigned group = first + threadIdx.x;
    int64_t size = 0;
    integers(sizes, type, [&](const auto* given) {
      if (group < unsigned(E)) size = given[group];
    });
    const int64_t end = before + block_scan(size, Sum{}, warp_totals);
    if (group < unsigned(E)) offs[group] = int(end < -1 ? -1 : end > kMost ? kMost : end);
    before += warp_totals[31];
  }
}

}  // namespace

cudaError_t launch_group_ends(const void* sizes, IdType type, int E, int* offs, cudaStream_t stream) {
  return launch_kernel(group_ends_kernel, 1, kScanThreads, 0, false, stream, sizes, type, E, offs);
}

}  // namespace moe

// Boxes of a tensor by the bulk copy engine (cp.async.bulk.tensor, 9.0 and newer).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace ptx {

// Loads the box at (x, y, z) of a tensor of three dimensions; its bytes, those outside the tensor too, count for `barrier`.
__device__ __forceinline__ void load_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same into the shared memory of all CTAs of the cluster, to the same place and the same barrier in each.
template <int kCtas>
__device__ __forceinline__ void load_box_for_all(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y,
                                                 int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(uint16_t((1 << kCtas) - 1))
      : "memory");
}

// The box at (x, y) of a matrix.
__device__ __forceinline__ void load_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// Stores a box, or adds it to what is there, as far as it lies in the tensor; commit_bulk() and wait_bulk_read() tell when its
// shared memory may be written again.
__device__ __forceinline__ void store_box(const CUtensorMap* map, int x, int y, int z, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(x), "r"(y),
               "r"(z), "r"(shared)
               : "memory");
}

__device__ __forceinline__ void add_box(const CUtensorMap* map, int x, int y, int z, uint32_t shared) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(shared)
               : "memory");
}

}  // namespace ptx

// Integers of any type, in device code.
#pragma once

#include "problem.h"

namespace moe {

// Calls use with `data` as what it is.
template <typename Use>
__device__ __forceinline__ void integers(const void* data, IdType type, Use use) {
  switch (type) {
    case IdType::int8: return use(static_cast<const int8_t*>(data));
    case IdType::uint8: return use(static_cast<const uint8_t*>(data));
    case IdType::int16: return use(static_cast<const int16_t*>(data));
    case IdType::int32: return use(static_cast<const int32_t*>(data));
    case IdType::int64: return use(static_cast<const int64_t*>(data));
  }
}

// The expert of an assignment, or E for ids that are none's. Compared in all 64 bits, before anything is cut off.
template <typename Id>
__device__ __forceinline__ int expert_of(const Id* ids, int assignment, int E) {
  const int64_t id = __ldcg(ids + assignment);  // a kernel that begins early may not go by an L1 of the time before
  return 0 <= id && id < E ? int(id) : E;
}

}  // namespace moe

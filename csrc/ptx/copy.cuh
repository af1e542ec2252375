// Asynchronous copies from global into shared memory (cp.async) and bulk reductions back (cp.reduce.async.bulk).
#pragma once

#include <cstdint>

namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A value of which the compiler no longer knows how it came about: it stays in its registers, and what follows from it is
// not computed in advance.
template <typename T>
__device__ __forceinline__ T keep(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// Copies 16 or 4 bytes, or writes zeros where `live` is false; nothing is read then.
__device__ __forceinline__ void copy_16_or_zero(uint32_t shared, const void* global, bool live) {
  asm volatile(
      "{\n"
      ".reg .pred skip;\n"
      "setp.eq.u32 skip, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, skip;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(unsigned(live))
      : "memory");
}

__device__ __forceinline__ void copy_4_or_zero(uint32_t shared, const void* global, bool live) {
  asm volatile(
      "{\n"
      ".reg .pred skip;\n"
      "setp.eq.u32 skip, %2, 0;\n"
      "cp.async.ca.shared.global.L2::128B [%0], [%1], 4, skip;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(unsigned(live))
      : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// kWords 32-bit words (2 or 4, as many as their alignment) that nothing writes while the kernel runs.
template <int kWords>
struct Words {
  uint32_t word[kWords];
};

template <int kWords>
__device__ __forceinline__ Words<kWords> load_words(const void* global);

template <>
__device__ __forceinline__ Words<2> load_words<2>(const void* global) {
  Words<2> to;
  asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(to.word[0]), "=r"(to.word[1]) : "l"(global));
  return to;
}

template <>
__device__ __forceinline__ Words<4> load_words<4>(const void* global) {
  Words<4> to;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
               : "l"(global));
  return to;
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void load_shared_16(float* to, uint32_t shared) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"(shared));
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared));
  return value;
}

__device__ __forceinline__ void store_shared_8(uint32_t shared, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(first), "f"(second) : "memory");
}

// Volatile, so that ptxas doesn't make one store of several.
__device__ __forceinline__ void store_shared_4(uint32_t shared, float value) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(shared), "f"(value) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What threads have written to shared memory, by cp.async too, and this one knows of, is seen by the copy engine and wgmma.
__device__ __forceinline__ void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Adds `bytes` (a multiple of 16) of float32 in shared memory to global memory; both 16-byte aligned.
__device__ __forceinline__ void bulk_add(float* global, uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but this thread's last kPending bulk operations have read their shared memory, so that it may be written
// again.
template <int kPending>
__device__ __forceinline__ void wait_bulk_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Adds four neighbouring values to global memory, 16-byte aligned, each of them atomically.
__device__ __forceinline__ void add_16(float* global, const float (&value)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
}

#endif

}  // namespace ptx

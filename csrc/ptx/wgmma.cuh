// Warpgroup multiply of 9.0a (wgmma): both operands in shared memory, four warps together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ptx {

// An address in shared memory without the bits that tell the CTAs of a cluster apart, which descriptors have no room for.
__device__ __forceinline__ uint32_t within_cta(uint32_t shared) { return shared & 0x3ffff; }

// Shared memory as wgmma reads it, with the 128-byte swizzle, from an address within_cta(). `leading` and `stride` are
// distances in bytes between the 8 x 64 cores of an operand: along its contiguous dimension (of no meaning where that is k)
// and across.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t shared, int leading, int stride) {
  return uint64_t(shared >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(1) << 62;
}

// Orders the accumulators' registers before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The accumulators are not used before this point, where their products have ended.
template <int kSums>
__device__ __forceinline__ void wgmma_done(float (&sums)[kSums]) {
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// Stores four 8x8 matrices of 16-bit values as the accumulators hold them, packed in pairs; lane l gives the address of row
// l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix(uint32_t shared, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// Moves registers between the warpgroups of a block; all warps of this one together.
template <int kCount>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// c += a[64 x 16] * b[16 x kN]; kBAcross: b is contiguous along n and not along k.
template <typename T, int kN, bool kBAcross>
struct Wgmma;

#define MOE_WGMMA_8(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define MOE_WGMMA_32(c, i) MOE_WGMMA_8(c, i), MOE_WGMMA_8(c, i + 8), MOE_WGMMA_8(c, i + 16), MOE_WGMMA_8(c, i + 24)

#define MOE_WGMMA(TYPE, NAME, N, LIST, A, B, ACROSS, ...)                                                              \
  template <bool kBAcross>                                                                                             \
  struct Wgmma<TYPE, N, kBAcross> {                                                                                    \
    static __device__ __forceinline__ void multiply(float (&c)[N / 2], uint64_t a, uint64_t b) {                       \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST "}, " A ", " B            \
                   ", 1, 1, 1, 0, " ACROSS ";"                                                                         \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b), "n"(int(kBAcross)));                                                              \
    }                                                                                                                  \
  };

// The same with a from registers, as load_matrix_transposed() brings 16 x 16 of it to each warp.
#define MOE_WGMMA_REGISTERS(TYPE, NAME, N, LIST, A, B, ACROSS, ...)                                                    \
  template <bool kBAcross>                                                                                             \
  __device__ __forceinline__ void multiply_registers(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, TYPE) {    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST "}, " A ", " B              \
                 ", 1, 1, 1, " ACROSS ";"                                                                              \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kBAcross)));                            \
  }

#define MOE_LIST_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOE_LIST_64 \
  MOE_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOE_LIST_96 \
  MOE_LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MOE_LIST_128 \
  MOE_LIST_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define MOE_SUMS_32 MOE_WGMMA_32(c, 0)
#define MOE_SUMS_64 MOE_SUMS_32, MOE_WGMMA_32(c, 32)
#define MOE_SUMS_96 MOE_SUMS_64, MOE_WGMMA_32(c, 64)
#define MOE_SUMS_128 MOE_SUMS_96, MOE_WGMMA_32(c, 96)
#define MOE_REGISTERS "{%128, %129, %130, %131}"

MOE_WGMMA(__nv_bfloat16, "bf16", 64, MOE_LIST_32, "%32", "%33", "%34", MOE_SUMS_32)
MOE_WGMMA(__half, "f16", 64, MOE_LIST_32, "%32", "%33", "%34", MOE_SUMS_32)
MOE_WGMMA(__nv_bfloat16, "bf16", 128, MOE_LIST_64, "%64", "%65", "%66", MOE_SUMS_64)
MOE_WGMMA(__half, "f16", 128, MOE_LIST_64, "%64", "%65", "%66", MOE_SUMS_64)
MOE_WGMMA(__nv_bfloat16, "bf16", 192, MOE_LIST_96, "%96", "%97", "%98", MOE_SUMS_96)
MOE_WGMMA(__half, "f16", 192, MOE_LIST_96, "%96", "%97", "%98", MOE_SUMS_96)
MOE_WGMMA_REGISTERS(__nv_bfloat16, "bf16", 256, MOE_LIST_128, MOE_REGISTERS, "%132", "%133", MOE_SUMS_128)
MOE_WGMMA_REGISTERS(__half, "f16", 256, MOE_LIST_128, MOE_REGISTERS, "%132", "%133", MOE_SUMS_128)

#undef MOE_WGMMA
#undef MOE_WGMMA_REGISTERS
#undef MOE_WGMMA_8
#undef MOE_WGMMA_32
#undef MOE_LIST_32
#undef MOE_LIST_64
#undef MOE_LIST_96
#undef MOE_LIST_128
#undef MOE_SUMS_32
#undef MOE_SUMS_64
#undef MOE_SUMS_96
#undef MOE_SUMS_128
#undef MOE_REGISTERS

}  // namespace ptx

// How kernels are launched, one beside the end of the other where that is possible.
#pragma once

#include "launch.h"

namespace moe {

// Until all that the launch before wrote is there. Launched in the usual way, a kernel has waited already.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The next launch, if it may begin early, does once every block has come here or ended.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// `early`: the kernel may begin while the launch before it runs, for it waits by itself, if it was compiled to.
template <typename... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, int shared_bytes, bool early,
                          cudaStream_t stream, const Parameters&... arguments) {
  if (early) {
    cudaFuncAttributes compiled{};
    if (const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel); error != cudaSuccess) return error;
    early = compiled.ptxVersion >= 90;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute, config.numAttrs = early;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Starts a persistent kernel: as many blocks as the GPU holds, or fewer where there are fewer tiles. `tiles` is an upper bound;
// how many there really are is known on the device alone. A cluster of kCluster blocks takes as many tiles at once, which count
// as one here.
template <int kCluster = 1, typename... Parameters>
cudaError_t start(void (*kernel)(Parameters...), int threads, const Config& config, int64_t tiles, int blocks, bool early,
                  cudaStream_t stream, const Parameters&... arguments) {
  if (tiles == 0) return cudaSuccess;
  if (tiles >= (int64_t(1) << 31) - (1 << 20)) return cudaErrorInvalidConfiguration;  // they are counted in 32 bits
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes());
  if (error != cudaSuccess) return error;
  const int64_t resident = blocks / kCluster > 0 ? blocks / kCluster : 1;
  const int64_t started = (tiles < resident ? tiles : resident) * kCluster;
  return launch_kernel(kernel, unsigned(started), threads, config.shared_bytes(), early, stream, arguments...);
}

}  // namespace moe

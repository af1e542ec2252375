// Starts a persistent kernel: as many blocks as the GPU holds, or fewer where there are fewer tiles.
#pragma once

#include "launch.h"

namespace moe {

// `tiles` is an upper bound; how many there really are is known on the device alone. A cluster of kCluster blocks takes as
// many tiles at once, which count as one here.
template <int kCluster = 1, typename... Parameters>
cudaError_t start(void (*kernel)(Parameters...), int threads, const Config& config, int64_t tiles, int blocks,
                  cudaStream_t stream, const Parameters&... arguments) {
  if (tiles == 0) return cudaSuccess;
  if (tiles >= (int64_t(1) << 31) - (1 << 20)) return cudaErrorInvalidConfiguration;  // they are counted in 32 bits
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes());
  if (error != cudaSuccess) return error;
  const int64_t resident = blocks / kCluster > 0 ? blocks / kCluster : 1;
  const int64_t started = (tiles < resident ? tiles : resident) * kCluster;
  kernel<<<unsigned(started), threads, config.shared_bytes(), stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace moe

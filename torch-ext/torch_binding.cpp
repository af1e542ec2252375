#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  for (const char* schema : grouped_gemm_moe::kSchemas) {
    ops.def(schema);
  }
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)

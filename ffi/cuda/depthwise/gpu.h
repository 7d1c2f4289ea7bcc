// The properties of a GPU that the tilings of the depthwise kernels depend on.
#pragma once

#include <cstdint>

namespace jaxgrad {

struct Gpu {
  int architecture = 0;  // 10 * major + minor compute capability
  int multiprocessors = 0;
  int64_t shared_bytes = 0;         // of shared memory, largest per block
  int64_t shared_bytes_in_all = 0;  // of shared memory per multiprocessor
};

Gpu gpu_of(int device);

// Throws NoPlan if the kernels do not support the GPU.
void check_depthwise_gpu(const Gpu& gpu);

}  // namespace jaxgrad

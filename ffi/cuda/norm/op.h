// Normalization on the GPU, by the kernels of this folder. No XLA types.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/norm/plan.h"
#include "cuda/runtime/driver.h"

namespace jaxgrad {

NormGpu norm_gpu(int device);

// The kernel of a program, loaded on a device.
class NormKernel;

// Compiles and loads the kernel, if it is not cached. The device must be current. Throws NoPlan if the blocks that wait
// for each other do not fit the device at once, nvrtc::Error and driver::Error. Thread-safe; allowed while the stream
// is captured.
std::shared_ptr<const NormKernel> load_norm_kernel(const NormProgram& program, int device);

// Launches the kernel. The arrays are those of the pass.
void norm(CUstream stream, const NormProgram& program, const NormKernel& kernel, const NormArrays& arrays,
          double epsilon, void* workspace);

}  // namespace jaxgrad

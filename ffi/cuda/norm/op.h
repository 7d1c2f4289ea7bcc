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

struct NormPlan {
  NormProgram program;
  std::shared_ptr<const NormKernel> kernel;
};

// The plan of a call on a device, from a cache or made now. The device must be current. Throws NoPlan if the blocks
// that wait for each other do not fit the device at once, nvrtc::Error and driver::Error. Thread-safe; allowed while
// the stream is captured.
std::shared_ptr<const NormPlan> norm_plan(const NormKey& key, int device);

// Launches the kernel of a pass with its arrays.
void norm(CUstream stream, const NormPlan& plan, const NormArrays& arrays, double epsilon, void* workspace);

}  // namespace jaxgrad

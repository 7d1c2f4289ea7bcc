// Pooling on the GPU, by the kernels of this folder. No XLA types.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/pool_shape.h"
#include "cuda/pool/kernel_arguments.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

struct PoolKey {
  PoolPass pass;
  PoolShape shape;
  FloatType type;
  int64_t divisor = 1;  // of sums
};

// The source that is compiled for a call, without kDeviceSource, and its launches one after the other.
struct PoolProgram {
  struct Launch {
    const char* kernel;
    PoolArguments arguments;
    unsigned blocks;
  };

  std::string definitions;
  std::string source;
  std::vector<Launch> launches;
  int64_t workspace_bytes;  // the selected elements, between the two kernels of the gradient of a maximum
};

// Throws NoPlan for arrays of 2^31 elements or more, and windows of 65535 elements or more.
PoolProgram pool_program(const PoolKey& key);

// The kernels of a program, loaded on a device.
class PoolKernels;

// Compiles and loads the kernels, if they are not cached. The device must be current. Throws NoPlan as pool_program()
// does, nvrtc::Error and driver::Error. Thread-safe; allowed while the stream is captured.
std::shared_ptr<const PoolKernels> load_pool_kernels(const PoolProgram& program, int device);

// x: null if the pass does not read it; second: dy, or the tangent of x, or null.
void pool(CUstream stream, const PoolProgram& program, const PoolKernels& kernels, PoolPass pass, const void* x,
          const void* second, void* result, void* workspace);

}  // namespace jaxgrad

// The weight gradient of depthwise convolutions on the GPU, computed by the kernels of weight_gradient.cu. No XLA
// types.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/lru_cache.h"
#include "cuda/depthwise/weight_gradient_tiling.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/no_plan.h"

namespace jaxgrad {

// Everything that a plan depends on.
struct DepthwiseKey : ConvProblem {
  FloatType type{};
  int device = 0;

  bool operator==(const DepthwiseKey& other) const {
    return ConvProblem::operator==(other) && type == other.type && device == other.device;
  }
};

class DepthwiseKernels;

// The kernels for one problem, loaded on one device, and their launch. Immutable.
class DepthwisePlan {
 public:
  DepthwisePlan(const DepthwiseShape& shape, const DepthwiseTiling& tiling,
                std::shared_ptr<const DepthwiseKernels> kernels);

  // x and dy are channels last; the workspace has workspace_bytes(). All arrays are aligned to 16 bytes.
  void run(CUstream stream, const void* x, const void* dy, void* dw, void* workspace) const;

  int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  DepthwiseTiling tiling_;
  DepthwiseGradientArguments arguments_;
  int64_t taps_axis_, workspace_bytes_, dw_elements_;
  std::shared_ptr<const DepthwiseKernels> kernels_;
};

// Throws NoPlan if the kernels do not support the problem or the device. Compiles nothing.
void check_depthwise(const DepthwiseKey& key);

// Throws nvrtc::Error if NVRTC cannot compile for a device.
void check_compiler(int device);

// Returns the cached plan of a key; on a miss, compiles and loads the kernels. The key's device must be current. Throws
// NoPlan as check_depthwise() does, nvrtc::Error and driver::Error. Thread-safe; allowed while the stream is captured.
std::shared_ptr<const DepthwisePlan> depthwise_plan(const DepthwiseKey& key);

CacheInfo depthwise_plan_cache_info();

}  // namespace jaxgrad

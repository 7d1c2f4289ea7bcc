// The forward pass and the input gradient of depthwise convolutions on the GPU, computed by the kernels of
// convolution.cu and toeplitz.cu. No XLA types.
#pragma once

#include <cstdint>
#include <memory>

#include "common/lru_cache.h"
#include "cuda/depthwise/convolution_program.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/no_plan.h"

namespace jaxgrad {

// Everything that a plan depends on. The pass is ConvPass::kForward or ConvPass::kInputGradient.
struct DepthwiseConvolutionKey : ConvProblem {
  FloatType type{};
  bool relu = false;
  int device = 0;

  bool operator==(const DepthwiseConvolutionKey& other) const {
    return ConvProblem::operator==(other) && type == other.type && relu == other.relu && device == other.device;
  }
};

class DepthwiseConvolutionKernel;

// The kernel for one problem, loaded on one device, and its launch. Immutable.
class DepthwiseConvolutionPlan {
 public:
  DepthwiseConvolutionPlan(const DepthwiseProgram& program, int64_t multiprocessors,
                           std::shared_ptr<const DepthwiseConvolutionKernel> kernel);

  // `in` is x or dy, `out` is y or dx: channels last and aligned to 16 bytes. bias: [channels] or null.
  void run(CUstream stream, const void* in, const void* w, const void* bias, void* out) const;

 private:
  int64_t threads_, shared_bytes_;
  DepthwiseGrid grid_;
  std::shared_ptr<const DepthwiseConvolutionKernel> kernel_;
};

// Throws NoPlan if the kernel does not support the problem or the device. Compiles nothing.
void check_depthwise_convolution(const DepthwiseConvolutionKey& key);

// Returns the cached plan of a key; on a miss, compiles and loads the kernel, unless a plan for other sizes already
// loaded it. The key's device must be current. Throws NoPlan as check_depthwise_convolution() does, nvrtc::Error and
// driver::Error. Thread-safe; allowed while the stream is captured.
std::shared_ptr<const DepthwiseConvolutionPlan> depthwise_convolution_plan(const DepthwiseConvolutionKey& key);

CacheInfo depthwise_convolution_plan_cache_info();

}  // namespace jaxgrad

// Batch normalization with batch statistics on the GPU, computed by cuDNN. No XLA types.
//
// This uses the legacy interface. The graph interface supports only multiples of 8 channels, compiles a kernel for a
// quarter of a second for each new shape, and is not faster. The legacy interface needs no plan; creating the
// descriptors for each call takes no longer than a cache lookup.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cudnn_batch_norm/shape.h"
#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

// The parameters that determine the kernel.
struct BatchNormProblem {
  BatchNormShape shape;
  FloatType type{};
  bool relu = false;      // fused; requires is_persistent()
  bool residual = false;  // added before relu; forward only; requires a multiple of 4 channels

  // Selects the persistent kernels of cuDNN: one launch for all channels, whose blocks wait for each other. The
  // persistent kernels for channels-first arrays sum in integer arithmetic and are wrong for very small and very large
  // values. So channels-first arrays and float64 run on the other kernels, which use one block per channel.
  bool is_persistent() const { return shape.inner == 1 && type != FloatType::kFloat64; }
};

// Arrays [C] are float64 if x is float64, otherwise float32.
struct BatchNormForwardArrays {
  double epsilon;
  const void *x, *scale, *bias;
  const void* residual;  // or null
  void *y, *mean, *rstd;
  void* running;  // [2, C]: mean and unbiased variance
};

struct BatchNormBackwardArrays {
  double epsilon;
  const void *x, *dy, *scale;
  const void* bias;  // with relu only
  const void *mean, *rstd;
  void *dx, *dscale, *dbias;
};

// Bytes of workspace. These functions throw cudnn::Error and driver::Error; the caller holds the handle of the device.
int64_t batch_norm_forward_workspace(const BatchNormProblem& problem, const cudnn::Handle& handle);
int64_t batch_norm_backward_workspace(const BatchNormProblem& problem, const cudnn::Handle& handle);

void batch_norm_forward(const BatchNormProblem& problem, const BatchNormForwardArrays& arrays, void* workspace,
                        const cudnn::Handle& handle, CUstream stream);
void batch_norm_backward(const BatchNormProblem& problem, const BatchNormBackwardArrays& arrays, void* workspace,
                         const cudnn::Handle& handle);

}  // namespace jaxgrad

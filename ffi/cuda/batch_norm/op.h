// Batch normalisation with batch statistics on the GPU, by cuDNN, on plain pointers.
//
// This is cuDNN's older interface. Its graph interface takes multiples of 8 channels only, and compiles each kernel as
// a shape is first met, for a quarter of a second; and those are no faster. Here a call needs no plan: its descriptors
// are made anew each time, which takes no longer than looking one up.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/batch_norm_shape.h"
#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

// What of a call decides which kernel runs.
struct BatchNormCall {
  BatchNormShape shape;
  FloatType type{};
  bool relu = false;      // fused; only for what is_persistent
  bool residual = false;  // added before relu; forward only, and only for a multiple of 4 channels

  // cuDNN's fast kernels: one launch for all channels, whose blocks wait for each other. They are for channels that
  // come last. Those for channels-first arrays add up integers: their results are wrong for values that are very small
  // or large, so that arrays of that layout, and float64, take the plain kernels, a block for each channel.
  bool is_persistent() const { return shape.inner == 1 && type != FloatType::kFloat64; }
};

// Arrays of [C] are of float32, for float64 of float64.
struct BatchNormForward {
  double epsilon;
  const void *x, *scale, *bias;
  const void* residual;  // or null
  void *y, *mean, *rstd;
  void* running;  // [2, C]: the mean again, and the variance by n - 1
};

struct BatchNormBackward {
  double epsilon;
  const void *x, *dy, *scale;
  const void* bias;  // relu only
  const void *mean, *rstd;
  void *dx, *dscale, *dbias;
};

// Bytes; the caller holds the device's handle, here and below. Throw cudnn::Error where cuDNN refuses the call.
int64_t batch_norm_forward_workspace(const BatchNormCall& call, const cudnn::Handle& handle);
int64_t batch_norm_backward_workspace(const BatchNormCall& call, const cudnn::Handle& handle);

void batch_norm_forward(const BatchNormCall& call, const BatchNormForward& arrays, void* workspace,
                        const cudnn::Handle& handle, CUstream stream);
void batch_norm_backward(const BatchNormCall& call, const BatchNormBackward& arrays, void* workspace,
                         const cudnn::Handle& handle);

}  // namespace jaxgrad

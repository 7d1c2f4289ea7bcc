// Batch normalization on the CPU. No XLA types.
//
// S is the type of x, T the type of the arithmetic and of every array of C elements. An absent array is null.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/batch_norm_shape.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {

// Mean and biased variance. The mean is the sum mean + mean_low, which has twice the digits of T. A mean that is large
// compared to the deviation then costs no accuracy in x - mean.
template <class S, class T = Compute<S>>
struct BatchNormStatistics {
  BatchNormShape shape;
  double epsilon;
  const S* x;
  T* mean;
  T* mean_low;  // the rounding error of mean
  T* var;
  T* rstd;               // 1 / sqrt(var + epsilon)
  std::byte* workspace;  // batch_norm_workspace() bytes, as in the structs below
};

// y = act(scale (x - mean) rstd + bias + residual)
template <class S, class T = Compute<S>>
struct BatchNormNormalize {
  BatchNormShape shape;
  bool relu;
  const S* x;
  const T* scale;
  const T* bias;
  const T* mean;
  const T* mean_low;  // or null
  const T* rstd;
  const S* residual;  // or null
  S* y;
  std::byte* workspace;
};

// Gradients. Frozen statistics are constants; mean_low, dmean and dvar are null then.
template <class S, class T = Compute<S>>
struct BatchNormBackward {
  BatchNormShape shape;
  bool frozen, relu;
  const S* x;
  const T* scale;
  const T* bias;  // with relu and without y, otherwise null
  const T* mean;
  const T* mean_low;  // or null
  const T* rstd;
  const S* y;  // the output, if relu followed a residual; otherwise null
  const S* dy;
  const T* dmean;  // or null
  const T* dvar;   // or null
  S* dx;           // or null, as the gradients below
  T* dscale;
  T* dbias;
  S* dresidual;
  std::byte* workspace;
};

// Bytes of workspace of each call, for every instruction set and any number of threads.
int64_t batch_norm_workspace(const BatchNormShape& shape, int64_t storage_bytes);

// S: float, double, BFloat16 or Float16. x must have at least one element.
template <class S>
void batch_norm_statistics(const BatchNormStatistics<S>& call, Parallel& parallel);
template <class S>
void batch_norm_normalize(const BatchNormNormalize<S>& call, Parallel& parallel);
template <class S>
void batch_norm_backward(const BatchNormBackward<S>& call, Parallel& parallel);

}  // namespace jaxgrad

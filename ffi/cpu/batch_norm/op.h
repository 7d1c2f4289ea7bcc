// Batch normalisation on the CPU, on plain pointers.
//
// T is the type of the arithmetic, that of every array of C elements. An absent array is null.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/batch_norm_shape.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {

// Mean and biased variance. The mean comes in two parts whose sum holds twice the digits, so that a mean that is large
// beside the deviation costs no accuracy in what is computed from x - mean.
template <class S, class T = Compute<S>>
struct BatchNormStatistics {
  BatchNormShape shape;
  double epsilon;
  const S* x;
  T* mean;
  T* mean_low;  // what rounding took from mean
  T* var;
  T* rstd;               // 1 / sqrt(var + epsilon)
  std::byte* workspace;  // batch_norm_workspace() bytes, here and below
};

// y = act(scale (x - mean) rstd + bias + residual)
template <class S, class T = Compute<S>>
struct BatchNormNormalise {
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

// The gradients. Where the statistics are frozen they are constants, and mean_low, dmean and dvar are null.
template <class S, class T = Compute<S>>
struct BatchNormBackward {
  BatchNormShape shape;
  bool frozen, relu;
  const S* x;
  const T* scale;
  const T* bias;  // relu only, and not where y is given
  const T* mean;
  const T* mean_low;  // or null
  const T* rstd;
  const S* y;  // where relu followed a residual, to tell what it passed on; otherwise null
  const S* dy;
  const T* dmean;  // or null
  const T* dvar;   // or null
  S* dx;           // or null, as those below
  T* dscale;
  T* dbias;
  S* dresidual;
  std::byte* workspace;
};

// Bytes of scratch memory of any of the calls, for every instruction set and any number of threads.
int64_t batch_norm_workspace(const BatchNormShape& shape, int64_t storage_bytes);

// S: float, double, BFloat16, Float16. The shape has at least one element.
template <class S>
void batch_norm_statistics(const BatchNormStatistics<S>& call, Parallel& parallel);
template <class S>
void batch_norm_normalise(const BatchNormNormalise<S>& call, Parallel& parallel);
template <class S>
void batch_norm_backward(const BatchNormBackward<S>& call, Parallel& parallel);

}  // namespace jaxgrad

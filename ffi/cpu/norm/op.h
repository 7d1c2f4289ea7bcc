// Batch, group, layer and RMS normalization on the CPU. No XLA types.
//
// Q is the type of x, T the type of the arithmetic, of the statistics [S, G] and of every [K, C] array. An absent array
// is null.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/norm_shape.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {

// Mean and biased variance of each group. The mean is the sum mean + mean_low, which has twice the digits of T. A mean
// that is large compared to the deviation then costs no accuracy in x - mean. Without means, the variance is that
// around zero.
template <class Q, class T = Compute<Q>>
struct NormStatistics {
  double epsilon;
  const Q* x;
  T* mean;      // or null
  T* mean_low;  // the rounding error of mean; null if mean is
  T* var;
  T* rstd;  // 1 / sqrt(var + epsilon)
};

// y = act(scale (x - mean) rstd + bias + residual)
template <class Q, class T = Compute<Q>>
struct NormNormalize {
  Activation activation;
  const Q* x;
  const T* scale;
  const T* bias;
  const T* mean;      // or null, for zero
  const T* mean_low;  // or null
  const T* rstd;
  const Q* residual;  // or null
  Q* y;
};

// Gradients. Frozen statistics are constants; mean_low, dmean and dvar are null then, and there is no activation.
template <class Q, class T = Compute<Q>>
struct NormBackward {
  Activation activation;
  bool frozen;
  const Q* x;
  const T* scale;
  const T* bias;      // where the argument of the activation is computed again, otherwise null
  const T* mean;      // or null, for zero
  const T* mean_low;  // or null
  const T* rstd;
  const Q* y;         // the output, if relu followed a residual; otherwise null
  const Q* residual;  // if another activation followed it; otherwise null
  const Q* dy;
  const T* dmean;  // [S, G] or null
  const T* dvar;   // [S, G] or null
  Q* dx;           // or null, as the gradients below
  T* dscale;
  T* dbias;
  Q* dresidual;
};

// Bytes of workspace of each call, for every instruction set and any number of threads. It does not decrease with K.
int64_t norm_workspace(const NormShape& shape, int64_t storage_bytes);

// Q: float, double, BFloat16 or Float16. x must have at least one element. The results do not depend on the number of
// threads.
//
// Computes the statistics, normalizes with statistics that the caller has, or does both, where `normalize` reads the
// statistics that `statistics` writes. Either may be null.
template <class Q>
void norm_forward(const NormShape& shape, const NormStatistics<Q>* statistics, const NormNormalize<Q>* normalize,
                  std::byte* workspace, Parallel& parallel);
template <class Q>
void norm_backward(const NormShape& shape, const NormBackward<Q>& call, std::byte* workspace, Parallel& parallel);

}  // namespace jaxgrad

// The operations of batch normalization on one element, for the loops of loops.h.
#pragma once

#include "cpu/batch_norm/op.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// Reads arrays that have one element per column, padded to whole vectors, as vectors.
template <class T, int N>
struct Columns {
  Vector<T> value[N];

  static JAXGRAD_INLINE Columns at(T* const (&arrays)[N], int64_t j) {
    Columns columns;
    for (int n = 0; n < N; ++n) columns.value[n] = load(arrays[n] + j);
    return columns;
  }
  static JAXGRAD_INLINE Columns of(T* const (&arrays)[N], int64_t c) {
    Columns columns;
    for (int n = 0; n < N; ++n) columns.value[n] = splat(arrays[n][c]);
    return columns;
  }
};

// Sums of x.
template <class S, class T = Compute<S>>
struct Sum {
  static constexpr int kSums = 1;
  struct Params {};

  JAXGRAD_INLINE Params at(int64_t) const { return {}; }
  JAXGRAD_INLINE Params of(int64_t) const { return {}; }
  template <class Lanes>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params&, Vector<T>* sums) const {
    sums[0] += load(x + i, lanes);
  }

  const S* x;
};

// Sums of x - mean and (x - mean)^2.
template <class S, class T = Compute<S>>
struct Deviations {
  static constexpr int kSums = 2;
  using Params = Columns<T, 1>;

  JAXGRAD_INLINE Params at(int64_t j) const { return Params::at(mean, j); }
  JAXGRAD_INLINE Params of(int64_t c) const { return Params::of(mean, c); }
  template <class Lanes>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params& params, Vector<T>* sums) const {
    const Vector<T> deviation = zero_tail<T>(load(x + i, lanes) - params.value[0], lanes);
    sums[0] += deviation;
    sums[1] += deviation * deviation;
  }

  const S* x;
  T* mean[1];
};

// scale (x - mean) rstd + bias as (x - mean) slope + shift. Both passes use this function and get identical results.
template <class T>
JAXGRAD_INLINE Vector<T> affine(Vector<T> deviation, Vector<T> slope, Vector<T> shift) {
  return deviation * slope + shift;
}

template <class S, bool kResidual, bool kRelu, class T = Compute<S>>
struct Normalize {
  using Params = Columns<T, 3>;

  JAXGRAD_INLINE Params at(int64_t j) const { return Params::at(mean_slope_shift, j); }
  JAXGRAD_INLINE Params of(int64_t c) const { return Params::of(mean_slope_shift, c); }
  template <class Lanes>
  JAXGRAD_INLINE void apply(int64_t i, Lanes lanes, const Params& params) const {
    Vector<T> value = affine<T>(load(x + i, lanes) - params.value[0], params.value[1], params.value[2]);
    if constexpr (kResidual) value += load(residual + i, lanes);
    if constexpr (kRelu) value = value <= 0 ? Vector<T>{} : value;  // propagates NaN
    store(y + i, value, lanes);
  }

  const S* x;
  const S* residual;
  S* y;
  T* mean_slope_shift[3];
};

// Where the gradient of relu is not zero: everywhere (no relu), where its input, recomputed from x, is positive, or
// where its output is positive.
enum class ReluMask { kAll, kPositiveBefore, kPositiveAfter };

// dy, or zero where relu was not active.
template <class S, ReluMask kReluMask, class T = Compute<S>>
struct Gradient {
  template <class Lanes>
  JAXGRAD_INLINE Vector<T> operator()(int64_t i, Lanes lanes, Vector<T> deviation, Vector<T> slope,
                                      Vector<T> shift) const {
    const Vector<T> gradient = load(dy + i, lanes);
    if constexpr (kReluMask == ReluMask::kPositiveBefore)
      return affine<T>(deviation, slope, shift) > 0 ? gradient : Vector<T>{};
    if constexpr (kReluMask == ReluMask::kPositiveAfter) return load(y + i, lanes) > 0 ? gradient : Vector<T>{};
    return gradient;
  }

  const S* y;
  const S* dy;
};

// Sums of g and g (x - mean), where g is the gradient after relu.
template <class S, ReluMask kReluMask, class T = Compute<S>>
struct GradientSums {
  static constexpr int kSums = 2;
  using Params = Columns<T, 3>;

  JAXGRAD_INLINE Params at(int64_t j) const { return Params::at(mean_slope_shift, j); }
  JAXGRAD_INLINE Params of(int64_t c) const { return Params::of(mean_slope_shift, c); }
  template <class Lanes>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params& params, Vector<T>* sums) const {
    const Vector<T> deviation = zero_tail<T>(load(x + i, lanes) - params.value[0], lanes);
    const Vector<T> g = gradient(i, lanes, deviation, params.value[1], params.value[2]);
    sums[0] += g;
    sums[1] += g * deviation;
  }

  const S* x;
  Gradient<S, kReluMask> gradient;
  T* mean_slope_shift[3];
};

// dx = g slope + (x - mean) tilt + level. With frozen statistics, dx = g slope.
template <class S, ReluMask kReluMask, bool kFrozen, class T = Compute<S>>
struct InputGradient {
  using Params = Columns<T, 5>;

  JAXGRAD_INLINE Params at(int64_t j) const { return Params::at(mean_slope_shift_tilt_level, j); }
  JAXGRAD_INLINE Params of(int64_t c) const { return Params::of(mean_slope_shift_tilt_level, c); }
  template <class Lanes>
  JAXGRAD_INLINE void apply(int64_t i, Lanes lanes, const Params& params) const {
    const auto& [mean, slope, shift, tilt, level] = params.value;
    Vector<T> deviation{};
    if constexpr (!kFrozen || kReluMask == ReluMask::kPositiveBefore) deviation = load(x + i, lanes) - mean;
    const Vector<T> g = gradient(i, lanes, deviation, slope, shift);
    if (dresidual != nullptr) store(dresidual + i, g, lanes);
    if (dx == nullptr) return;
    if constexpr (kFrozen)
      store(dx + i, g * slope, lanes);
    else
      store(dx + i, g * slope + (deviation * tilt + level), lanes);
  }

  const S* x;
  Gradient<S, kReluMask> gradient;
  S* dx;         // or null
  S* dresidual;  // or null
  T* mean_slope_shift_tilt_level[5];
};

}  // namespace jaxgrad::JAXGRAD_ISA

// What batch normalisation does with an element, as operations for the loops of batch_norm_sweep.h.
#pragma once

#include "cpu/batch_norm/op.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// Arrays of one element for each column, padded to whole vectors, read as vectors.
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

// Sums of x - mean and of its square.
template <class S, class T = Compute<S>>
struct Deviations {
  static constexpr int kSums = 2;
  using Params = Columns<T, 1>;

  JAXGRAD_INLINE Params at(int64_t j) const { return Params::at(mean, j); }
  JAXGRAD_INLINE Params of(int64_t c) const { return Params::of(mean, c); }
  template <class Lanes>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params& params, Vector<T>* sums) const {
    const Vector<T> deviation = keep<T>(load(x + i, lanes) - params.value[0], lanes);
    sums[0] += deviation;
    sums[1] += deviation * deviation;
  }

  const S* x;
  T* mean[1];
};

// scale (x - mean) rstd + bias as (x - mean) slope + shift, the same to the last bit wherever it is computed.
template <class T>
JAXGRAD_INLINE Vector<T> affine(Vector<T> deviation, Vector<T> slope, Vector<T> shift) {
  return deviation * slope + shift;
}

template <class S, bool kResidual, bool kRelu, class T = Compute<S>>
struct Normalise {
  using Params = Columns<T, 3>;

  JAXGRAD_INLINE Params at(int64_t j) const { return Params::at(mean_slope_shift, j); }
  JAXGRAD_INLINE Params of(int64_t c) const { return Params::of(mean_slope_shift, c); }
  template <class Lanes>
  JAXGRAD_INLINE void apply(int64_t i, Lanes lanes, const Params& params) const {
    Vector<T> value = affine<T>(load(x + i, lanes) - params.value[0], params.value[1], params.value[2]);
    if constexpr (kResidual) value += load(residual + i, lanes);
    if constexpr (kRelu) value = value <= 0 ? Vector<T>{} : value;  // lets NaN through
    store(y + i, value, lanes);
  }

  const S* x;
  const S* residual;
  S* y;
  T* mean_slope_shift[3];
};

// How the backward pass tells what relu passed on: it passed on everything (there is none), what was positive before
// it, computed anew, or what is positive after it.
enum class Passed { kAll, kPositiveBefore, kPositiveAfter };

// dy, or zero where relu held back what went in.
template <class S, Passed kPassed, class T = Compute<S>>
struct Gradient {
  template <class Lanes>
  JAXGRAD_INLINE Vector<T> operator()(int64_t i, Lanes lanes, Vector<T> deviation, Vector<T> slope,
                                      Vector<T> shift) const {
    const Vector<T> gradient = load(dy + i, lanes);
    if constexpr (kPassed == Passed::kPositiveBefore)
      return affine<T>(deviation, slope, shift) > 0 ? gradient : Vector<T>{};
    if constexpr (kPassed == Passed::kPositiveAfter) return load(y + i, lanes) > 0 ? gradient : Vector<T>{};
    return gradient;
  }

  const S* y;
  const S* dy;
};

// Sums of the gradient and of its product with x - mean.
template <class S, Passed kPassed, class T = Compute<S>>
struct GradientSums {
  static constexpr int kSums = 2;
  using Params = Columns<T, 3>;

  JAXGRAD_INLINE Params at(int64_t j) const { return Params::at(mean_slope_shift, j); }
  JAXGRAD_INLINE Params of(int64_t c) const { return Params::of(mean_slope_shift, c); }
  template <class Lanes>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params& params, Vector<T>* sums) const {
    const Vector<T> deviation = keep<T>(load(x + i, lanes) - params.value[0], lanes);
    const Vector<T> g = gradient(i, lanes, deviation, params.value[1], params.value[2]);
    sums[0] += g;
    sums[1] += g * deviation;
  }

  const S* x;
  Gradient<S, kPassed> gradient;
  T* mean_slope_shift[3];
};

// dx = g slope + (x - mean) tilt + level, where the statistics depend on x; dx = g slope where they are frozen.
template <class S, Passed kPassed, bool kFrozen, class T = Compute<S>>
struct InputGradient {
  using Params = Columns<T, 5>;

  JAXGRAD_INLINE Params at(int64_t j) const { return Params::at(mean_slope_shift_tilt_level, j); }
  JAXGRAD_INLINE Params of(int64_t c) const { return Params::of(mean_slope_shift_tilt_level, c); }
  template <class Lanes>
  JAXGRAD_INLINE void apply(int64_t i, Lanes lanes, const Params& params) const {
    const auto& [mean, slope, shift, tilt, level] = params.value;
    Vector<T> deviation{};
    if constexpr (!kFrozen || kPassed == Passed::kPositiveBefore) deviation = load(x + i, lanes) - mean;
    const Vector<T> g = gradient(i, lanes, deviation, slope, shift);
    if (dresidual != nullptr) store(dresidual + i, g, lanes);
    if (dx == nullptr) return;
    if constexpr (kFrozen)
      store(dx + i, g * slope, lanes);
    else
      store(dx + i, g * slope + (deviation * tilt + level), lanes);
  }

  const S* x;
  Gradient<S, kPassed> gradient;
  S* dx;         // or null
  S* dresidual;  // or null
  T* mean_slope_shift_tilt_level[5];
};

}  // namespace jaxgrad::JAXGRAD_ISA

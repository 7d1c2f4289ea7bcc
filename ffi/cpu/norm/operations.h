// The operations of normalization on one element, for the loops of tile.h.
#pragma once

#include "cpu/norm/op.h"
#include "cpu/norm/tile.h"
#include "cpu/runtime/activations.h"

namespace jaxgrad::JAXGRAD_ISA {

// Sums of x.
template <class Q, class T = Compute<Q>>
struct Sum {
  static constexpr int kSums = 1, kMaxVectors = kChunk;

  template <class Lanes, class Params>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params&, Vector<T>* sums) const {
    sums[0] += load(x + i, lanes);
  }

  const Q* x;
};

// Sums of x^2.
template <class Q, class T = Compute<Q>>
struct Squares {
  static constexpr int kSums = 1, kMaxVectors = kChunk;

  template <class Lanes, class Params>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params&, Vector<T>* sums) const {
    const Vector<T> value = load(x + i, lanes);
    sums[0] += value * value;
  }

  const Q* x;
};

// Sums of x - mean and (x - mean)^2.
template <class Q, class T = Compute<Q>>
struct Deviations {
  static constexpr int kSums = 2, kMaxVectors = kChunk;

  template <class Lanes, class Params>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params& params, Vector<T>* sums) const {
    const Vector<T> deviation = zero_tail<T>(load(x + i, lanes) - params.mean(), lanes);
    sums[0] += deviation;
    sums[1] += deviation * deviation;
  }

  const Q* x;
};

template <class Q, class Act, class T = Compute<Q>>
struct Normalize {
  template <class Lanes, class Params>
  JAXGRAD_INLINE void apply(int64_t i, Lanes lanes, const Params& params) const {
    Vector<T> value = params.affine(load(x + i, lanes) - params.mean());
    if (residual != nullptr) value += load(residual + i, lanes);
    store(y + i, Act::template value<T>(value), lanes);
  }

  const Q* x;
  const Q* residual;  // or null
  Q* y;
};

// The gradient g of the argument of the activation. The argument is computed again, except for relu after a residual,
// where the output has the same sign.
template <class Q, class Act, class T = Compute<Q>>
struct ArgumentGradient {
  template <class Lanes, class Params>
  JAXGRAD_INLINE Vector<T> operator()(int64_t i, Lanes lanes, Vector<T> deviation, const Params& params) const {
    const Vector<T> gradient = load(dy + i, lanes);
    if (y != nullptr) return Act::template gradient<T>(gradient, load(y + i, lanes));
    Vector<T> argument = params.affine(deviation);
    if (residual != nullptr) argument += load(residual + i, lanes);
    return Act::template gradient<T>(gradient, argument);
  }

  const Q* y;         // or null
  const Q* residual;  // or null
  const Q* dy;
};
template <class Q, class T>
struct ArgumentGradient<Q, Identity, T> {
  template <class Lanes, class Params>
  JAXGRAD_INLINE Vector<T> operator()(int64_t i, Lanes lanes, Vector<T>, const Params&) const {
    return load(dy + i, lanes);
  }

  const Q *y, *residual, *dy;
};

// Sums of g and g (x - mean).
template <class Q, class Act, class T = Compute<Q>>
struct GradientSums {
  static constexpr int kSums = 2, kMaxVectors = Act::kIsCostly ? 2 : kChunk;

  template <class Lanes, class Params>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params& params, Vector<T>* sums) const {
    const Vector<T> deviation = zero_tail<T>(load(x + i, lanes) - params.mean(), lanes);
    const Vector<T> g = gradient(i, lanes, deviation, params);
    sums[0] += g;
    sums[1] += g * deviation;
  }

  const Q* x;
  ArgumentGradient<Q, Act> gradient;
};

// Sums of g scale and g scale xhat over a row of columns with xhat = (x - mean) rstd. Adds g xhat and g to the
// gradients of scale and bias.
template <class Q, class Act, class T = Compute<Q>>
struct RowGradientSums {
  static constexpr int kSums = 2;

  template <class Lanes, class Params>
  JAXGRAD_INLINE void add(int64_t i, Lanes lanes, const Params& params, Vector<T>* sums) const {
    const Vector<T> deviation = zero_tail<T>(load(x + i, lanes) - params.mean(), lanes);
    const Vector<T> g = gradient(i, lanes, deviation, params), product = g * params.normalized(deviation);
    sums[0] += g * params.scale;
    sums[1] += product * params.scale;
    if (params.dscale == nullptr) return;
    store(params.dscale, load(params.dscale, lanes) + product, lanes);
    store(params.dbias, load(params.dbias, lanes) + g, lanes);
  }

  const Q* x;
  ArgumentGradient<Q, Act> gradient;
};

// dx = g slope + (x - mean) tilt + level. With frozen statistics, dx = g slope.
template <class Q, class Act, bool kFrozen, class T = Compute<Q>>
struct InputGradient {
  template <class Lanes, class Params>
  JAXGRAD_INLINE void apply(int64_t i, Lanes lanes, const Params& params) const {
    Vector<T> deviation{};
    if constexpr (!kFrozen) deviation = load(x + i, lanes) - params.mean();
    const Vector<T> g = gradient(i, lanes, deviation, params);
    if (dresidual != nullptr) store(dresidual + i, g, lanes);
    if (dx == nullptr) return;
    if constexpr (kFrozen)
      store(dx + i, g * params.slope(), lanes);
    else
      store(dx + i, g * params.slope() + (deviation * params.tilt() + params.level()), lanes);
  }

  const Q* x;
  ArgumentGradient<Q, Act> gradient;
  Q* dx;         // or null
  Q* dresidual;  // or null
};

}  // namespace jaxgrad::JAXGRAD_ISA

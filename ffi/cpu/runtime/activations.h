// Activations and their derivatives, on vectors. Each has
//
//   value(z)               the activation of z
//   gradient(dy, z)        the gradient of z from that of the activation
//   kIsCostly              whether they evaluate an exponential function
#pragma once

#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

struct Identity {
  static constexpr bool kIsCostly = false;
  template <class T>
  static JAXGRAD_INLINE Vector<T> value(Vector<T> z) {
    return z;
  }
  template <class T>
  static JAXGRAD_INLINE Vector<T> gradient(Vector<T> dy, Vector<T>) {
    return dy;
  }
};

struct Relu {
  static constexpr bool kIsCostly = false;
  template <class T>
  static JAXGRAD_INLINE Vector<T> value(Vector<T> z) {
    return z <= 0 ? Vector<T>{} : z;  // propagates NaN
  }
  template <class T>
  static JAXGRAD_INLINE Vector<T> gradient(Vector<T> dy, Vector<T> z) {
    return z > 0 ? dy : Vector<T>{};
  }
};

// z sigmoid(w(z)), where Gate defines w and its derivative.
template <class Gate>
struct Gated {
  static constexpr bool kIsCostly = true;
  template <class T>
  static JAXGRAD_INLINE Vector<T> value(Vector<T> z) {
    return z * gate<T>(z);
  }
  // The product with z comes last: it is NaN for infinite z only.
  template <class T>
  static JAXGRAD_INLINE Vector<T> gradient(Vector<T> dy, Vector<T> z) {
    const Vector<T> q = gate<T>(z);
    return dy * (q * (1 - q) * Gate::template slope<T>(z) * z + q);
  }

 private:
  // Zero where exp(-w) overflows, so that the value for z = -infinity is NaN as in the formula.
  template <class T>
  static JAXGRAD_INLINE Vector<T> gate(Vector<T> z) {
    const Vector<T> w = Gate::template argument<T>(z);
    return w < -ExpConstants<T>::kLimit ? Vector<T>{} : sigmoid<T>(w);
  }
};

struct SiluGate {
  template <class T>
  static JAXGRAD_INLINE Vector<T> argument(Vector<T> z) {
    return z;
  }
  template <class T>
  static JAXGRAD_INLINE Vector<T> slope(Vector<T>) {
    return splat(T(1));
  }
};
using Silu = Gated<SiluGate>;

// (1 + tanh(u)) / 2 = sigmoid(2 u) with u = sqrt(2 / pi) (z + 0.044715 z^3). Beyond kLimit, the sigmoid is 0 or 1.
struct GeluGate {
  static constexpr double kFactor = 1.5957691216057308, kCubic = 0.044715, kLimit = 40;
  template <class T>
  static JAXGRAD_INLINE Vector<T> argument(Vector<T> z) {
    z = clamp<T>(z, T(kLimit));
    return z * (z * z * T(kFactor * kCubic) + T(kFactor));
  }
  template <class T>
  static JAXGRAD_INLINE Vector<T> slope(Vector<T> z) {
    z = clamp<T>(z, T(kLimit));
    return z * z * T(3 * kFactor * kCubic) + T(kFactor);
  }
};
using Gelu = Gated<GeluGate>;

}  // namespace jaxgrad::JAXGRAD_ISA

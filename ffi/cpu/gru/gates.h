// The gates of one time step, and the form in which the forward pass saves them for the backward pass.
#pragma once

#include "cpu/gru/op.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

struct Sigmoid {
  template <class T>
  static JAXGRAD_INLINE Vector<T> value(Vector<T> x) {
    return sigmoid<T>(x);
  }
  template <class T>
  static JAXGRAD_INLINE Vector<T> slope(Vector<T> value) {
    return value * (1 - value);
  }
};

struct Tanh {
  template <class T>
  static JAXGRAD_INLINE Vector<T> value(Vector<T> x) {
    return tanh<T>(x);
  }
  template <class T>
  static JAXGRAD_INLINE Vector<T> slope(Vector<T> value) {
    return 1 - value * value;
  }
};

// Applies clipping and activations. An infinite clip disables clipping.
template <class T>
class Gates {
 public:
  explicit Gates(double clip) : clips_(clip < 1e300), clip_(static_cast<T>(clip)) {}

  template <class Activation>
  JAXGRAD_INLINE Vector<T> apply(Vector<T> before) const {
    return Activation::template value<T>(clips_ ? clamp<T>(before, clip_) : before);
  }

  // The value to save: the gate, or +-kClipped where clipping changed its pre-activation.
  JAXGRAD_INLINE Vector<T> encode(Vector<T> gate, Vector<T> before) const {
    if (!clips_) return gate;
    gate = before >= clip_ ? splat(T(kClipped)) : gate;
    return before <= -clip_ ? splat(T(-kClipped)) : gate;
  }

  // Decodes a saved gate; `slope` is the derivative of the activation with respect to the pre-activation.
  template <class Activation>
  JAXGRAD_INLINE void decode(Vector<T> saved, Vector<T>& gate, Vector<T>& slope) const {
    gate = saved;
    slope = Activation::template slope<T>(gate);
    if (!clips_) return;
    const auto above = saved > T(1.5), below = saved < T(-1.5);
    gate = above ? Activation::template value<T>(splat(clip_)) : gate;
    gate = below ? Activation::template value<T>(splat(-clip_)) : gate;
    slope = (above | below) ? Vector<T>{} : Activation::template slope<T>(gate);
  }

 private:
  bool clips_;
  T clip_;
};

}  // namespace jaxgrad::JAXGRAD_ISA

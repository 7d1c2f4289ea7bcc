// Sums over windows, divided by a number, and their input gradient, for vectors of channels.
#pragma once

#include "cpu/pool/windows.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

template <class S, int kVectors>
struct SumOfWindow {
  using T = Compute<S>;

  template <class Lanes>
  static JAXGRAD_INLINE void run(const TapList& list, const S* x, S* y, T divisor, Lanes lanes) {
    Vector<T> sums[kVectors] = {};
    for (int64_t j = 0; j < list.count; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[v] += load(x + list.taps[j].offset + v * kLanes<T>, lanes);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(y + v * kLanes<T>, sums[v] / divisor, lanes);
  }
};

// The sum of the gradients of the windows that an element is in. dy: the gradient of the first one; steps: between
// windows along each axis.
template <class S, int kVectors>
struct SumOfGradients {
  using T = Compute<S>;

  template <class Lanes>
  static JAXGRAD_INLINE void run(const int64_t (&counts)[kPoolAxes], const int64_t (&steps)[kPoolAxes], const S* dy,
                                 S* dx, T divisor, Lanes lanes) {
    Vector<T> sums[kVectors] = {};
    for (int64_t i = 0; i < counts[0]; ++i)
      for (int64_t j = 0; j < counts[1]; ++j) {
        const S* from = dy + i * steps[0] + j * steps[1];
        for (int64_t k = 0; k < counts[2]; ++k, from += steps[2])
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[v] += load(from + v * kLanes<T>, lanes);
      }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(dx + v * kLanes<T>, sums[v] / divisor, lanes);
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

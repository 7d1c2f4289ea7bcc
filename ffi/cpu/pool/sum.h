// The sum over a window, divided by a number, and its input gradient: kernels of vectors.
#pragma once

#include "cpu/pool/elements.h"
#include "cpu/pool/windows.h"

namespace jaxgrad::JAXGRAD_ISA {

template <class A>
JAXGRAD_INLINE Vector<Compute<A>> divided(Vector<Compute<A>> sum, const PoolArrays<A>& arrays) {
  return arrays.scale != 0 ? sum * arrays.scale : sum / arrays.divisor;
}

constexpr int64_t kMaxTerms = 256;  // of a sum; longer ones are sums of such sums, for fewer rounding errors

struct SumOfWindow {
  template <int n, class A, class Lanes>
  static JAXGRAD_INLINE void run(const Taps& taps, const PoolArrays<A>& arrays, int64_t x, int64_t x_step, int64_t y,
                                 int64_t y_step, Lanes lanes) {
    Vector<Compute<A>> sums[n] = {}, totals[n] = {};
    const auto add = [&](int64_t offset) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < n; ++v) sums[v] += load(arrays.x + x + v * x_step + offset, lanes);
    };
    const auto add_to_totals = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < n; ++v) totals[v] += sums[v], sums[v] = Vector<Compute<A>>{};
    };
    if (taps.count * taps.inside.size() <= kMaxTerms) {
      taps.for_each([&](int64_t offset, int64_t) __attribute__((always_inline)) { add(offset); }, [] {});
    } else {
      int64_t terms = 0;
      taps.for_each(
          [&](int64_t offset, int64_t) __attribute__((always_inline)) {
            add(offset);
            if (++terms % kMaxTerms == 0) add_to_totals();
          },
          [] {});
    }
    add_to_totals();
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) store(arrays.y + y + v * y_step, divided(totals[v], arrays), lanes);
  }
};

// The input gradient where each element is in one window. The layouts of x and dx are equal.
struct SumGradientOfTile {
  template <int n, class A, class Lanes>
  static JAXGRAD_INLINE void run(const Taps& taps, const PoolArrays<A>& arrays, int64_t x, int64_t x_step, int64_t y,
                                 int64_t y_step, Lanes lanes) {
    using T = Compute<A>;
    Vector<T> gradients[n];
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) gradients[v] = divided(Vector<T>{} + load(arrays.y + y + v * y_step, lanes), arrays);
    taps.for_each(
        [&](int64_t offset, int64_t) __attribute__((always_inline)) {
#pragma GCC unroll 4
          for (int v = 0; v < n; ++v) store(arrays.dx + x + v * x_step + offset, gradients[v], lanes);
        },
        [] {});
  }
};

// The sum of the gradients of the windows that an element is in.
struct SumGradient {
  template <int n, class A, class Lanes>
  static JAXGRAD_INLINE void run(const Windows& windows, const PoolArrays<A>& arrays, int64_t x, int64_t x_step,
                                 int64_t y, int64_t y_step, Lanes lanes) {
    Vector<Compute<A>> totals[n] = {};
    for (int64_t first = 0; first < windows.count; first += kMaxTerms) {
      Vector<Compute<A>> sums[n] = {};
      for (int64_t w = first; w < min_of(windows.count, first + kMaxTerms); ++w) {
        const int64_t dy = windows.windows[w].dy;
#pragma GCC unroll 4
        for (int v = 0; v < n; ++v) sums[v] += load(arrays.y + dy + y + v * y_step, lanes);
      }
#pragma GCC unroll 4
      for (int v = 0; v < n; ++v) totals[v] += sums[v];
    }
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) store(arrays.dx + x + v * x_step, divided(totals[v], arrays), lanes);
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

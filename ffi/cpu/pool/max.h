// The maximum of a window, the element that was selected, and its derivatives: kernels of vectors.
#pragma once

#include "cpu/pool/elements.h"
#include "cpu/pool/windows.h"

namespace jaxgrad::JAXGRAD_ISA {

// The larger value of each lane: NaN if one of them is, and +0 rather than -0.
template <class T>
JAXGRAD_INLINE Vector<T> maximum(Vector<T> so_far, Vector<T> value) {
  const Vector<T> larger = value > so_far ? value : so_far;  // NaN stays; a later NaN is not yet taken
  const Bits<T> replaces = (value != value) | ((value == so_far) & ((Bits<T>)so_far < 0));
  return replaces ? value : larger;
}

struct MaxOfWindow {
  template <int n, class A, class Lanes>
  static JAXGRAD_INLINE void run(const Taps& taps, const PoolArrays<A>& arrays, int64_t x, int64_t x_step, int64_t y,
                                 int64_t y_step, Lanes lanes) {
    using T = Compute<A>;
    Vector<T> found[n];
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) found[v] = splat(static_cast<T>(-__builtin_inff()));
    taps.for_each(
        [&](int64_t offset, int64_t) __attribute__((always_inline)) {
#pragma GCC unroll 4
          for (int v = 0; v < n; ++v) found[v] = maximum<T>(found[v], load(arrays.x + x + v * x_step + offset, lanes));
        },
        [] {});
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) store(arrays.y + y + v * y_step, found[v], lanes);
  }
};

// Calls take(v, keeps, offset, number) for each element and each vector. The number of padding is -1. The first tap is
// selected, because NaN is in front of it.
template <int n, class A, class Lanes, class Take>
JAXGRAD_INLINE void select(const Taps& taps, const A* x, int64_t x_step, Lanes lanes, Take take) {
  using T = Compute<A>;
  Vector<T> found[n];
#pragma GCC unroll 4
  for (int v = 0; v < n; ++v) found[v] = splat(static_cast<T>(__builtin_nanf("")));
  const auto compare = [&](int v, Vector<T> value, int64_t offset, int64_t number) __attribute__((always_inline)) {
    const Bits<T> keeps = found[v] >= value;
    found[v] = keeps ? found[v] : value;
    take(v, keeps, offset, number);
  };
  taps.for_each(
      [&](int64_t offset, int64_t number) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int v = 0; v < n; ++v) compare(v, load(x + v * x_step + offset, lanes), offset, number);
      },
      [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int v = 0; v < n; ++v) compare(v, splat(static_cast<T>(-__builtin_inff())), 0, -1);
      });
}

// The numbers of the selected taps.
template <int n, class A, class Lanes>
JAXGRAD_INLINE void select(const Taps& taps, const A* x, int64_t x_step, Lanes lanes, Bits<Compute<A>> (&selected)[n]) {
  using Index = typename MaskOf<Compute<A>>::type;
#pragma GCC unroll 4
  for (int v = 0; v < n; ++v) selected[v] = splat(Index{-1});
  select<n>(taps, x, x_step, lanes,
            [&](int v, Bits<Compute<A>> keeps, int64_t, int64_t number) __attribute__((always_inline)) {
              selected[v] = keeps ? selected[v] : splat(static_cast<Index>(number));
            });
}

struct SelectedOfWindow {
  template <int n, class A, class Lanes>
  static JAXGRAD_INLINE void run(const Taps& taps, const PoolArrays<A>& arrays, int64_t x, int64_t x_step, int64_t y,
                                 int64_t y_step, Lanes lanes) {
    Bits<Compute<A>> selected[n];
    select<n>(taps, arrays.x + x, x_step, lanes, selected);
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) store(arrays.selected + y + v * y_step, (Vector<Compute<A>>)selected[v], lanes);
  }
};

// The input gradient where each element is in one window. The layouts of x and dx are equal.
struct MaxGradientOfTile {
  template <int n, class A, class Lanes>
  static JAXGRAD_INLINE void run(const Taps& taps, const PoolArrays<A>& arrays, int64_t x, int64_t x_step, int64_t y,
                                 int64_t y_step, Lanes lanes) {
    using T = Compute<A>;
    using Index = typename MaskOf<T>::type;
    Bits<T> selected[n];
    select<n>(taps, arrays.x + x, x_step, lanes, selected);
    Vector<T> gradients[n];
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) gradients[v] = Vector<T>{} + load(arrays.y + y + v * y_step, lanes);  // -0 becomes 0
    taps.for_each(
        [&](int64_t offset, int64_t number) __attribute__((always_inline)) {
#pragma GCC unroll 4
          for (int v = 0; v < n; ++v)
            store(arrays.dx + x + v * x_step + offset,
                  selected[v] == splat(static_cast<Index>(number)) ? gradients[v] : Vector<T>{}, lanes);
        },
        [] {});
  }
};

struct TangentOfWindow {
  template <int n, class A, class Lanes>
  static JAXGRAD_INLINE void run(const Taps& taps, const PoolArrays<A>& arrays, int64_t x, int64_t x_step, int64_t y,
                                 int64_t y_step, Lanes lanes) {
    using T = Compute<A>;
    Vector<T> found[n] = {};
    select<n>(taps, arrays.x + x, x_step, lanes,
              [&](int v, Bits<T> keeps, int64_t offset, int64_t number) __attribute__((always_inline)) {
                Vector<T> value{};
                if (number >= 0) value = load(arrays.tangent + x + v * x_step + offset, lanes);
                found[v] = keeps ? found[v] : value;
              });
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) store(arrays.y + y + v * y_step, found[v], lanes);
  }
};

// Rounds to the values that S has.
template <class S>
JAXGRAD_INLINE Vector<Compute<S>> rounded(Vector<Compute<S>> v) {
  S buffer[kLanes<Compute<S>>];
  store(buffer, v);
  return load(buffer);
}

// The sum of the gradients of the windows that select an element, each rounded to S. The last one is rounded where it
// is stored, or copied from A to S.
template <class S>
struct MaxGradient {
  template <int n, class A, class Lanes>
  static JAXGRAD_INLINE void run(const Windows& windows, const PoolArrays<A>& arrays, int64_t x, int64_t x_step,
                                 int64_t y, int64_t y_step, Lanes lanes) {
    using T = Compute<A>;
    using Index = typename MaskOf<T>::type;
    Vector<T> sums[n] = {};
    for (int64_t w = 0; w < windows.count; ++w) {
      const WindowOfElement& window = windows.windows[w];
      if (sizeof(S) < sizeof(T) && w >= 2)  // the first term needs no rounding
#pragma GCC unroll 4
        for (int v = 0; v < n; ++v) sums[v] = rounded<S>(sums[v]);
#pragma GCC unroll 4
      for (int v = 0; v < n; ++v) {
        const Bits<T> taps = (Bits<T>)load(arrays.selected + window.selected + y + v * y_step, lanes);
        const Vector<T> gradient = load(arrays.y + window.dy + y + v * y_step, lanes);
        sums[v] += taps == splat(static_cast<Index>(window.tap)) ? gradient : Vector<T>{};
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < n; ++v) store(arrays.dx + x + v * x_step, sums[v], lanes);
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

// The maximum of a window, the element that was selected, and its derivatives, for vectors of channels.
#pragma once

#include "cpu/pool/windows.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// The larger value of each lane: NaN if one of them is, and +0 rather than -0.
template <class T>
JAXGRAD_INLINE Vector<T> maximum(Vector<T> so_far, Vector<T> value) {
  const Vector<T> larger = value > so_far ? value : so_far;  // NaN stays; a later NaN is not yet taken
  const Bits<T> replaces = (value != value) | ((value == so_far) & ((Bits<T>)so_far < 0));
  return replaces ? value : larger;
}

template <class S, int kVectors>
struct MaxOfWindow {
  using T = Compute<S>;

  template <class Lanes>
  static JAXGRAD_INLINE void run(const TapList& list, const S* x, S* y, Lanes lanes) {
    Vector<T> found[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) found[v] = splat(static_cast<T>(-__builtin_inff()));
    for (int64_t j = 0; j < list.count; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        found[v] = maximum<T>(found[v], load(x + list.taps[j].offset + v * kLanes<T>, lanes));
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(y + v * kLanes<T>, found[v], lanes);
  }
};

// For each lane the position in the list of taps that is selected. The first tap is, because NaN is in front of it.
template <class S, int kVectors>
struct SelectedOfWindow {
  using T = Compute<S>;
  using Index = typename MaskOf<T>::type;

  // Calls take(v, keeps, j) after each comparison.
  template <class Lanes, class Take>
  static JAXGRAD_INLINE void run(const TapList& list, const S* x, Lanes lanes, Take take) {
    Vector<T> found[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) found[v] = splat(static_cast<T>(__builtin_nanf("")));
    for (int64_t j = 0; j < list.count; ++j) {
      const Tap& tap = list.taps[j];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Vector<T> value = splat(static_cast<T>(-__builtin_inff()));
        if (tap.kind != Tap::kPadding) value = load(x + tap.offset + v * kLanes<T>, lanes);
        const Bits<T> keeps = found[v] >= value;
        found[v] = keeps ? found[v] : value;
        take(v, keeps, j);
      }
    }
  }
};

constexpr int64_t kMaxMaskedTaps = 32;  // of larger windows, each lane adds to its own element

template <class S, int kVectors>
struct ScatterOfWindow {
  using T = Compute<S>;
  using Index = typename MaskOf<T>::type;

  template <class Lanes>
  static JAXGRAD_INLINE void run(const TapList& list, const S* x, const S* dy, S* dx, Lanes lanes) {
    Bits<T> selected[kVectors];
    SelectedOfWindow<S, kVectors>::run(list, x, lanes,
                                       [&](int v, Bits<T> keeps, int64_t j) __attribute__((always_inline)) {
                                         selected[v] = keeps ? selected[v] : splat(static_cast<Index>(j));
                                       });
    Vector<T> gradient[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) gradient[v] = load(dy + v * kLanes<T>, lanes);
    if (list.count > kMaxMaskedTaps) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) add_by_lane(list, selected[v], gradient[v], dx + v * kLanes<T>, lanes);
      return;
    }
    for (int64_t j = 0; j < list.count; ++j) {
      const Tap& tap = list.taps[j];
      if (tap.kind != Tap::kOwnElement) continue;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        S* const to = dx + tap.offset + v * kLanes<T>;
        const Vector<T> term = selected[v] == splat(static_cast<Index>(j)) ? gradient[v] : Vector<T>{};
        store(to, load(to, lanes) + term, lanes);
      }
    }
  }

 private:
  // `lanes` is all of them or the rest.
  static void add_by_lane(const TapList& list, Bits<T> selected, Vector<T> gradient, S* dx, int lanes) {
    for (int lane = 0; lane < lanes; ++lane) {
      const Tap& tap = list.taps[selected[lane]];
      if (tap.kind != Tap::kOwnElement) continue;
      S* const to = dx + tap.offset + lane;
      const Vector<T> sum = load(to, 1) + gradient[lane];
      store(to, sum, 1);
    }
  }
};

template <class S, int kVectors>
struct TangentOfWindow {
  using T = Compute<S>;

  template <class Lanes>
  static JAXGRAD_INLINE void run(const TapList& list, const S* x, const S* tangent, S* y, Lanes lanes) {
    Vector<T> found[kVectors];
    SelectedOfWindow<S, kVectors>::run(list, x, lanes,
                                       [&](int v, Bits<T> keeps, int64_t j) __attribute__((always_inline)) {
                                         const Tap& tap = list.taps[j];
                                         Vector<T> value{};
                                         if (tap.kind != Tap::kPadding)
                                           value = load(tangent + tap.offset + v * kLanes<T>, lanes);
                                         found[v] = keeps ? found[v] : value;
                                       });
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(y + v * kLanes<T>, found[v], lanes);
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

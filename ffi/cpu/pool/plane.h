// Passes of one window that has all elements of a plane: reductions of contiguous elements, and their input gradient.
#pragma once

#include "cpu/pool/max.h"
#include "cpu/pool/sum.h"

namespace jaxgrad::JAXGRAD_ISA {

struct MaxStep {
  template <class T>
  static constexpr T start() {
    return -static_cast<T>(__builtin_inff());
  }
  template <class T>
  static JAXGRAD_INLINE Vector<T> run(Vector<T> so_far, Vector<T> value) {
    return maximum<T>(so_far, value);
  }
};

struct SumStep {
  template <class T>
  static constexpr T start() {
    return 0;
  }
  template <class T>
  static JAXGRAD_INLINE Vector<T> run(Vector<T> so_far, Vector<T> value) {
    return so_far + value;
  }
};

// The result is in each lane.
template <class Step, class S>
Vector<Compute<S>> reduce_plane(const S* x, int64_t n) {
  using T = Compute<S>;
  constexpr int kL = kLanes<T>;
  Vector<T> found[4];
#pragma GCC unroll 4
  for (Vector<T>& each : found) each = splat(Step::template start<T>());
  int64_t at = 0;
  while (at + 4 * kL <= n) {
    Vector<T> some[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) some[v] = load(x + at + v * kL);
    const int64_t end = min_of(n, at + kMaxTerms * 4 * kL);
    for (at += 4 * kL; at + 4 * kL <= end; at += 4 * kL)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) some[v] = Step::template run<T>(some[v], load(x + at + v * kL));
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) found[v] = Step::template run<T>(found[v], some[v]);
  }
  Bits<T> lane;
#pragma GCC unroll 16
  for (int i = 0; i < kL; ++i) lane[i] = i;
  for_vectors<T>(n - at, [&](int64_t j, auto lanes) {
    const Vector<T> value = load(x + at + j, lanes), start = splat(Step::template start<T>());
    found[0] = Step::template run<T>(found[0], lane < static_cast<int>(lanes) ? value : start);
  });
  Vector<T> all = found[0];
  if (at > 0)
#pragma GCC unroll 3
    for (int v = 1; v < 4; ++v) all = Step::template run<T>(all, found[v]);
#pragma GCC unroll 4
  for (int half = kL / 2; half > 0; half /= 2)
    all = Step::template run<T>(all, __builtin_shuffle(all, (lane + half) & (kL - 1)));
  return all;
}

// dx [positions, channels] has the elements of dy, divided, at each position.
template <class S>
void fill_plane(const S* dy, int channels, int64_t positions, Compute<S> divisor, S* dx) {
  using T = Compute<S>;
  T repeated[kMinChannels * kLanes<T>];
  const int64_t period = kMinChannels / channels * channels * kLanes<T>, size = positions * channels;
  for (int64_t i = 0; i < period; ++i) repeated[i] = (0 + load(dy + i % channels, 1)[0]) / divisor;
  for (int64_t at = 0; at < size; at += period)
    for_vectors<T>(min_of(period, size - at),
                   [&](int64_t j, auto lanes) { store(dx + at + j, load(repeated + j), lanes); });
}

}  // namespace jaxgrad::JAXGRAD_ISA

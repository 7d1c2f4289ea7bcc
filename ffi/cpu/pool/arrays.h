// The arrays of a part, and the loop over the vectors of a run of windows or elements.
#pragma once

#include "cpu/pool/parts.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// The offsets of a box of indices in an array [box, channels].
struct Layout {
  Layout(const Range (&box)[kPoolAxes], int64_t channels) {
    int64_t step = channels;
    start = 0;
    for (int i = kPoolAxes - 1; i >= 0; --i) {
      steps[i] = step;
      start += box[i].begin * step;
      step *= box[i].size();
    }
  }
  int64_t at(int64_t i, int64_t j, int64_t k) const { return i * steps[0] + j * steps[1] + k * steps[2] - start; }

  int64_t steps[kPoolAxes], start;
};

// A is the type of the arrays: copies of 16-bit arrays are float.
template <class A>
struct PoolArrays {
  const A* x;
  const A* tangent;
  A* y;  // dy, which is only read, or the result
  A* dx;
  Compute<A>* selected;  // the bits are the taps that windows select
  int64_t channels;
  Compute<A> divisor, scale;  // multiplies sums, if it is not 0 and the result is as exact; otherwise they are divided
  Layout x_layout, y_layout, dx_layout;
};

// Calls Kernel::run<vectors>(list, arrays, x, x_step, y, y_step, lanes) to cover all channels of `count` windows, or of
// elements that are one stride apart. x and y are the offsets of the first vector, and the steps lead to the next ones.
template <class Kernel, class List, class A>
__attribute__((noinline)) void run_vectors(const List& the_list, const PoolArrays<A>& the_arrays, int64_t count,
                                           int64_t x, int64_t x_next, int64_t y) {
  const List list = the_list;  // in registers
  const PoolArrays<A> arrays = the_arrays;
  using T = Compute<A>;
  constexpr int64_t kL = kLanes<T>;
  struct Loop {
    int64_t count, x_step, y_step;
  };
  const auto cover = [&](Loop outer, Loop inner, int64_t c, auto lanes) __attribute__((always_inline)) {
    for (int64_t i = 0; i < outer.count; ++i) {
      int64_t j = 0, x_at = x + c + i * outer.x_step, y_at = y + c + i * outer.y_step;
      for (; j + 4 <= inner.count; j += 4, x_at += 4 * inner.x_step, y_at += 4 * inner.y_step)
        Kernel::template run<4>(list, arrays, x_at, inner.x_step, y_at, inner.y_step, lanes);
      for (; j < inner.count; ++j, x_at += inner.x_step, y_at += inner.y_step)
        Kernel::template run<1>(list, arrays, x_at, inner.x_step, y_at, inner.y_step, lanes);
    }
  };
  const bool is_contiguous = x_next == arrays.channels;
  const int64_t channels = is_contiguous ? arrays.channels * count : arrays.channels;
  const Loop items{is_contiguous ? 1 : count, x_next, channels}, vectors{channels / kL, kL, kL};
  const bool is_wide = vectors.count >= 4;
  cover(is_wide ? items : vectors, is_wide ? vectors : items, 0, AllLanes<T>{});
  const int64_t covered = vectors.count * kL;
  if (covered < channels) cover({1, 0, 0}, items, covered, static_cast<int>(channels - covered));
}

}  // namespace jaxgrad::JAXGRAD_ISA

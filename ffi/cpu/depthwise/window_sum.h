// The sum over the window: y = conv(x, w) for a part of the outputs. The forward pass and the input gradient use it.
#pragma once

#include "cpu/depthwise/tiles.h"

namespace jaxgrad::JAXGRAD_ISA {

// The channels are the last axis of all arrays. Pointers are to element 0 of the spatial axes; there need not be such
// an element.
template <class S>
struct WindowSum {
  const S* x;
  int64_t x_steps[kDepthwiseAxes];
  S* y;
  int64_t y_steps[kDepthwiseAxes];
  const float* w;  // [taps, w_step], in the order of the axes' taps
  int64_t w_step;
  const float* bias;  // null without bias
  bool relu;
  int64_t channels;

  // Computes the outputs of the axes. Padding is skipped and not multiplied: infinite weights do not make it NaN.
  void run(const Axis (&axes)[kDepthwiseAxes]) const {
    const Axis &outer = axes[0], &inner = axes[1], &last = axes[2];
    for_output_tiles<true>(axes, x_steps, [&](auto stride, const Tiling& tiling, const OutputTile& tile) {
      const Outputs outputs{y + (outer.out + tile.i * outer.out_step) * y_steps[0] +
                                (inner.out + tile.j * inner.out_step) * y_steps[1] +
                                (last.out + tile.first * last.out_step) * y_steps[2],
                            tiling.apart * last.out_step * y_steps[2], inner.out_step * y_steps[1]};
      for_vectors<float>(channels,
                         [&](int64_t c, auto lanes) { sum<decltype(stride)::value>(tiling, tile, outputs, c, lanes); });
    });
  }

 private:
  struct Outputs {
    S* first;
    int64_t step, next_row;  // in elements
  };

  // Computes the outputs of a tile for one vector of channels. Not inlined, because it has many registers of its own.
  template <int kStride, class Lanes>
  __attribute__((noinline)) void sum(const Tiling& tiling, const OutputTile& tile, const Outputs& outputs, int64_t c,
                                     Lanes lanes) const {
    Vector<float> sums[kTile];
    const Vector<float> initial = bias == nullptr ? Vector<float>{} : load(bias + c);
#pragma GCC unroll 16
    for (int t = 0; t < kTile; ++t) sums[t] = initial;
    S* const to = outputs.first + c;
    prefetch_inputs<kTile * kStride>(tile, x + c, x_steps[1]);
    if (tile.has_next_row) prefetch<kTile>(to + outputs.next_row, outputs.step);  // a store waits for its line too
    for_rows(tile, x + c, [&](const S* row, int64_t taps_before) __attribute__((always_inline)) {
      const float* const weights = w + taps_before * w_step + c;
      tiling.for_taps<kStride>(tile, [&](int64_t k, auto chunk, InputSet inside) __attribute__((always_inline)) {
        constexpr int n = decltype(chunk)::value;
        const S* const inputs = row + k * tile.x_tap;
        if (inside.is_all(kInputs<kTile, n, kStride>)) {
          add_taps<n, kStride, false>(sums, inputs, tile.x_step, inside, weights + k * w_step, w_step, lanes);
        } else {
          add_taps<n, kStride, true>(sums, inputs, tile.x_step, inside, weights + k * w_step, w_step, lanes);
        }
      });
    });
    if (relu) {
#pragma GCC unroll 16
      for (int t = 0; t < kTile; ++t) sums[t] = sums[t] < 0 ? Vector<float>{} : sums[t];  // keeps NaN
    }
    if (tile.count == kTile) {
#pragma GCC unroll 16
      for (int t = 0; t < kTile; ++t) store(to + t * outputs.step, sums[t], lanes);
    } else {
#pragma GCC unroll 16
      for (int t = 0; t < kTile; ++t)
        if (t < tile.count) store(to + t * outputs.step, sums[t], lanes);
    }
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

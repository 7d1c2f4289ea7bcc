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
    for_output_tiles<true>(axes, [&](auto stride, const Tiling& tiling, const OutputRow& row, Tile tile) {
      for_vectors<float>(
          channels, [&](int64_t c, auto lanes) { run<decltype(stride)::value>(axes, tiling, row, tile, c, lanes); });
    });
  }

 private:
  template <int kStride, class Lanes>
  void run(const Axis (&axes)[kDepthwiseAxes], const Tiling& tiling, const OutputRow& row, Tile tile, int64_t c,
           Lanes lanes) const {
    Vector<float> sums[kTile];
    const Vector<float> initial = bias == nullptr ? Vector<float>{} : load(bias + c);
#pragma GCC unroll 16
    for (int t = 0; t < kTile; ++t) sums[t] = initial;
    const int64_t step = tiling.unit() * x_steps[2];
    prefetch_next_row(axes, row, x + c + tiling.first_input(tile, 0) * x_steps[2], x_steps, tile.count * kStride, step);
    for_rows(axes, row, x + c, x_steps, [&](const S* from, int64_t taps_before) __attribute__((always_inline)) {
      const float* const weights = w + taps_before * w_step + c;
      for_chunks(axes[2].taps, tiling.chunk, [&](int64_t k, auto chunk) __attribute__((always_inline)) {
        constexpr int n = decltype(chunk)::value;
        const int64_t first = tiling.first_input(tile, k);
        const InputSet inside = tiling.inside(first, (tile.count - 1) * kStride + n);
        const S* const inputs = from + first * x_steps[2];
        if (inside.has_all(kInputs<kTile, n, kStride>)) {
          add_taps<n, kStride, false>(sums, inputs, step, inside, weights + k * w_step, w_step, lanes);
        } else {
          add_taps<n, kStride, true>(sums, inputs, step, inside, weights + k * w_step, w_step, lanes);
        }
      });
    });
    S* const to = y + c + (axes[0].out + row.i * axes[0].out_step) * y_steps[0] +
                  (axes[1].out + row.j * axes[1].out_step) * y_steps[1] +
                  (axes[2].out + tile.first * axes[2].out_step) * y_steps[2];
    const int64_t to_step = tiling.apart * axes[2].out_step * y_steps[2];
    // Fetches the next row of outputs too: the stores would wait for each other.
    if (row.j + 1 < axes[1].count)
      for (int64_t t = 0; t < tile.count; ++t) __builtin_prefetch(to + t * to_step + axes[1].out_step * y_steps[1], 1);
#pragma GCC unroll 16
    for (int t = 0; t < kTile; ++t) {
      if (t >= tile.count) break;
      const Vector<float> sum = sums[t];
      store(to + t * to_step, relu ? (sum < 0 ? Vector<float>{} : sum) : sum, lanes);  // keeps NaN
    }
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

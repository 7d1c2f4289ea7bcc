// The sum over the outputs: the weight gradient of a part of the outputs, added to sums in memory.
#pragma once

#include "cpu/depthwise/tiles.h"

namespace jaxgrad::JAXGRAD_ISA {

// As WindowSum.
template <class S>
struct ProductSum {
  const S* x;
  int64_t x_steps[kDepthwiseAxes];
  const S* dy;
  int64_t dy_steps[kDepthwiseAxes];
  float* sums;  // [taps, sums_step]
  int64_t sums_step;
  float* bias_sums;  // [channels]; null if they are not needed
  int64_t channels;

  void run(const Axis (&axes)[kDepthwiseAxes]) const {
    for_output_tiles<false>(axes, [&](auto stride, const Tiling& tiling, const OutputRow& row, Tile tile) {
      for_parts(tile, tiling.apart, [&](Tile part, auto outputs) {
        for_vectors<float>(channels, [&](int64_t c, auto lanes) {
          run<decltype(stride)::value, decltype(outputs)::value>(axes, tiling, row, part, c, lanes);
        });
      });
    });
  }

 private:
  // Calls body(part, Constant<n>) for parts of n outputs each: dy of outputs that do not exist cannot be multiplied.
  template <class Body>
  static void for_parts(Tile tile, int64_t apart, Body body) {
    auto take = [&](auto outputs) {
      constexpr int n = decltype(outputs)::value;
      if (tile.count < n) return;
      body(Tile{tile.first, n}, outputs);
      tile.first += n * apart;
      tile.count -= n;
    };
    take(Constant<kTile>{});
    if constexpr (kTile > 8) take(Constant<8>{});
    take(Constant<4>{});
    take(Constant<2>{});
    take(Constant<1>{});
  }

  template <int kStride, int kOutputs, class Lanes>
  void run(const Axis (&axes)[kDepthwiseAxes], const Tiling& tiling, const OutputRow& row, Tile tile, int64_t c,
           Lanes lanes) const {
    const S* const first_output = dy + c + (axes[0].out + row.i) * dy_steps[0] + (axes[1].out + row.j) * dy_steps[1] +
                                  (axes[2].out + tile.first) * dy_steps[2];
    Vector<float> outputs[kOutputs];
#pragma GCC unroll 16
    for (int t = 0; t < kOutputs; ++t) outputs[t] = load(first_output + t * tiling.apart * dy_steps[2], lanes);
    if (bias_sums != nullptr) {
      Vector<float> total = outputs[0];
#pragma GCC unroll 16
      for (int t = 1; t < kOutputs; ++t) total += outputs[t];
      store(bias_sums + c, load(bias_sums + c) + total);
    }
    const int64_t step = tiling.unit() * x_steps[2];
    prefetch_next_row(axes, row, x + c + tiling.first_input(tile, 0) * x_steps[2], x_steps, tile.count * kStride, step);
    for_rows(axes, row, x + c, x_steps, [&](const S* from, int64_t taps_before) __attribute__((always_inline)) {
      float* const to = sums + taps_before * sums_step + c;
      for_chunks(axes[2].taps, tiling.chunk, [&](int64_t k, auto chunk) __attribute__((always_inline)) {
        constexpr int n = decltype(chunk)::value;
        const int64_t first = tiling.first_input(tile, k);
        constexpr int kAll = kInputs<kOutputs, n, kStride>;
        const InputSet inside = tiling.inside(first, kAll);
        const S* const inputs = from + first * x_steps[2];
        if (inside.has_all(kAll)) {
          add_outputs<kOutputs, n, kStride, false>(to + k * sums_step, sums_step, inputs, step, inside, outputs, lanes);
        } else {
          add_outputs<kOutputs, n, kStride, true>(to + k * sums_step, sums_step, inputs, step, inside, outputs, lanes);
        }
      });
    });
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

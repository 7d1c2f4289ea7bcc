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
    const Axis &outer = axes[0], &inner = axes[1], &last = axes[2];
    constexpr int64_t kMinSharing = 8;  // fewer outputs cost more, as a tile is divided into parts, than sharing saves
    const OutputTiles tiles(axes, x_steps, kMinSharing);
    tiles.for_each<false, 1>(/*narrow=*/false, [&](auto stride, const OutputRow* row, int64_t, const OutputTile& tile) {
      constexpr int kStride = decltype(stride)::value;
      const S* const from = dy + (outer.out + row->i) * dy_steps[0] + (inner.out + row->j) * dy_steps[1];
      for_parts<kStride>(tiles, tile, [&](const OutputTile& part, auto outputs) {
        const S* const first = from + (last.out + part.first) * dy_steps[2];
        for_vectors<float>(channels, [&](int64_t c, auto lanes) {
          add<kStride, decltype(outputs)::value>(tiles, *row, part, first + c, c, lanes);
        });
      });
    });
  }

 private:
  // Calls body(part, Constant<n>) for parts of n outputs each: dy of outputs that do not exist cannot be multiplied.
  template <int kStride, class Body>
  static void for_parts(const OutputTiles& tiles, OutputTile tile, Body body) {
    int64_t left = tile.count;
    auto take = [&](auto outputs) {
      constexpr int n = decltype(outputs)::value;
      if (left < n) return;
      left -= n;
      tile.count = n;
      body(tile, outputs);
      tile.first += n * tiles.tiling.apart;
      tile.x += n * kStride * tiles.x_step;
      tile.inside = tiles.tiling.inputs_inside(tile.first, 0);
    };
    take(Constant<kTile>{});
    if constexpr (kTile > 8) take(Constant<8>{});
    take(Constant<4>{});
    take(Constant<2>{});
    take(Constant<1>{});
  }

  // Adds the products of a tile for one vector of channels. `from` is the dy of its first output. Not inlined, because
  // it has many registers of its own.
  template <int kStride, int kOutputs, class Lanes>
  __attribute__((noinline)) void add(const OutputTiles& tiles, const OutputRow& row, const OutputTile& tile,
                                     const S* from, int64_t c, Lanes lanes) const {
    const int64_t dy_step = tiles.tiling.apart * dy_steps[2];
    Vector<float> outputs[kOutputs];
#pragma GCC unroll 16
    for (int t = 0; t < kOutputs; ++t) outputs[t] = load(from + t * dy_step, lanes);
    if (bias_sums != nullptr) {
      Vector<float> total = outputs[0];
#pragma GCC unroll 16
      for (int t = 1; t < kOutputs; ++t) total += outputs[t];
      store(bias_sums + c, load(bias_sums + c) + total);
    }
    prefetch_inputs<kOutputs * kStride>(tiles, row, tile, x + c, x_steps[1]);
    if (row.has_next) prefetch<kOutputs>(from + dy_steps[1], dy_step);
    tiles.for_window_rows(
        row, tile, x + c, sums + c, sums_step, [&](const S* x, float* to) __attribute__((always_inline)) {
          tiles.tiling.for_taps<kStride>(
              tile, [&](int64_t k, auto chunk, InputSet inside) __attribute__((always_inline)) {
                constexpr int n = decltype(chunk)::value;
                const S* const inputs = x + k * tiles.x_tap;
                float* const at = to + k * sums_step;
                if (inside.is_all(kInputs<kOutputs, n, kStride>)) {
                  add_outputs<kOutputs, n, kStride, false>(at, sums_step, inputs, tiles.x_step, inside, outputs, lanes);
                } else {
                  add_outputs<kOutputs, n, kStride, true>(at, sums_step, inputs, tiles.x_step, inside, outputs, lanes);
                }
              });
        });
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

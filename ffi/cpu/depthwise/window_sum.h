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
    constexpr int64_t kMinSharing = 4;
    const OutputTiles tiles(axes, x_steps, kMinSharing);
    // The inputs that rows share are still in the L1 cache: no other channels come between.
    constexpr int64_t kMaxRows = 4;
    constexpr int64_t kWidth = NarrowTile::kVectors * kLanes<float>;
    // Outputs of a short window share few inputs. Where its rows come from several places in memory, it is faster to
    // read two lines next to each other in each, as for 3x3 windows with a stride of 2.
    const bool narrow = kHasNarrowTile && tiles.tiling.has_one_chunk() && inner.taps > 1 && channels >= kWidth;
    tiles.for_each<true, kMaxRows>(narrow, [&](auto stride, const OutputRow* rows, int64_t n, const OutputTile& tile) {
      constexpr int kStride = decltype(stride)::value;
      S* const first = y + (last.out + tile.first * last.out_step) * y_steps[2];
      const auto run = [&](auto shape, int64_t c, auto lanes) __attribute__((always_inline)) {
        for (const OutputRow* row = rows; row < rows + n; ++row) {
          const Outputs outputs{first + (outer.out + row->i * outer.out_step) * y_steps[0] +
                                    (inner.out + row->j * inner.out_step) * y_steps[1] + c,
                                tiles.tiling.apart * last.out_step * y_steps[2], inner.out_step * y_steps[1]};
          if (tiles.tiling.has_one_chunk()) {
            sum_of_chunk<kStride>(shape, tiles, *row, tile, outputs, c, lanes);
          } else {
            sum<kStride>(shape, tiles, *row, tile, outputs, c, lanes);
          }
        }
      };
      if constexpr (kHasNarrowTile) {
        int64_t done = 0;  // channels
        if (tile.count <= NarrowTile::kOutputs) {
          for (; done + kWidth <= channels; done += kWidth) run(NarrowTile{}, done, AllLanes<float>{});
          for_vectors<float>(channels - done, [&](int64_t c, auto lanes) { run(SmallTile{}, done + c, lanes); });
          return;
        }
      }
      for_vectors<float>(channels, [&](int64_t c, auto lanes) { run(WideTile{}, c, lanes); });
    });
  }

 private:
  struct Outputs {
    S* first;
    int64_t step, next_row;  // in elements
  };

  // Computes the outputs of a tile for the vectors of its shape, where a row of the window has one chunk of taps.
  template <int kStride, class Shape, class Lanes>
  JAXGRAD_INLINE void sum_of_chunk(Shape, const OutputTiles& tiles, const OutputRow& row, const OutputTile& tile,
                                   const Outputs& outputs, int64_t c, Lanes lanes) const {
    // With so few multiplications of an input, loads and stores wait for the memory: fetches the lines of the next row.
    for (int v = 0; v < Shape::kVectors; ++v) {
      prefetch_inputs<Shape::kOutputs * kStride>(tiles, row, tile, x + c + v * kLanes<float>, x_steps[1]);
      if (row.has_next) prefetch<Shape::kOutputs>(outputs.first + outputs.next_row + v * kLanes<float>, outputs.step);
    }
    tiles.tiling.for_taps<kStride>(tile, [&](int64_t, auto taps, InputSet inside) __attribute__((always_inline)) {
      constexpr int n = decltype(taps)::value;
      if (inside.is_all(kInputs<Shape::kOutputs, n, kStride>)) {
        sum_rows<Shape, n, kStride, false>(tiles, row, tile, outputs, inside, c, lanes);
      } else {
        sum_rows<Shape, n, kStride, true>(tiles, row, tile, outputs, inside, c, lanes);
      }
    });
  }
  // Not inlined, because it has many registers of its own.
  template <class Shape, int kChunk, int kStride, bool kChecks, class Lanes>
  __attribute__((noinline)) void sum_rows(const OutputTiles& tiles, const OutputRow& row, const OutputTile& tile,
                                          const Outputs& outputs, InputSet inside, int64_t c, Lanes lanes) const {
    Vector<float> sums[Shape::kVectors][Shape::kOutputs];
    begin(sums, c);
    const auto add = [&](const S* inputs, const float* weights) __attribute__((always_inline)) {
      // Computed anew for each row: for the offsets of all inputs there are not enough registers.
      const int64_t x_step = in_register(tiles.x_step);
      add_taps<kChunk, kStride, kChecks>(sums, inputs, x_step, inside, weights, w_step, lanes);
    };
    tiles.for_window_rows(row, tile, x + c, w + c, w_step, add);
    end(sums, tile, outputs, lanes);
  }

  // As sum_of_chunk, for any number of taps. Not inlined either.
  template <int kStride, class Shape, class Lanes>
  __attribute__((noinline)) void sum(Shape, const OutputTiles& tiles, const OutputRow& row, const OutputTile& tile,
                                     const Outputs& outputs, int64_t c, Lanes lanes) const {
    Vector<float> sums[Shape::kVectors][Shape::kOutputs];
    begin(sums, c);
    const auto add = [&](const S* x, const float* weights) __attribute__((always_inline)) {
      tiles.tiling.for_taps<kStride>(tile, [&](int64_t k, auto taps, InputSet inside) __attribute__((always_inline)) {
        constexpr int n = decltype(taps)::value;
        const S* const inputs = x + k * tiles.x_tap;
        if (inside.is_all(kInputs<Shape::kOutputs, n, kStride>)) {
          add_taps<n, kStride, false>(sums, inputs, tiles.x_step, inside, weights + k * w_step, w_step, lanes);
        } else {
          add_taps<n, kStride, true>(sums, inputs, tiles.x_step, inside, weights + k * w_step, w_step, lanes);
        }
      });
    };
    tiles.for_window_rows(row, tile, x + c, w + c, w_step, add);
    end(sums, tile, outputs, lanes);
  }

  template <int kVectors, int kOutputs>
  JAXGRAD_INLINE void begin(Vector<float> (&sums)[kVectors][kOutputs], int64_t c) const {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vector<float> initial = bias == nullptr ? Vector<float>{} : load(bias + c + v * kLanes<float>);
#pragma GCC unroll 16
      for (int t = 0; t < kOutputs; ++t) sums[v][t] = initial;
    }
  }
  template <int kVectors, int kOutputs, class Lanes>
  JAXGRAD_INLINE void end(Vector<float> (&sums)[kVectors][kOutputs], const OutputTile& tile, const Outputs& outputs,
                          Lanes lanes) const {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      S* const to = outputs.first + v * kLanes<float>;
      if (relu) {
#pragma GCC unroll 16
        for (int t = 0; t < kOutputs; ++t) sums[v][t] = sums[v][t] < 0 ? Vector<float>{} : sums[v][t];  // keeps NaN
      }
      if (tile.count == kOutputs) {
#pragma GCC unroll 16
        for (int t = 0; t < kOutputs; ++t) store(to + t * outputs.step, sums[v][t], lanes);
      } else {
#pragma GCC unroll 16
        for (int t = 0; t < kOutputs; ++t)
          if (t < tile.count) store(to + t * outputs.step, sums[v][t], lanes);
      }
    }
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

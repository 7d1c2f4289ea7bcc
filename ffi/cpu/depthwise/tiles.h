// Divides the outputs of the last spatial axis into tiles that share their inputs in registers (register_tile.h).
#pragma once

#include "cpu/depthwise/axes.h"
#include "cpu/depthwise/register_tile.h"

namespace jaxgrad::JAXGRAD_ISA {

// Outputs first, first + apart, ... of an axis.
struct Tile {
  int64_t first, count;
};

class Tiling {
 public:
  explicit Tiling(const Axis& axis) : axis_(axis) {
    constexpr int64_t kMinOutputs = 8;  // with fewer, not even half of a tile would share inputs
    const int64_t dilation = axis.taps > 1 ? axis.dilation : 1;
    if (axis.stride == 1 && (dilation == 1 || axis.count >= kMinOutputs * dilation)) {
      apart = unit_ = dilation;
    } else if (axis.stride == 2 && dilation == 1) {
      has_stride_2 = true;
    } else {  // outputs next to each other, one tap at a time
      unit_ = axis.stride;
      chunk = 1;
    }
  }

  // Calls body(Tile) for tiles of kMax outputs and one of the rest. With kMayOverlap, the last one may have kMax
  // outputs too, of which some are in the tile before: few, because they are computed twice.
  template <int kMax, bool kMayOverlap, class Body>
  JAXGRAD_INLINE void for_tiles(Body body) const {
    constexpr int64_t kMinRest = kMax * 2 / 3;
    for (int64_t phase = 0; phase < min_of(apart, axis_.count); ++phase) {
      const int64_t outputs = (axis_.count - 1 - phase) / apart + 1;
      for (int64_t from = 0; from < outputs; from += kMax) {
        int64_t left = outputs - from;
        if (kMayOverlap && from > 0 && left >= kMinRest && left < kMax) {
          from = outputs - kMax;
          left = kMax;
        }
        body(Tile{phase + from * apart, min_of(left, kMax)});
      }
    }
  }

  // The position of input 0 of the chunk of a tile that starts with tap k.
  int64_t first_input(const Tile& tile, int64_t k) const { return axis_.input(tile.first, k); }
  // Inputs of a chunk that are no padding: the first `used` ones from position `first` on.
  InputSet inside(int64_t first, int64_t used) const {
    return {steps(axis_.inputs.begin - first), min_of(steps(axis_.inputs.end - first), used)};
  }
  int64_t unit() const { return unit_; }

  int64_t apart = 1;          // outputs between two outputs of a tile
  int chunk = kMaxChunk;      // taps at a time, at most
  bool has_stride_2 = false;  // kStride of the register tile; otherwise 1

 private:
  int64_t steps(int64_t positions) const { return unit_ == 1 ? positions : ceil_div(positions, unit_); }

  const Axis& axis_;
  int64_t unit_ = 1;  // positions between two inputs of a chunk
};

// A row of outputs, and the rows of the window at it that have inputs.
struct OutputRow {
  OutputRow(const Axis (&axes)[kDepthwiseAxes], int64_t i, int64_t j)
      : i(i), j(j), outer(axes[0].taps_inside(i)), inner(axes[1].taps_inside(j)) {}

  int64_t i, j;
  Range outer, inner;
};

// Calls body(Constant<kStride of the register tile>, tiling, OutputRow, Tile) for the outputs of the axes.
template <bool kMayOverlap, class Body>
JAXGRAD_INLINE void for_output_tiles(const Axis (&axes)[kDepthwiseAxes], Body body) {
  const Tiling tiling(axes[2]);
  for (int64_t i = 0; i < axes[0].count; ++i)
    for (int64_t j = 0; j < axes[1].count; ++j) {
      const OutputRow row(axes, i, j);
      tiling.for_tiles<kTile, kMayOverlap>([&](Tile tile) {
        if (tiling.has_stride_2) {
          body(Constant<2>{}, tiling, row, tile);
        } else {
          body(Constant<1>{}, tiling, row, tile);
        }
      });
    }
}

// Calls body(row of inputs, taps before it) for the rows of the window.
template <class X, class Body>
JAXGRAD_INLINE void for_rows(const Axis (&axes)[kDepthwiseAxes], const OutputRow& at, const X* x,
                             const int64_t (&steps)[kDepthwiseAxes], Body body) {
  for (int64_t a = at.outer.begin; a < at.outer.end; ++a)
    for (int64_t b = at.inner.begin; b < at.inner.end; ++b)
      body(x + axes[0].input(at.i, a) * steps[0] + axes[1].input(at.j, b) * steps[1],
           (a * axes[1].taps + b) * axes[2].taps);
}

// Fetches the inputs that the next row of outputs adds to those of this one: rows are too short for the processor to
// recognize that one follows another. `x` is the first of `inputs` elements that are `step` apart, in row 0 of the
// array.
template <class X>
JAXGRAD_INLINE void prefetch_next_row(const Axis (&axes)[kDepthwiseAxes], const OutputRow& at, const X* x,
                                      const int64_t (&steps)[kDepthwiseAxes], int64_t inputs, int64_t step) {
  const auto [i, j, outer, inner] = at;
  if (j + 1 >= axes[1].count) return;
  const int64_t end = min_of(axes[1].input(j + 1, axes[1].taps), axes[1].inputs.end);
  const int64_t plane = axes[0].input(i, axes[0].taps - 1);
  if (plane < axes[0].inputs.begin || plane >= axes[0].inputs.end) return;
  for (int64_t row = max_of(0, axes[1].input(j, axes[1].taps - 1) + 1); row < end; ++row)
    for (int64_t t = 0; t < inputs; ++t) __builtin_prefetch(x + plane * steps[0] + row * steps[1] + t * step);
}

}  // namespace jaxgrad::JAXGRAD_ISA

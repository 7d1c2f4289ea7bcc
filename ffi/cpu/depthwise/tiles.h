// Divides the outputs of the last spatial axis into tiles that share their inputs in registers (register_tile.h).
#pragma once

#include "cpu/depthwise/axes.h"
#include "cpu/depthwise/register_tile.h"

namespace jaxgrad::JAXGRAD_ISA {

// Outputs first, first + apart, ... of the last axis, at position (i, j) of the other axes, and what they read: `rows`
// rows of the window in each of `planes` planes, without those that lie in padding. All channels share an OutputTile.
// Offsets and steps x are in elements of the inputs, w in taps. Counts of rows and planes may be negative: none.
struct OutputTile {
  int64_t i, j, first, count;
  int64_t planes, rows;
  int64_t x, x_plane, x_row, x_tap;  // tap 0 of the first row; steps to the next plane, row and tap
  int64_t x_step;                    // from one input of a chunk to the next
  int64_t w, w_plane, w_row;
  bool has_next_row;        // of outputs
  int64_t new_rows, x_new;  // rows of inputs that the next row of outputs adds; offset of the first, in the last plane
  InputSet inside;          // inputs of the first block of taps that are no padding
};

class Tiling {
 public:
  // Outputs of a tile are a dilation apart, and share inputs, if the axis has `min_sharing` of them from each start.
  Tiling(const Axis& axis, int64_t min_sharing) : axis_(axis) {
    const int64_t dilation = axis.taps > 1 ? axis.dilation : 1;
    if (axis.stride == 1 && (dilation == 1 || axis.count >= min_sharing * dilation)) {
      apart = unit_ = dilation;
    } else if (axis.stride == 2 && dilation == 1) {
      has_stride_2 = true;
    } else {  // outputs next to each other, one tap at a time
      unit_ = axis.stride;
      chunk_ = block_ = 1;
    }
  }

  // Calls body(first, count) for tiles of kMax outputs and one of the rest. With kMayOverlap, the last one may have
  // kMax outputs too, of which some are in the tile before: few, because they are computed twice.
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
        body(phase + from * apart, min_of(left, kMax));
      }
    }
  }

  // Calls body(k, Constant<n>, inputs that are no padding) for chunks of n taps, from tap k on, of a row of the window.
  // kStride is that of the register tile.
  template <int kStride, class Body>
  JAXGRAD_INLINE void for_taps(const OutputTile& tile, Body body) const {
    for (int64_t from = 0; from < axis_.taps; from += block_) {
      const InputSet inside = from == 0 ? tile.inside : inputs_inside(tile.first, from);
      for_chunks(min_of(block_, axis_.taps - from), chunk_, [&](int64_t k, auto chunk) __attribute__((always_inline)) {
        body(from + k, chunk, inside.part(k, (tile.count - 1) * kStride + decltype(chunk)::value));
      });
    }
  }

  // The inputs of a block of taps that are no padding, for the outputs from `first` on. Bit 0 is input 0 of tap k.
  InputSet inputs_inside(int64_t first, int64_t k) const {
    const int64_t from = axis_.input(first, k);
    return {steps(axis_.inputs.begin - from), steps(axis_.inputs.end - from)};
  }
  int64_t unit() const { return unit_; }

  int64_t apart = 1;          // outputs between two outputs of a tile
  bool has_stride_2 = false;  // kStride of the register tile; otherwise 1

 private:
  int64_t steps(int64_t positions) const { return unit_ == 1 ? positions : ceil_div(positions, unit_); }

  const Axis& axis_;
  int64_t unit_ = 1;       // positions between two inputs of a chunk
  int chunk_ = kMaxChunk;  // taps at a time, at most
  // Taps whose inputs, for a full tile with stride 2, are in one set: tap k + 1 starts one input after tap k.
  int64_t block_ = InputSet::kMax - kInputs<kTile, 1, 2>;
};

// Calls body(Constant<kStride of the register tile>, tiling, OutputTile) for the outputs of the axes.
template <bool kMayOverlap, class Body>
JAXGRAD_INLINE void for_output_tiles(const Axis (&axes)[kDepthwiseAxes], const int64_t (&x_steps)[kDepthwiseAxes],
                                     Body body) {
  const Axis &outer = axes[0], &inner = axes[1], &last = axes[2];
  // ProductSum divides tiles that are not full: with fewer than 8 outputs, this costs more than sharing saves.
  const Tiling tiling(last, kMayOverlap ? 4 : 8);
  OutputTile tile{};
  tile.x_plane = outer.dilation * x_steps[0], tile.w_plane = inner.taps * last.taps;
  tile.x_row = inner.dilation * x_steps[1], tile.w_row = last.taps;
  tile.x_tap = last.dilation * x_steps[2], tile.x_step = tiling.unit() * x_steps[2];
  for (tile.i = 0; tile.i < outer.count; ++tile.i) {
    const Range planes = outer.taps_inside(tile.i);
    for (tile.j = 0; tile.j < inner.count; ++tile.j) {
      const Range rows = inner.taps_inside(tile.j);
      tile.planes = planes.size(), tile.rows = rows.size();
      tile.w = planes.begin * tile.w_plane + rows.begin * tile.w_row;
      const int64_t x = outer.input(tile.i, planes.begin) * x_steps[0] + inner.input(tile.j, rows.begin) * x_steps[1];
      const int64_t first_new = max_of(0, inner.input(tile.j, inner.taps - 1) + 1);
      const int64_t last_plane = outer.input(tile.i, planes.end - 1);
      tile.has_next_row = tile.j + 1 < inner.count;
      const bool adds_rows = tile.has_next_row && planes.size() > 0 && inner.taps > 0;
      const int64_t end_new = adds_rows ? min_of(inner.input(tile.j + 1, inner.taps - 1) + 1, inner.inputs.end) : 0;
      tile.new_rows = end_new - first_new;
      tiling.for_tiles<kTile, kMayOverlap>([&](int64_t first, int64_t count) {
        tile.first = first, tile.count = count;
        tile.x = x + last.input(first, 0) * x_steps[2];
        tile.x_new = last_plane * x_steps[0] + first_new * x_steps[1] + last.input(first, 0) * x_steps[2];
        tile.inside = tiling.inputs_inside(first, 0);
        if (tiling.has_stride_2) {
          body(Constant<2>{}, tiling, tile);
        } else {
          body(Constant<1>{}, tiling, tile);
        }
      });
    }
  }
}

// Calls body(row of inputs, taps before it) for the rows of the window.
template <class X, class Body>
JAXGRAD_INLINE void for_rows(const OutputTile& tile, const X* x, Body body) {
  for (int64_t a = 0; a < tile.planes; ++a)
    for (int64_t b = 0; b < tile.rows; ++b)
      body(x + tile.x + a * tile.x_plane + b * tile.x_row, tile.w + a * tile.w_plane + b * tile.w_row);
}

// Fetches the cache lines of n elements for the next row of outputs: rows are too short for the processor to recognize
// that one follows another. A row of outputs reads more than the L1 cache holds, so the lines go to the L2 cache.
// Elements may lie outside of the array, because a prefetch does not fault.
template <int n, class S>
JAXGRAD_INLINE void prefetch(const S* from, int64_t step) {
  constexpr int kIntoL2 = 2;
#pragma GCC unroll 32
  for (int i = 0; i < n; ++i, from += step) __builtin_prefetch(from, 0, kIntoL2);
}

// Fetches the inputs that the next row of outputs adds to those of this one.
template <int n, class X>
JAXGRAD_INLINE void prefetch_inputs(const OutputTile& tile, const X* x, int64_t row_step) {
  for (int64_t row = 0; row < tile.new_rows; ++row) prefetch<n>(x + tile.x_new + row * row_step, tile.x_step);
}

}  // namespace jaxgrad::JAXGRAD_ISA

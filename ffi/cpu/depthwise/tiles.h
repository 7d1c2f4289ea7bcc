// Divides the outputs of the last spatial axis into tiles that share their inputs in registers (register_tile.h).
#pragma once

#include "cpu/depthwise/axes.h"
#include "cpu/depthwise/register_tile.h"

namespace jaxgrad::JAXGRAD_ISA {

// A row of outputs, at position (i, j) of the other axes, and what it reads: `rows` rows of the window in each of
// `planes` planes, without those that lie in padding. Counts of rows and planes may be negative: none. x is the offset
// of the first row at element 0 of the last axis, in elements, w that of its taps.
struct OutputRow {
  int64_t i, j;
  int64_t planes, rows;
  int64_t x, w;
  bool has_next;            // row of outputs
  int64_t new_rows, x_new;  // rows of inputs that the next row of outputs adds; offset of the first, in the last plane
};

// A tile of a row: outputs first, first + apart, ... of the last axis. x is the offset of input 0 from that of its row.
struct OutputTile {
  int64_t first, count;
  int64_t x;
  InputSet inside;  // inputs of the first block of taps that are no padding
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
  bool has_one_chunk() const { return axis_.taps > 0 && axis_.taps <= chunk_; }

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

// The tiles of the outputs of some axes. All channels share them. Steps x are in elements, w in taps.
class OutputTiles {
 public:
  OutputTiles(const Axis (&axes)[kDepthwiseAxes], const int64_t (&x_steps)[kDepthwiseAxes], int64_t min_sharing)
      : tiling(axes[2], min_sharing),
        x_plane(axes[0].dilation * x_steps[0]),
        x_row(axes[1].dilation * x_steps[1]),
        x_tap(axes[2].dilation * x_steps[2]),
        x_step(tiling.unit() * x_steps[2]),
        w_plane(axes[1].taps * axes[2].taps),
        w_row(axes[2].taps),
        axes_(axes),
        x_steps_(x_steps) {}

  // Calls body(Constant<kStride of the register tile>, rows, n, tile) for tiles of n rows below each other, at most
  // kMaxRows, until all outputs are computed. The tiles have kTile outputs, or half as many if they are narrow.
  template <bool kMayOverlap, int64_t kMaxRows, class Body>
  JAXGRAD_INLINE void for_each(bool narrow, Body body) const {
    const auto run = [&](const OutputRow* rows, int64_t n, int64_t first, int64_t count) __attribute__((noinline)) {
      const OutputTile tile{first, count, axes_[2].input(first, 0) * x_steps_[2], tiling.inputs_inside(first, 0)};
      if (tiling.has_stride_2) {
        body(Constant<2>{}, rows, n, tile);
      } else {
        body(Constant<1>{}, rows, n, tile);
      }
    };
    const auto for_tiles = [&](auto body) {
      if (narrow) {
        tiling.for_tiles<kTile / 2, kMayOverlap>(body);
      } else {
        tiling.for_tiles<kTile, kMayOverlap>(body);
      }
    };
    if (axes_[0].taps > 1) {  // a column of tiles at a time: the planes of its window stay in the L2 cache
      for_tiles([&](int64_t first, int64_t count) {
        for_row_groups<kMaxRows>([&](const OutputRow* rows, int64_t n) { run(rows, n, first, count); });
      });
    } else {
      for_row_groups<kMaxRows>([&](const OutputRow* rows, int64_t n) {
        for_tiles([&](int64_t first, int64_t count) { run(rows, n, first, count); });
      });
    }
  }

  // Calls body(inputs, weights) for the rows of the window of a tile. w may be the weights or sums of as many taps.
  template <class X, class W, class Body>
  JAXGRAD_INLINE void for_window_rows(const OutputRow& row, const OutputTile& tile, const X* x, W* w, int64_t w_step,
                                      Body body) const {
    const int64_t next_inputs = x_row, next_weights = w_row * w_step;
    x += row.x + tile.x, w += row.w * w_step;
    for (int64_t a = row.planes; a > 0; --a, x += x_plane, w += w_plane * w_step) {
      const X* inputs = x;
      W* weights = w;
      for (int64_t b = row.rows; b > 0; --b, inputs += next_inputs, weights += next_weights) body(inputs, weights);
    }
  }

  const Tiling tiling;
  const int64_t x_plane, x_row, x_tap;  // to the next plane, row and tap of the window
  const int64_t x_step;                 // from one input of a chunk to the next
  const int64_t w_plane, w_row;

 private:
  // Outputs below each other share most inputs of a large window.
  template <int64_t kMaxRows, class Body>
  JAXGRAD_INLINE void for_row_groups(Body body) const {
    const Axis& inner = axes_[1];
    const bool shares = inner.taps > 1 && inner.stride == 1 && inner.dilation == 1 && axes_[2].taps > kMaxChunk;
    const int64_t size = shares ? kMaxRows : 1;
    OutputRow rows[kMaxRows];
    for (int64_t i = 0; i < axes_[0].count; ++i)
      for (int64_t j = 0; j < inner.count; j += size) {
        const int64_t n = min_of(size, inner.count - j);
        for (int64_t r = 0; r < n; ++r) rows[r] = row(i, j + r);
        body(rows, n);
      }
  }

  OutputRow row(int64_t i, int64_t j) const {
    const Axis &outer = axes_[0], &inner = axes_[1];
    const Range planes = outer.taps_inside(i), rows = inner.taps_inside(j);
    const int64_t first_new = max_of(0, inner.input(j, inner.taps - 1) + 1);
    const bool has_next = j + 1 < inner.count, adds_rows = has_next && planes.size() > 0 && inner.taps > 0;
    const int64_t end_new = adds_rows ? min_of(inner.input(j + 1, inner.taps - 1) + 1, inner.inputs.end) : 0;
    return {i,
            j,
            planes.size(),
            rows.size(),
            outer.input(i, planes.begin) * x_steps_[0] + inner.input(j, rows.begin) * x_steps_[1],
            planes.begin * w_plane + rows.begin * w_row,
            has_next,
            end_new - first_new,
            outer.input(i, planes.end - 1) * x_steps_[0] + first_new * x_steps_[1]};
  }

  const Axis (&axes_)[kDepthwiseAxes];
  const int64_t (&x_steps_)[kDepthwiseAxes];
};

// Fetches the cache lines of n elements for the next row of outputs: rows are too short for the processor to recognize
// that one follows another. A row of outputs reads more than the L1 cache holds, so the lines go to the L2 cache.
// Elements may lie outside of the array, because a prefetch does not fault.
template <int n, class S>
JAXGRAD_INLINE void prefetch(const S* from, int64_t step) {
  constexpr int kIntoL2 = 2;
#pragma GCC unroll 32
  for (int i = 0; i < n; ++i, from += step) __builtin_prefetch(from, 0, kIntoL2);
}

// Fetches the inputs that the next row of outputs adds to those of a tile.
template <int n, class X>
JAXGRAD_INLINE void prefetch_inputs(const OutputTiles& tiles, const OutputRow& row, const OutputTile& tile, const X* x,
                                    int64_t row_step) {
  for (int64_t k = 0; k < row.new_rows; ++k) prefetch<n>(x + row.x_new + tile.x + k * row_step, tiles.x_step);
}

}  // namespace jaxgrad::JAXGRAD_ISA

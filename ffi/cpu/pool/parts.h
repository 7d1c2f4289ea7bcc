// Divides a call into parts: ranges of the results along one spatial axis, for some of the outer indices.
#pragma once

#include "cpu/pool/op.h"
#include "cpu/runtime/arena.h"
#include "cpu/runtime/ranges.h"

namespace jaxgrad::JAXGRAD_ISA {

inline Range intersection(Range a, Range b) {
  const int64_t begin = max_of(a.begin, b.begin);
  return {begin, max_of(begin, min_of(a.end, b.end))};
}

// The windows of an axis that have an element in a range of x, if dilation leaves no gap. Others have none.
inline Range windows_of(const PoolShape& s, int axis, Range elements) {
  const int64_t reach = (s.window[axis] - 1) * s.dilation[axis], stride = s.strides[axis], before = s.padding[axis];
  const Range found{ceil_div(elements.begin + before - reach, stride),
                    floor_div(elements.end - 1 + before, stride) + 1};
  return intersection(found, {0, s.y[axis]});
}

// The elements of x that a range of windows reads, with those between them.
inline Range elements_of(const PoolShape& s, int axis, Range windows) {
  const int64_t reach = (s.window[axis] - 1) * s.dilation[axis], stride = s.strides[axis], before = s.padding[axis];
  return intersection({windows.begin * stride - before, (windows.end - 1) * stride - before + reach + 1},
                      {0, s.x[axis]});
}

// In the workspace there is space for this many planes, the float32 lanes of the widest vector: its size does not
// depend on the instruction set.
constexpr int64_t kPaddedLanes = 16;
constexpr int64_t kMinParts = 64;              // of a call, if it is large enough
constexpr int64_t kMinRows = 8;                // of a part; windows across its border are computed twice
constexpr int64_t kMaxCopiedPositions = 8192;  // of a part; half a megabyte in float32, which stays in a core's cache

// If there are no channels after the spatial axes, a vector holds elements of several outer indices, the planes. They
// are copied, transposed, for one part at a time.
struct PoolParts {
  PoolParts(PoolPass pass, const PoolShape& s) : shape(s), copies(s.channels == 1 && s.outer > 1) {
    axis = 0;
    while (axis < kPoolAxes - 1 && s.x[axis] == 1 && s.y[axis] == 1) ++axis;
    has_x = reads_x(pass);
    has_tangent = pass == PoolPass::kMaxTangent;
    is_dx = returns_dx(pass);
    x_row = y_row = 1;
    for (int i = axis + 1; i < kPoolAxes; ++i) x_row *= s.x[i], y_row *= s.y[i];
    const int64_t blocks = copies ? ceil_div(s.outer, kPaddedLanes) : s.outer;
    size = is_dx ? s.x[axis] : s.y[axis];
    unit = is_dx ? s.strides[axis] : 1;
    rows = max_of(ceil_div(size, ceil_div(kMinParts, max_of(blocks, 1))), kMinRows * unit);
    rows = min_of(round_up(rows, unit), max_of(size, 1));
    while (copies && rows > unit && copied_positions(rows) > kMaxCopiedPositions)
      rows = round_up(ceil_div(rows, 2), unit);
    count = ceil_div(size, rows);
  }

  // The rows of the result in a part, and the windows that it computes.
  Range results(int64_t part) const { return {part * rows, min_of(size, (part + 1) * rows)}; }
  Range windows(Range results) const { return is_dx ? windows_of(shape, axis, results) : results; }

  // The positions of x or of its tangent, and of y or dy, in the copies of a part of so many rows.
  int64_t x_positions(int64_t part_rows) const { return x_row * min_of(shape.x[axis], x_rows(part_rows)); }
  int64_t y_positions(int64_t part_rows) const { return y_row * min_of(shape.y[axis], y_rows(part_rows)); }
  int64_t dx_positions(int64_t part_rows) const { return is_dx ? x_row * part_rows : 0; }
  int64_t copied_positions(int64_t part_rows) const {
    return (has_x + has_tangent) * x_positions(part_rows) + y_positions(part_rows) + dx_positions(part_rows);
  }

  const PoolShape& shape;
  bool copies, has_x, has_tangent;
  bool is_dx;                       // the result, which is y otherwise
  int axis;                         // the first axis that has more than one position
  int64_t x_row, y_row;             // positions for each row: an index of this axis
  int64_t size, unit, rows, count;  // of the result: rows, the least number in a part, rows of a part, parts

 private:
  int64_t y_rows(int64_t part_rows) const {
    const int64_t reach = (shape.window[axis] - 1) * shape.dilation[axis];
    return is_dx ? (part_rows + reach) / shape.strides[axis] + 1 : part_rows;
  }
  int64_t x_rows(int64_t part_rows) const {
    const int64_t reach = (shape.window[axis] - 1) * shape.dilation[axis];
    return (y_rows(part_rows) - 1) * shape.strides[axis] + reach + 1;
  }
};

// The windows that an element of x is in, along one axis.
struct WindowsOfElement {
  WindowsOfElement() = default;
  WindowsOfElement(const PoolShape& s, int axis, int64_t element) {
    const int64_t stride = s.strides[axis], dilation = s.dilation[axis], from = element + s.padding[axis];
    int64_t common = stride;
    for (int64_t rest = dilation; rest != 0;) {
      const int64_t next = common % rest;
      common = rest;
      rest = next;
    }
    // The element is tap k of window (from - k dilation) / stride, if the division leaves no remainder. If tap k is
    // one, then so is tap k + stride / common. The first window has the last tap.
    const int64_t tap_step = stride / common, last_window = s.y[axis] - 1;
    step = dilation / common;
    const int64_t most = min_of(s.window[axis] - 1, floor_div(from, dilation));
    const int64_t least = max_of(0, ceil_div(from - last_window * stride, dilation));
    int64_t tap = most;
    while (tap >= least && (from - tap * dilation) % stride != 0 && most - tap < tap_step) --tap;
    const bool any = tap >= least && most - tap < tap_step;
    count = any ? (tap - least) / tap_step + 1 : 0;
    first = any ? (from - tap * dilation) / stride : 0;
  }

  int64_t first, step, count;
};

// An element of a window, `offset` elements of its array after the window's origin.
struct Tap {
  int64_t offset;
  enum Kind : int64_t { kPadding, kElement, kOwnElement } kind;  // own: of the part's results, if they are dx
};

// The memory of a worker.
template <class S>
struct PoolScratch {
  PoolScratch(const PoolParts& parts, Arena& arena) {
    taps = arena.take<Tap>(parts.has_x ? parts.shape.taps() : 0);
    edge_taps = arena.take<Tap>(parts.has_x ? parts.shape.taps() : 0);
    last_axis = arena.take<WindowsOfElement>(parts.has_x ? 0 : parts.shape.x[kPoolAxes - 1]);
    if (!parts.copies) return;
    x = arena.take<S>(parts.has_x ? parts.x_positions(parts.rows) * kPaddedLanes : 0);
    tangent = arena.take<S>(parts.has_tangent ? parts.x_positions(parts.rows) * kPaddedLanes : 0);
    y = arena.take<S>(parts.y_positions(parts.rows) * kPaddedLanes);
    dx = arena.take<S>(parts.dx_positions(parts.rows) * kPaddedLanes);
  }

  Tap *taps, *edge_taps;        // of a window
  WindowsOfElement* last_axis;  // of each element of the last axis
  S *x = nullptr, *tangent = nullptr, *y = nullptr, *dx = nullptr;
};

template <class S>
int64_t scratch_bytes(const PoolParts& parts) {
  Arena arena(nullptr);
  const PoolScratch<S> scratch(parts, arena);
  static_cast<void>(scratch);
  return round_up(arena.bytes(), 64);
}

}  // namespace jaxgrad::JAXGRAD_ISA

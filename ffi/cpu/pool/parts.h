// Divides a call into parts: ranges of the results along one spatial axis, of each outer index.
#pragma once

#include "cpu/pool/op.h"
#include "cpu/runtime/arena.h"
#include "cpu/runtime/ranges.h"

namespace jaxgrad::JAXGRAD_ISA {

inline Range intersection(Range a, Range b) {
  const int64_t begin = max_of(a.begin, b.begin);
  return {begin, max_of(begin, min_of(a.end, b.end))};
}

// From the first to the last element of a window.
inline int64_t reach(const PoolShape& s, int axis) { return (s.window[axis] - 1) * s.dilation[axis]; }

// The windows of an axis that have an element in a range, if dilation leaves no gap. They need not lie in y.
inline Range windows_of(const PoolShape& s, int axis, Range elements) {
  const int64_t stride = s.strides[axis], before = s.padding[axis];
  const int64_t begin = ceil_div(elements.begin + before - reach(s, axis), stride);
  return {begin, max_of(begin, floor_div(elements.end - 1 + before, stride) + 1)};
}

// The elements of a range of windows, with those between them. They need not lie in x.
inline Range elements_of(const PoolShape& s, int axis, Range windows) {
  const int64_t begin = windows.begin * s.strides[axis] - s.padding[axis];
  return {begin, windows.size() == 0 ? begin : begin + (windows.size() - 1) * s.strides[axis] + reach(s, axis) + 1};
}

// The indices of the arrays of a part: the elements of x, which is padding elsewhere, the windows, and the elements of
// dx if it is the result.
struct PoolBox {
  Range x[kPoolAxes], y[kPoolAxes], dx[kPoolAxes];
};

inline int64_t positions(const Range (&box)[kPoolAxes]) { return box[0].size() * box[1].size() * box[2].size(); }

constexpr int64_t kPlanes = 16;      // parts that are copied together: lanes of the widest vector
constexpr int64_t kMinChannels = 8;  // with fewer channels, vectors have elements of kPlanes parts
constexpr int64_t kMinRun = 64;      // elements of contiguous windows; with fewer, and few channels, parts are copied
constexpr int64_t kMinTasks = 32;    // of a call, if it is large enough
constexpr int64_t kMinRows = 16;     // of a part that is not copied; windows across its border are in two
constexpr int64_t kTypicalPositions = 8192;  // of a copied part; half a megabyte in float32 stays in a core's cache
constexpr int64_t kMaxPositions = 65536;     // of a copied part

// With few channels, a vector has elements of several parts. They are copied, transposed, for kPlanes parts at a time:
// x and y are then [positions, channels, kPlanes]. Copies have the padding of the split axis, so that all parts have
// the indices of the first one.
struct PoolParts {
  PoolParts(PoolPass pass, const PoolShape& s)
      : shape(s), has_x(reads_x(pass)), has_tangent(pass == PoolPass::kMaxTangent), is_dx(returns_dx(pass)) {
    const int64_t (&sizes)[kPoolAxes] = is_dx ? s.x : s.y;
    axis = 0;
    for (int i = 1; i < kPoolAxes; ++i)
      if (sizes[i] > sizes[axis]) axis = i;
    size = sizes[axis];
    unit = is_dx ? s.strides[axis] : 1;
    // Runs of windows that are one element apart are contiguous, as channels are.
    const int64_t vector = s.channels * (s.strides[2] == 1 ? s.y[2] : 1);
    copies = s.channels < kMinChannels && vector < kMinRun;
    divide();
    if (!copies || (s.outer * count >= kPlanes / 2 && copied_positions() <= kMaxPositions)) return;
    copies = false;
    divide();
  }

  int64_t tasks() const { return copies ? ceil_div(shape.outer * count, kPlanes) : shape.outer * count; }

  // Whether each element is in one window, and no window is in two parts.
  bool has_tiles() const {
    bool found = is_dx && (shape.padding[axis] == 0 || count == 1);
    for (int i = 0; i < kPoolAxes; ++i) {
      const int64_t stride = shape.y[i] == 1 ? shape.window[i] : shape.strides[i];
      found = found && shape.dilation[i] == 1 && stride == shape.window[i] &&
              shape.y[i] * stride - shape.padding[i] >= shape.x[i];
    }
    return found;
  }

  // Whether a plane is in one window, and is contiguous or dx of a sum. Selected elements need the order of elements.
  bool reduces_planes() const {
    bool found = has_x ? shape.channels == 1 && !is_dx && !has_tangent : shape.channels < kMinChannels;
    for (int i = 0; i < kPoolAxes; ++i)
      found = found && shape.y[i] == 1 && shape.dilation[i] == 1 && shape.window[i] - shape.padding[i] >= shape.x[i];
    return found;
  }

  Range results(int64_t part) const { return {part * rows, min_of(size, (part + 1) * rows)}; }

  // The box of a part within the arrays.
  PoolBox box(int64_t part) const {
    PoolBox found = unlimited(results(part));
    found.x[axis] = {0, shape.x[axis]};
    found.y[axis] = intersection(found.y[axis], {0, shape.y[axis]});
    return found;
  }

  // The box of all parts in copies. A part is `part * x_shift()` elements and `part * y_shift()` windows after it.
  PoolBox copied_box() const { return count == 1 ? box(0) : unlimited({0, rows}); }
  int64_t x_shift() const { return is_dx ? rows : rows * shape.strides[axis]; }
  int64_t y_shift() const { return is_dx ? rows / shape.strides[axis] : rows; }

  const PoolShape& shape;
  bool has_x, has_tangent;
  bool is_dx;  // the result, which is y otherwise
  bool copies;
  int axis;                         // the longest one of the result
  int64_t size, unit, rows, count;  // rows are indices of the axis: of the result, the fewest, of a part; and the parts

 private:
  void divide() {
    // Twice as many elements as needed are read at most.
    const int64_t overlap = is_dx ? reach(shape, axis) + 1 : ceil_div(reach(shape, axis) + 1, shape.strides[axis]);
    const int64_t least = max_of(overlap, copies ? 1 : kMinRows * unit),
                  tasks = copies ? kMinTasks / 2 * kPlanes : kMinTasks;
    const auto divide_by = [&](int64_t parts) {
      rows = round_up(max_of(max_of(ceil_div(size, parts), least), 1), unit);
      count = ceil_div(size, rows);
    };
    divide_by(ceil_div(tasks, max_of(shape.outer, 1)));
    while (copies && copied_positions() > kTypicalPositions) {
      const int64_t before = count;
      divide_by(2 * count);
      if (count == before) break;
    }
    if (count > 0) rows = round_up(ceil_div(size, count), unit);  // of equal size
    count = ceil_div(size, rows);
  }

  int64_t copied_positions() const {
    const PoolBox all = copied_box();
    return ((has_x + has_tangent) * positions(all.x) + positions(all.y) + (is_dx ? positions(all.dx) : 0)) *
           shape.channels;
  }

  PoolBox unlimited(Range results) const {
    PoolBox found;
    for (int i = 0; i < kPoolAxes; ++i) {
      found.x[i] = found.dx[i] = {0, shape.x[i]};
      found.y[i] = {0, shape.y[i]};
    }
    found.dx[axis] = results;
    found.y[axis] = is_dx ? windows_of(shape, axis, results) : results;
    found.x[axis] = elements_of(shape, axis, found.y[axis]);
    return found;
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA

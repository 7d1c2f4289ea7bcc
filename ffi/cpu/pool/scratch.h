// The memory of a worker.
#pragma once

#include "cpu/pool/elements.h"
#include "cpu/pool/windows.h"

namespace jaxgrad::JAXGRAD_ISA {

// The taps that windows selected, for as many windows of an axis as elements of one index are in. The axis is the first
// one, or the second one if the first has one index.
struct SelectedRing {
  SelectedRing(const PoolShape& s, const PoolBox& box, int64_t channels)
      : axis(box.y[0].size() > 1 || box.dx[0].size() > 1 ? 0 : 1),
        begin(box.y[axis].begin),
        inner_begin(box.y[1].begin),
        depth(max_of(1, min_of(box.y[axis].size(), reach(s, axis) / s.strides[axis] + 1))),
        row(box.y[2].size() * channels),
        inner(axis == 0 ? box.y[1].size() : 1) {}

  int64_t size() const { return depth * inner * row; }
  int64_t at(int64_t o0, int64_t o1) const {
    return axis == 0 ? ((o0 - begin) % depth * inner + o1 - inner_begin) * row : (o1 - begin) % depth * row;
  }

  int axis;
  int64_t begin, inner_begin, depth, row, inner;
};

template <class T>
struct PoolScratch {
  PoolScratch(const PoolParts& parts, Arena& arena) {
    const PoolShape& s = parts.shape;
    const PoolBox box = parts.copied_box();  // no part is larger
    const int64_t channels = s.channels * (parts.copies ? kPlanes : 1);
    const auto copy = [&](bool is_copied, const Range(&ranges)[kPoolAxes]) {
      return parts.copies && is_copied ? arena.take<T>(positions(ranges) * channels) : nullptr;
    };
    taps = arena.take<TapRow>(s.window[0] * s.window[1]);
    if (parts.is_dx) {
      windows = arena.take<WindowOfElement>(max_windows(s, box));
      phases = arena.take<AxisWindows>(min_of(s.strides[2], box.dx[2].size()));
      if (parts.has_x) selected = arena.take<T>(SelectedRing(s, box, channels).size());
    }
    x = copy(parts.has_x, box.x);
    tangent = copy(parts.has_tangent, box.x);
    y = copy(true, box.y);
    dx = copy(parts.is_dx, box.dx);
  }

  TapRow* taps = nullptr;
  WindowOfElement* windows = nullptr;
  AxisWindows* phases = nullptr;
  T *selected = nullptr, *x, *tangent, *y, *dx;
};

template <class T>
int64_t scratch_bytes(const PoolParts& parts) {
  Arena arena(nullptr);
  const PoolScratch<T> scratch(parts, arena);
  static_cast<void>(scratch);
  return round_up(arena.bytes(), 64);
}

}  // namespace jaxgrad::JAXGRAD_ISA

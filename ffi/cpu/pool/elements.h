// Finds the windows that the elements of x are in, and calls a kernel for the elements of a part.
#pragma once

#include "cpu/pool/arrays.h"

namespace jaxgrad::JAXGRAD_ISA {

// Windows that an element is in, along one axis, in order. A window is `window_step` after the one before it, and the
// element is the tap that is `tap_step` before.
struct AxisWindows {
  int64_t first, tap, count;
};

class AxisOfElements {
 public:
  AxisOfElements(const PoolShape& s, int axis, Range windows)
      : stride_(s.strides[axis]),
        dilation_(s.dilation[axis]),
        padding_(s.padding[axis]),
        window_(s.window[axis]),
        windows_(windows) {
    // The extended Euclidean algorithm: dilation * factor = common, modulo stride.
    int64_t common = stride_, rest = dilation_, factor = 0, next_factor = 1;
    while (rest != 0) {
      const int64_t quotient = common / rest, new_rest = common % rest, new_factor = factor - quotient * next_factor;
      common = rest, rest = new_rest;
      factor = next_factor, next_factor = new_factor;
    }
    common_ = common;
    tap_step = stride_ / common;
    window_step = dilation_ / common;
    inverse_ = (factor % tap_step + tap_step) % tap_step;
  }

  // All windows, those outside y too, of an element that is not negative.
  AxisWindows all(int64_t element) const {
    const int64_t from = element + padding_;
    if (from % common_ != 0) return {0, 0, 0};
    const auto product = static_cast<unsigned __int128>(from / common_ % tap_step) * static_cast<uint64_t>(inverse_);
    const int64_t tap =
        dilation_ == 1 ? from % stride_ : static_cast<int64_t>(product % static_cast<uint64_t>(tap_step));
    if (tap >= window_) return {0, 0, 0};
    const int64_t more = (window_ - 1 - tap) / tap_step, last_tap = tap + more * tap_step;
    return {(from - last_tap * dilation_) / stride_, last_tap, more + 1};
  }

  // Those windows of y that are a number of windows after the given ones.
  AxisWindows within(AxisWindows all, int64_t shift) const {
    const int64_t first = all.first + shift, last = first + (all.count - 1) * window_step;
    const int64_t skipped = first >= windows_.begin ? 0 : ceil_div(windows_.begin - first, window_step);
    const int64_t after = last < windows_.end ? 0 : ceil_div(last + 1 - windows_.end, window_step);
    return {first + skipped * window_step, all.tap - skipped * tap_step, max_of(all.count - skipped - after, 0)};
  }
  AxisWindows of(int64_t element) const { return within(all(element), 0); }

  // The shifts with all windows in y.
  Range whole(AxisWindows all) const {
    return {windows_.begin - all.first, windows_.end - all.first - (all.count - 1) * window_step};
  }

  int64_t tap_step, window_step;

 private:
  int64_t stride_, dilation_, padding_, window_, common_, inverse_;
  Range windows_;
};

// A window that an element is in.
struct WindowOfElement {
  int64_t dy, selected;  // offsets
  int64_t tap;           // the number of the element in the window
};

// In row-major order.
struct Windows {
  WindowOfElement* windows;
  int64_t count;
};

// The most windows that an element is in.
inline int64_t max_windows(const PoolShape& s, const PoolBox& box) {
  int64_t found = 1;
  for (int i = 0; i < kPoolAxes; ++i) found *= max_of(1, min_of(box.y[i].size(), reach(s, i) / s.strides[i] + 1));
  return found;
}

template <class A>
class ElementLoop {
 public:
  // windows, phases: scratch.
  ElementLoop(const PoolShape& s, const PoolBox& box, const PoolArrays<A>& arrays, WindowOfElement* windows,
              AxisWindows* phases)
      : s_(s),
        box_(box),
        arrays_(arrays),
        axes_{{s, 0, box.y[0]}, {s, 1, box.y[1]}, {s, 2, box.y[2]}},
        windows_(windows),
        phases_(phases),
        num_phases_(min_of(s.strides[2], box.dx[2].size())) {
    for (int64_t p = 0; p < num_phases_; ++p) phases_[p] = axes_[2].all(box.dx[2].begin + p);
  }

  // Runs the kernel on the elements (i, j, ...). selected: returns the offset of window (o0, o1, first of the last
  // axis).
  template <class Kernel, class Offset>
  void run(int64_t i, int64_t j, Offset selected) const {
    const AxisWindows outer = axes_[0].of(i), inner = axes_[1].of(j);
    const int64_t channels = arrays_.channels, step = axes_[2].window_step * channels;
    const int64_t stride = s_.strides[2], begin = box_.dx[2].begin, size = box_.dx[2].size();
    for (int64_t p = 0; p < num_phases_; ++p) {
      const int64_t count = ceil_div(size - p, stride);
      const auto run_range = [&](Range shifts, AxisWindows last) {
        const int64_t dx = arrays_.dx_layout.at(i, j, begin + p + shifts.begin * stride);
        WindowOfElement* window = windows_;
        for (int64_t a = 0; a < outer.count; ++a)
          for (int64_t b = 0; b < inner.count; ++b) {
            const int64_t o0 = outer.first + a * axes_[0].window_step, o1 = inner.first + b * axes_[1].window_step;
            const int64_t tap0 = outer.tap - a * axes_[0].tap_step, tap1 = inner.tap - b * axes_[1].tap_step;
            int64_t dy = arrays_.y_layout.at(o0, o1, last.first),
                    tap = (tap0 * s_.window[1] + tap1) * s_.window[2] + last.tap;
            int64_t at = selected(o0, o1) + (last.first - box_.y[2].begin) * channels;
            for (int64_t c = 0; c < last.count; ++c, dy += step, at += step, tap -= axes_[2].tap_step)
              *window++ = {dy, at, tap};
          }
        const Windows list{windows_, window - windows_};
        run_vectors<Kernel>(list, arrays_, shifts.size(), dx, stride * channels, 0);
      };
      const AxisWindows all = phases_[p];
      Range whole = intersection(axes_[2].whole(all), {0, count});
      if (all.count == 0) whole = {0, count};
      if (whole.size() == 0) whole = {count, count};
      const auto run_edge = [&](int64_t shift) { run_range({shift, shift + 1}, axes_[2].within(all, shift)); };
      for (int64_t m = 0; m < whole.begin; ++m) run_edge(m);
      if (whole.size() > 0) run_range(whole, all.count == 0 ? all : axes_[2].within(all, whole.begin));
      for (int64_t m = whole.end; m < count; ++m) run_edge(m);
    }
  }

 private:
  const PoolShape& s_;
  const PoolBox& box_;
  const PoolArrays<A>& arrays_;
  const AxisOfElements axes_[kPoolAxes];
  WindowOfElement* windows_;
  AxisWindows* phases_;
  int64_t num_phases_;  // along the last axis, the windows of elements that are one stride apart are, too
};

}  // namespace jaxgrad::JAXGRAD_ISA

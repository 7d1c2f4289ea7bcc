// Lists the elements of windows, and calls an operation for the windows of a part.
#pragma once

#include "cpu/pool/parts.h"

namespace jaxgrad::JAXGRAD_ISA {

// The arrays of a part, with the channels last. Pointers are to element 0 of the spatial axes; there need not be such
// an element.
template <class S>
struct PoolArrays {
  const S* x;
  const S* tangent;
  S* y;  // dy, which is only read, or the result
  S* dx;
  int64_t channels;

  int64_t x_step(const PoolShape& s, int axis) const { return step(s.x, axis); }
  int64_t y_step(const PoolShape& s, int axis) const { return step(s.y, axis); }

 private:
  int64_t step(const int64_t (&sizes)[kPoolAxes], int axis) const {
    int64_t found = channels;
    for (int i = axis + 1; i < kPoolAxes; ++i) found *= sizes[i];
    return found;
  }
};

struct TapList {
  Tap* taps;
  int64_t count;
};

class WindowLoop {
 public:
  // own: the elements of x in the part's result, if it is dx, along `axis`.
  WindowLoop(const PoolShape& s, int axis, Range windows, Range own, const int64_t (&x_steps)[kPoolAxes],
             bool lists_padding)
      : s_(s), lists_padding_(lists_padding) {
    for (int i = 0; i < kPoolAxes; ++i) {
      windows_[i] = {0, s.y[i]};
      own_[i] = {0, s.x[i]};
      steps_[i] = x_steps[i];
    }
    windows_[axis] = windows;
    own_[axis] = own;
    // The windows of the last axis that lie within the part.
    const int64_t reach = (s.window[2] - 1) * s.dilation[2];
    const Range whole{ceil_div(own_[2].begin + s.padding[2], s.strides[2]),
                      floor_div(own_[2].end - 1 - reach + s.padding[2], s.strides[2]) + 1};
    inner_ = intersection(windows_[2], whole);
  }

  // Calls body(taps, origin, o0, o1, o2) for each window: its elements are x[origin + offset of each tap].
  template <class Body>
  void for_windows(Tap* taps, Tap* edge_taps, Body body) const {
    for (int64_t o0 = windows_[0].begin; o0 < windows_[0].end; ++o0)
      for (int64_t o1 = windows_[1].begin; o1 < windows_[1].end; ++o1) {
        const auto edge = [&](int64_t o2) { body(listed(edge_taps, o0, o1, o2), int64_t{0}, o0, o1, o2); };
        if (inner_.size() == 0) {
          for (int64_t o2 = windows_[2].begin; o2 < windows_[2].end; ++o2) edge(o2);
          continue;
        }
        for (int64_t o2 = windows_[2].begin; o2 < inner_.begin; ++o2) edge(o2);
        const TapList inner = listed(taps, o0, o1, inner_.begin);
        for (int64_t o2 = inner_.begin; o2 < inner_.end; ++o2)
          body(inner, (o2 - inner_.begin) * s_.strides[2] * steps_[2], o0, o1, o2);
        for (int64_t o2 = inner_.end; o2 < windows_[2].end; ++o2) edge(o2);
      }
  }

 private:
  TapList listed(Tap* taps, int64_t o0, int64_t o1, int64_t o2) const {
    int64_t n = 0;
    for (int64_t a = 0; a < s_.window[0]; ++a)
      for (int64_t b = 0; b < s_.window[1]; ++b)
        for (int64_t c = 0; c < s_.window[2]; ++c) {
          const int64_t at[] = {element(0, o0, a), element(1, o1, b), element(2, o2, c)};
          bool is_own = true, is_inside = true;
          int64_t offset = 0;
          for (int i = 0; i < kPoolAxes; ++i) {
            is_own = is_own && own_[i].has(at[i]);
            is_inside = is_inside && Range{0, s_.x[i]}.has(at[i]);
            offset += at[i] * steps_[i];
          }
          if (is_inside) {
            taps[n++] = {offset, is_own ? Tap::kOwnElement : Tap::kElement};
          } else if (lists_padding_ && (n == 0 || taps[n - 1].kind != Tap::kPadding)) {
            taps[n++] = {0, Tap::kPadding};  // stands for all padding up to the next element
          }
        }
    return {taps, n};
  }
  int64_t element(int axis, int64_t window, int64_t tap) const {
    return window * s_.strides[axis] - s_.padding[axis] + tap * s_.dilation[axis];
  }

  const PoolShape& s_;
  bool lists_padding_;
  Range windows_[kPoolAxes], own_[kPoolAxes], inner_;
  int64_t steps_[kPoolAxes];
};

}  // namespace jaxgrad::JAXGRAD_ISA

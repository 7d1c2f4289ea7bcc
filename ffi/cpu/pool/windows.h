// Lists the elements of windows, and calls a kernel for the windows of a part.
#pragma once

#include "cpu/pool/arrays.h"

namespace jaxgrad::JAXGRAD_ISA {

// The elements of a window along the last axis.
struct TapRow {
  int64_t offset;  // of the first tap after the window's first element
  int64_t number;  // of the first tap, in row-major order
  bool is_padding;
};

struct Taps {
  TapRow* rows;
  int64_t count;
  Range inside;    // the taps of each row that are elements of x
  bool has_after;  // whether padding comes after them
  int64_t step;

  // Calls element(offset, number) for each element, in row-major order, and padding() for padding between elements.
  template <class Element, class Padding>
  JAXGRAD_INLINE void for_each(Element element, Padding padding) const {
    for (int64_t r = 0; r < count; ++r) {
      if (rows[r].is_padding || inside.begin > 0) padding();
      if (rows[r].is_padding) continue;
      int64_t offset = rows[r].offset + inside.begin * step;
      for (int64_t c = inside.begin; c < inside.end; ++c, offset += step) element(offset, rows[r].number + c);
      if (has_after) padding();
    }
  }
};

template <class A>
class WindowLoop {
 public:
  WindowLoop(const PoolShape& s, const PoolBox& box, const PoolArrays<A>& arrays, TapRow* rows)
      : s_(s), box_(box), arrays_(arrays), rows_(rows) {
    // The windows of the last axis without padding.
    const Range x = box.x[2];
    const Range whole{ceil_div(x.begin + s.padding[2], s.strides[2]),
                      floor_div(x.end - 1 - reach(s, 2) + s.padding[2], s.strides[2]) + 1};
    inner_ = intersection(box.y[2], whole);
    if (inner_.size() == 0) inner_ = {box.y[2].end, box.y[2].end};
  }

  // Runs the kernel on ranges of windows. y: the offset of window (o0, o1, first one of the last axis).
  template <class Kernel, class Offset>
  void run(Range first, Range second, Offset y) const {
    const int64_t stride = s_.strides[2] * arrays_.x_layout.steps[2], channels = arrays_.channels;
    for (int64_t o0 = first.begin; o0 < first.end; ++o0)
      for (int64_t o1 = second.begin; o1 < second.end; ++o1) {
        Taps taps = rows_of(o0, o1);
        const int64_t x_at = arrays_.x_layout.at(o0 * s_.strides[0] - s_.padding[0], o1 * s_.strides[1] - s_.padding[1],
                                                 box_.y[2].begin * s_.strides[2] - s_.padding[2]);
        const int64_t y_at = y(o0, o1);
        const auto run_range = [&](Range windows) {
          const int64_t start = windows.begin * s_.strides[2] - s_.padding[2], dilation = s_.dilation[2];
          taps.inside =
              intersection({ceil_div(box_.x[2].begin - start, dilation), ceil_div(box_.x[2].end - start, dilation)},
                           {0, s_.window[2]});
          taps.has_after = taps.inside.end < s_.window[2];
          const int64_t from = windows.begin - box_.y[2].begin;
          run_vectors<Kernel>(taps, arrays_, windows.size(), x_at + from * stride, stride, y_at + from * channels);
        };
        for (int64_t o2 = box_.y[2].begin; o2 < inner_.begin; ++o2) run_range({o2, o2 + 1});
        if (inner_.size() > 0) run_range(inner_);
        for (int64_t o2 = inner_.end; o2 < box_.y[2].end; ++o2) run_range({o2, o2 + 1});
      }
  }

 private:
  Taps rows_of(int64_t o0, int64_t o1) const {
    TapRow* row = rows_;
    const int64_t (&steps)[kPoolAxes] = arrays_.x_layout.steps;
    for (int64_t a = 0; a < s_.window[0]; ++a)
      for (int64_t b = 0; b < s_.window[1]; ++b) {
        const int64_t i = a * s_.dilation[0], j = b * s_.dilation[1];
        const bool is_inside = box_.x[0].has(o0 * s_.strides[0] - s_.padding[0] + i) &&
                               box_.x[1].has(o1 * s_.strides[1] - s_.padding[1] + j);
        *row++ = {i * steps[0] + j * steps[1], (a * s_.window[1] + b) * s_.window[2], !is_inside};
      }
    return {rows_, row - rows_, {}, false, s_.dilation[2] * steps[2]};
  }

  const PoolShape& s_;
  const PoolBox& box_;
  const PoolArrays<A>& arrays_;
  TapRow* rows_;
  Range inner_;
};

}  // namespace jaxgrad::JAXGRAD_ISA

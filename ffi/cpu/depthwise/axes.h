// One spatial axis of a sum over the window, and the parts into which a call is divided.
#pragma once

#include "cpu/depthwise/op.h"
#include "cpu/runtime/ranges.h"

namespace jaxgrad::JAXGRAD_ISA {

// Output j of an axis, which is element out + j out_step of its array, sums inputs in + j stride + k dilation over the
// taps k. Inputs outside of `inputs` are padding.
//
// Tap k has the weight first_tap + k tap_step.
struct Axis {
  int64_t out, out_step, count;
  int64_t in, stride, dilation, taps;
  Range inputs;
  int64_t first_tap, tap_step;

  int64_t input(int64_t j, int64_t k) const { return in + j * stride + k * dilation; }
  // The taps of output j whose inputs are no padding.
  Range taps_inside(int64_t j) const {
    const int64_t first = input(j, 0);
    return {max_of(0, ceil_div(inputs.begin - first, dilation)), min_of(taps, ceil_div(inputs.end - first, dilation))};
  }
  // The same axis for the outputs that are elements [begin, end).
  Axis within(Range elements) const {
    const int64_t first = max_of(0, ceil_div(elements.begin - out, out_step));
    const int64_t last = min_of(count, ceil_div(elements.end - out, out_step));
    Axis part = *this;
    part.out += first * out_step;
    part.in += first * stride;
    part.count = max_of(0, last - first);
    return part;
  }
};

// The axis of the forward pass: outputs are elements of y, inputs are elements of x.
inline Axis forward_axis(const DepthwiseShape& s, int axis) {
  return {0, 1, s.y[axis], -s.padding[axis], s.strides[axis], s.dilation[axis], s.window[axis], {0, s.x[axis]}, 0, 1};
}

inline int64_t greatest_common_divisor(int64_t a, int64_t b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// The axis of the input gradient for the elements of dx that leave the remainder `phase` when divided by the stride:
// they meet the same taps, so that they are a convolution of dy without a stride. The taps are in reverse order.
inline Axis input_gradient_axis(const DepthwiseShape& s, int axis, int64_t phase) {
  const int64_t stride = s.strides[axis], dilation = s.dilation[axis], window = s.window[axis];
  const int64_t from = phase + s.padding[axis];  // the element meets tap k at output (from - k dilation) / stride
  const int64_t common = greatest_common_divisor(stride, dilation), tap_step = stride / common;
  int64_t first = 0;
  while (first < min_of(window, tap_step) && (from - first * dilation) % stride != 0) ++first;
  const bool any = first < min_of(window, tap_step);
  const int64_t taps = any ? (window - 1 - first) / tap_step + 1 : 0;
  const int64_t last_output = any ? (from - first * dilation) / stride : 0, step = dilation / common;
  const int64_t count = phase < s.x[axis] ? (s.x[axis] - 1 - phase) / stride + 1 : 0;
  return {phase, stride, count,          last_output - (taps - 1) * step, 1,
          step,  taps,   {0, s.y[axis]}, first + (taps - 1) * tap_step,   -tap_step};
}

// A part of an array in the three spatial axes.
struct Box {
  Range axes[kDepthwiseAxes];

  int64_t positions() const { return axes[0].size() * axes[1].size() * axes[2].size(); }
};

// The elements of x that the elements of y in a box read, and the other way round. No axis of the result is empty.
inline Range nonempty(Range found, int64_t size) {
  const int64_t begin = max_of(0, min_of(found.begin, size - 1));
  return {begin, max_of(begin + 1, min_of(found.end, size))};
}
inline Box inputs_of(const DepthwiseShape& s, const Box& y) {
  Box x;
  for (int i = 0; i < kDepthwiseAxes; ++i) {
    const int64_t first = y.axes[i].begin * s.strides[i] - s.padding[i];
    const int64_t last = (y.axes[i].end - 1) * s.strides[i] - s.padding[i] + (s.window[i] - 1) * s.dilation[i];
    x.axes[i] = nonempty({first, last + 1}, s.x[i]);
  }
  return x;
}
inline Box outputs_of(const DepthwiseShape& s, const Box& x) {
  Box y;
  for (int i = 0; i < kDepthwiseAxes; ++i) {
    const int64_t first = x.axes[i].begin + s.padding[i] - (s.window[i] - 1) * s.dilation[i];
    const int64_t last = x.axes[i].end - 1 + s.padding[i];
    y.axes[i] = nonempty({ceil_div(first, s.strides[i]), floor_div(last, s.strides[i]) + 1}, s.y[i]);
  }
  return y;
}

// The most positions that inputs_of() and outputs_of() return for a box of this size, wherever it lies.
inline int64_t max_inputs(const DepthwiseShape& s, const Box& y) {
  int64_t found = 1;
  for (int i = 0; i < kDepthwiseAxes; ++i)
    found *= min_of(s.x[i], (y.axes[i].size() - 1) * s.strides[i] + (s.window[i] - 1) * s.dilation[i] + 1);
  return found;
}
inline int64_t max_outputs(const DepthwiseShape& s, const Box& x) {
  int64_t found = 1;
  for (int i = 0; i < kDepthwiseAxes; ++i)
    found *= min_of(s.y[i], (x.axes[i].size() - 1 + (s.window[i] - 1) * s.dilation[i]) / s.strides[i] + 2);
  return found;
}

// Divides an array into boxes of nearly the same size.
class Boxes {
 public:
  // `fits(box)` says whether a box is small enough; boxes of one element are taken in any case.
  template <class Fits>
  Boxes(const int64_t (&sizes)[kDepthwiseAxes], Fits fits) {
    for (int i = 0; i < kDepthwiseAxes; ++i) sizes_[i] = sizes[i], count_[i] = 1;
    while (!fits(largest())) {
      // The last axis stays long: the outputs next to each other on it share a tile of registers.
      constexpr int64_t kPreference[] = {16, 16, 1};
      int longest = 2;
      for (int i = 0; i < kDepthwiseAxes; ++i)
        if (extent(i) * kPreference[i] > extent(longest) * kPreference[longest] && extent(i) > 1) longest = i;
      if (extent(longest) == 1) break;
      count_[longest] = ceil_div(sizes_[longest], extent(longest) / 2);
    }
  }

  int64_t count() const { return count_[0] * count_[1] * count_[2]; }
  Box operator[](int64_t index) const {
    Box box;
    for (int i = kDepthwiseAxes - 1; i >= 0; --i) {
      const int64_t at = index % count_[i];
      index /= count_[i];
      box.axes[i] = {at * sizes_[i] / count_[i], (at + 1) * sizes_[i] / count_[i]};
    }
    return box;
  }

 private:
  int64_t extent(int axis) const { return ceil_div(sizes_[axis], count_[axis]); }
  Box largest() const {
    Box box;
    for (int i = 0; i < kDepthwiseAxes; ++i) box.axes[i] = {0, extent(i)};
    return box;
  }

  int64_t sizes_[kDepthwiseAxes], count_[kDepthwiseAxes];
};

}  // namespace jaxgrad::JAXGRAD_ISA

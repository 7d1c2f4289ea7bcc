#include "common/pool_problem.h"

#include <algorithm>
#include <thread>

#include "common/checked_int.h"

namespace jaxgrad {

bool pool_sizes_fit(const PoolShape& s, int64_t threads) {
  constexpr int64_t kMaxTaps = int64_t{1} << 31;  // positions in a window are 32-bit ints
  CheckedInt positions = 1, taps = 1;
  for (int i = 0; i < kPoolAxes; ++i) {
    const bool positive = s.x[i] >= 0 && s.y[i] >= 0 && s.window[i] > 0 && s.strides[i] > 0 && s.dilation[i] > 0;
    if (!positive || s.padding[i] < 0) return false;
    const CheckedInt reach = CheckedInt(s.window[i]) * s.dilation[i];
    const CheckedInt last = (CheckedInt(s.y[i]) + 1) * s.strides[i] + reach + s.padding[i];
    if (last.overflowed()) return false;
    positions = positions * (CheckedInt(s.x[i]) + last + 2);
    taps = taps * s.window[i];
  }
  if (s.outer < 0 || s.channels < 0 || taps.overflowed() || taps.value() >= kMaxTaps) return false;
  const CheckedInt arrays = positions * (CheckedInt(s.channels) + 64) * (CheckedInt(s.outer) + 64) * 32;
  return !(arrays + (positions * 1024 + taps * 64 + 1024) * threads).overflowed();
}

PoolShape pool_shape(Checks& checks, Sizes x, Sizes y, Sizes window, Sizes strides, Sizes padding, Sizes dilation) {
  const size_t axes = window.size();
  checks.require(axes >= 1 && axes <= kPoolAxes, "window must have 1 to 3 elements");
  checks.require(x.size() == axes + 2 && y.size() == axes + 2, "x and y must be [outer, spatial..., channels]");
  checks.require(strides.size() == axes && padding.size() == 2 * axes && dilation.size() == axes,
                 "strides and dilation must have as many elements as window, and padding twice as many");
  if (checks.failed()) return {};
  checks.require(x[0] == y[0] && x[axes + 1] == y[axes + 1], "x and y must have the same outer and channel sizes");
  PoolShape shape{x[0], x[axes + 1], {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}};
  for (size_t i = 0; i < axes; ++i) {
    const size_t axis = kPoolAxes - axes + i;
    shape.x[axis] = x[i + 1];
    shape.y[axis] = y[i + 1];
    shape.window[axis] = window[i];
    shape.strides[axis] = strides[i];
    shape.padding[axis] = padding[2 * i];
    shape.dilation[axis] = dilation[i];
  }
  const int64_t threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
  checks.require(pool_sizes_fit(shape, threads),
                 "window, strides and dilation must be positive, padding must not be negative, windows must have fewer "
                 "than 2^31 elements and arrays fewer than 2^63 bytes");
  for (size_t i = 0; i < axes && !checks.failed(); ++i) {
    const CheckedInt reach = (CheckedInt(window[i]) - 1) * dilation[i] + 1;
    const CheckedInt rest = CheckedInt(x[i + 1]) + padding[2 * i] + padding[2 * i + 1] - reach;
    const int64_t windows = rest.value() < 0 ? 0 : rest.value() / strides[i] + 1;
    checks.require(!rest.overflowed() && padding[2 * i + 1] >= 0 && y[i + 1] == windows,
                   "y must have as many elements as there are windows");
  }
  return shape;
}

void check_like_x(Checks& checks, const xla::ffi::AnyBuffer& x, const xla::ffi::AnyBuffer& y,
                  const xla::ffi::AnyBuffer* like_x) {
  const auto sizes = x.dimensions();
  bool has_shape = true, has_type = y.element_type() == x.element_type();
  if (like_x != nullptr) {
    const auto given = like_x->dimensions();
    has_shape = std::equal(sizes.begin(), sizes.end(), given.begin(), given.end());
    has_type = has_type && like_x->element_type() == x.element_type();
  }
  checks.require(has_shape, "dx must have the shape of x");
  checks.require(has_type, "all arrays must have the same element type");
}

}  // namespace jaxgrad

#include "cuda/depthwise/convolution_shape.h"

#include <algorithm>
#include <limits>

#include "common/checked_int.h"
#include "cuda/depthwise/layout.h"
#include "cuda/depthwise/rounding.h"

namespace jaxgrad {
namespace {

constexpr int64_t kMaxTaps = 1024;  // the kernel is unrolled over the window
constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

}  // namespace

int64_t DepthwiseConvolution::results(int axis) const {
  if (is_gradient && stride[axis] > 1) return out[axis] + padding[axis] % stride[axis];
  return (out[axis] + dilation[axis] - 1) / dilation[axis];
}

DepthwiseConvolution with_rounded_sizes(DepthwiseConvolution c) {
  c.images = rounded_up(std::clamp<int64_t>(c.images, 1, 1024));
  for (int axis = 0; axis < 3; ++axis) {
    const auto round = [](int64_t size) { return size <= 64 ? std::max<int64_t>(size, 1) : rounded_up(size); };
    c.in[axis] = round(c.in[axis]), c.out[axis] = round(c.out[axis]);
    if (c.is_gradient && c.stride[axis] > 1) c.padding[axis] = 0;
  }
  return c;
}

std::optional<DepthwiseConvolution> depthwise_convolution(const ConvProblem& problem, FloatType type,
                                                          std::string& reason) {
  const auto fail = [&](const char* why) {
    reason = why;
    return std::nullopt;
  };
  const int n = problem.spatial;
  if (type == FloatType::kFloat64) return fail("it does not support float64");
  if (problem.groups != problem.x.sizes[1] || problem.w.sizes[0] != problem.groups)
    return fail("the convolution is not depthwise");
  if (!is_channels_last(problem.x, n) || !is_channels_last(problem.y, n))
    return fail("the operands must be channels last");
  DepthwiseConvolution c;
  c.type = type;
  c.is_gradient = problem.pass == ConvPass::kInputGradient;
  c.taps_last = !has_tap_order(problem.w, n, false);
  if (c.taps_last && !has_tap_order(problem.w, n, true))
    return fail("the channels of the weights must come first or last");
  c.images = problem.x.sizes[0], c.channels = problem.x.sizes[1];
  DepthwiseConvolution::Axes x{1, 1, 1}, y{1, 1, 1};
  c.window = c.stride = c.dilation = {1, 1, 1};
  for (int i = 0; i < n; ++i) {
    const int axis = n == 3 ? i : n == 2 ? 2 * i : 2;
    x[axis] = problem.x.sizes[i + 2], y[axis] = problem.y.sizes[i + 2], c.window[axis] = problem.w.sizes[i + 2];
    c.stride[axis] = problem.window_strides[i], c.padding[axis] = problem.padding_low[i];
    c.dilation[axis] = c.window[axis] > 1 ? problem.rhs_dilation[i] : 1;
    if (c.is_gradient && c.stride[axis] > 1 && c.dilation[axis] > 1)
      return fail("it does not support input gradients with a stride and dilation along the same axis");
  }
  c.in = c.is_gradient ? y : x, c.out = c.is_gradient ? x : y;
  if (c.channels * c.element_bytes() % 4 != 0) return fail("the channels of a pixel must be a multiple of 4 bytes");
  if (c.taps() > kMaxTaps) return fail("the window is too large");
  for (int axis = 0; axis < 3; ++axis)
    if (c.stride[axis] > 64 || c.dilation[axis] > kMax / 4096 || c.padding[axis] > kMax / 4)
      return fail("the strides, dilation or padding are too large");
  for (const auto& sizes : {x, y})
    if (sizes[0] * sizes[1] * sizes[2] * c.channels > kMax / 64 ||
        c.images > kMax / (sizes[0] * sizes[1] * sizes[2] + 1))
      return fail("the arrays are too large for 32-bit indices");
  CheckedInt results(c.images + 4);  // of all residue classes, with those of whole tiles: a bound of the items
  for (int axis = 0; axis < 3; ++axis)
    results = results * (CheckedInt(c.out[axis]) + c.dilation[axis] + c.stride[axis]);
  if (c.taps() * c.channels > kMax / 64 || results.overflowed() || results.value() > kMax)
    return fail("the arrays are too large for 32-bit indices");
  return c;
}

}  // namespace jaxgrad

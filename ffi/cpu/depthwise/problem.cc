#include "cpu/depthwise/problem.h"

namespace jaxgrad {
namespace {

DepthwiseActivations<void> activations(const ConvOperand& operand, int spatial) {
  DepthwiseActivations<void> found{nullptr, elements(operand, spatial), operand.strides[0], operand.strides[1], {}};
  for (int i = 0; i < spatial; ++i) found.spatial[kDepthwiseAxes - spatial + i] = operand.strides[i + 2];
  return found;
}

template <class S>
bool has_adjacent_elements(const DepthwiseActivations<S>& array) {
  return array.channel == 1 || array.spatial[kDepthwiseAxes - 1] == 1;
}

}  // namespace

DepthwiseProblem make_depthwise_problem(ConvPass pass, ConvArguments arguments, int64_t threads, std::string& error) {
  DepthwiseProblem found;
  DepthwiseShape& s = found.shape;
  s.problems = 1;
  if (!remove_problem_axis(arguments, s.problems)) {
    error = "x, w and y must have the same number of independent problems, at least one";
    return found;
  }
  const ConvProblem p = make_conv_problem(pass, arguments, error);
  if (!error.empty()) return found;
  if (p.groups != p.x.sizes[1] || p.groups != p.w.sizes[0]) {
    error = "each group must have one input and one output feature";
    return found;
  }
  s.batch = p.x.sizes[0];
  s.channels = p.groups;
  for (int axis = 0; axis < kDepthwiseAxes; ++axis) {
    s.x[axis] = s.window[axis] = s.y[axis] = s.strides[axis] = s.dilation[axis] = 1;
    const int i = axis - (kDepthwiseAxes - p.spatial);
    if (i < 0) continue;
    s.x[axis] = p.x.sizes[i + 2];
    s.window[axis] = p.w.sizes[i + 2];
    s.y[axis] = p.y.sizes[i + 2];
    s.strides[axis] = p.window_strides[i];
    s.dilation[axis] = s.window[axis] > 1 ? p.rhs_dilation[i] : 1;  // one tap has no dilation
    s.padding[axis] = p.padding_low[i];
    found.w.spatial[axis] = p.w.strides[i + 2];
  }
  found.x = activations(p.x, p.spatial);
  found.y = activations(p.y, p.spatial);
  found.w.problem = elements(p.w, p.spatial);
  found.w.channel = p.w.strides[0];
  if (!has_adjacent_elements(found.x) || !has_adjacent_elements(found.y))
    error = "the features or the last spatial axis must be the last axis of x and y";
  else if (!depthwise_sizes_fit(s, threads))
    error = "the arrays and the workspace must have fewer than 2^63 bytes";
  return found;
}

}  // namespace jaxgrad

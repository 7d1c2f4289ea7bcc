// A convolution as Python describes it to the compiled modules.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/conv_problem.h"

namespace jaxgrad {

using ConvShapes = std::vector<std::vector<int64_t>>;  // of x, w and y

// The layout has what the handlers have as attributes, by name.
inline ConvCall conv_call(const ConvShapes& shapes, const nanobind::dict& layout) {
  if (shapes.size() != 3) throw nanobind::value_error("there must be three shapes");
  const auto axes = [&](const char* name) { return nanobind::cast<std::vector<int64_t>>(layout[name]); };
  return {shapes[0],
          shapes[1],
          shapes[2],
          axes("lhs_spec"),
          axes("rhs_spec"),
          axes("out_spec"),
          axes("window_strides"),
          axes("padding"),
          axes("rhs_dilation"),
          nanobind::cast<int64_t>(layout["feature_group_count"])};
}

// Raises ValueError where the shapes and the layout do not fit each other.
inline ConvShape conv_shape(ConvKind kind, const ConvShapes& shapes, const nanobind::dict& layout) {
  std::string problem;
  const ConvShape shape = conv_shape(kind, conv_call(shapes, layout), problem);
  if (!problem.empty()) throw nanobind::value_error(problem.c_str());
  return shape;
}

}  // namespace jaxgrad

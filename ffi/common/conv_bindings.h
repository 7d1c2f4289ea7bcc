// Converts the convolution arguments of the Python bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/conv_problem.h"

namespace jaxgrad {

using ConvShapes = std::vector<std::vector<int64_t>>;  // of x, w and y

// `layout` maps the names of the handlers' attributes to their values.
inline ConvArguments conv_arguments(const ConvShapes& shapes, const nanobind::dict& layout) {
  if (shapes.size() != 3) throw nanobind::value_error("shapes must be the shapes of x, w and y");
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

// Raises ValueError if the arguments contradict each other.
inline ConvProblem make_conv_problem(ConvPass pass, const ConvShapes& shapes, const nanobind::dict& layout) {
  std::string error;
  const ConvProblem problem = make_conv_problem(pass, conv_arguments(shapes, layout), error);
  if (!error.empty()) throw nanobind::value_error(error.c_str());
  return problem;
}

}  // namespace jaxgrad

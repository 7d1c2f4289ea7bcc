// Reads a convolution problem as a depthwise one.
#pragma once

#include <string>

#include "common/conv_problem.h"
#include "cpu/depthwise/op.h"

namespace jaxgrad {

struct DepthwiseProblem {
  DepthwiseShape shape{};
  DepthwiseActivations<void> x{}, y{};  // without data
  DepthwiseWeights<void> w{};

  // Whether the kernels copy the activations, because the channels of an array are not its last axis.
  bool copies() const { return x.channel != 1 || y.channel != 1; }
};

// Checks the arguments. With independent problems, the arrays are as remove_problem_axis() takes them. `threads` may
// run the call. If a check fails, `error` is set and the result is meaningless.
DepthwiseProblem make_depthwise_problem(ConvPass pass, ConvArguments arguments, int64_t threads, std::string& error);

}  // namespace jaxgrad

// The forward pass or the input gradient of a depthwise convolution, as the kernels take it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "common/conv_problem.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

// Arrays [images, axis 0, axis 1, axis 2, channels] and weights [axis 0, axis 1, axis 2, channels]. One spatial
// dimension is axis 2, two are the axes 0 and 2; other axes have one element.
struct DepthwiseConvolution {
  using Axes = std::array<int64_t, 3>;

  FloatType type{};
  bool is_gradient{};
  bool taps_last{};  // the layout of the weights is [channels, axis 0, axis 1, axis 2]
  int64_t images{}, channels{};
  Axes in{}, out{};                                // sizes of the arrays that the kernel reads and writes
  Axes window{}, stride{}, dilation{}, padding{};  // of the forward pass; the padding before the first element of x

  int64_t element_bytes() const { return bytes_of(type); }
  int64_t taps() const { return window[0] * window[1] * window[2]; }

  // The results of an axis that the blocks divide among them: those of one residue class of the dilation. A gradient
  // starts at a multiple of the stride, counted from the padding.
  int64_t results(int axis) const;
};

// Sizes rounded up, so that calls of similar sizes have the same tile.
DepthwiseConvolution with_rounded_sizes(DepthwiseConvolution convolution);

// If the kernel does not support the problem, the result is empty and `reason` is set.
std::optional<DepthwiseConvolution> depthwise_convolution(const ConvProblem& problem, FloatType type,
                                                          std::string& reason);

}  // namespace jaxgrad

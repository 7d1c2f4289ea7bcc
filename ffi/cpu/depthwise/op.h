// Depthwise convolutions on the CPU: each group has one input and one output feature, a channel. No XLA types.
//
// All passes share the geometry of the forward convolution y = conv(x, w): forward (y from x and w), input gradient (dx
// from dy and w), weight gradient (dw from x and dy). There are three spatial axes; axes that are left out have size 1
// and come first.
//
// A call computes several independent problems of one shape.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/conv_problem.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {

constexpr int kDepthwiseAxes = 3;

struct DepthwiseShape {
  int64_t problems, batch, channels;
  int64_t x[kDepthwiseAxes], window[kDepthwiseAxes], y[kDepthwiseAxes];  // spatial sizes
  int64_t strides[kDepthwiseAxes], dilation[kDepthwiseAxes],
      padding[kDepthwiseAxes];  // padding before the first element

  int64_t taps() const { return window[0] * window[1] * window[2]; }
};

// An array of activations. The steps are in elements. The channels or the last spatial axis have step 1.
template <class S>
struct DepthwiseActivations {
  S* data;
  int64_t problem, batch, channel, spatial[kDepthwiseAxes];
};

// The weights, or their gradient.
template <class S>
struct DepthwiseWeights {
  S* data;
  int64_t problem, channel, spatial[kDepthwiseAxes];
};

template <class S>
struct DepthwiseForward {
  DepthwiseShape shape;
  DepthwiseActivations<const S> x;
  DepthwiseWeights<const S> w;
  const S* bias;  // [problems, channels] or null
  bool relu;
  DepthwiseActivations<S> y;
  std::byte* workspace;
  int64_t workspace_bytes;
};

template <class S>
struct DepthwiseInputGradient {
  DepthwiseShape shape;
  DepthwiseActivations<const S> dy;
  DepthwiseWeights<const S> w;
  DepthwiseActivations<S> dx;
  std::byte* workspace;
  int64_t workspace_bytes;
};

template <class S>
struct DepthwiseWeightGradient {
  DepthwiseShape shape;
  DepthwiseActivations<const S> x, dy;
  DepthwiseWeights<S> dw;
  S* db;  // [problems, channels], the sum of dy; null if it is not needed
  std::byte* workspace;
  int64_t workspace_bytes;
};

// The results do not depend on the number of threads.
template <class S>
void depthwise_forward(const DepthwiseForward<S>& call, Parallel& parallel);
template <class S>
void depthwise_input_gradient(const DepthwiseInputGradient<S>& call, Parallel& parallel);
template <class S>
void depthwise_weight_gradient(const DepthwiseWeightGradient<S>& call, Parallel& parallel);

// Bytes of workspace for a number of threads. copies: whether the channels of an array do not have step 1. With a
// smaller workspace, but at least that of one thread, a call uses fewer threads.
int64_t depthwise_workspace(ConvPass pass, const DepthwiseShape& shape, bool copies, int64_t threads);

// Whether no product of sizes overflows.
bool depthwise_sizes_fit(const DepthwiseShape& shape, int64_t threads);

}  // namespace jaxgrad

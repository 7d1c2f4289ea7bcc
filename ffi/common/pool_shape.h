// Pooling calls: the passes and the shape.
//
// All passes share the geometry of the forward pass. There are three spatial axes; axes that are left out have size 1
// and come first.
#pragma once

#include <cstdint>

namespace jaxgrad {

constexpr int kPoolAxes = 3;

// x is [outer, x[0], x[1], x[2], channels], and y likewise. With the channels before the spatial axes, they are a part
// of `outer`, and `channels` is 1.
struct PoolShape {
  int64_t outer, channels;
  int64_t x[kPoolAxes], window[kPoolAxes], y[kPoolAxes];                // spatial sizes
  int64_t strides[kPoolAxes], dilation[kPoolAxes], padding[kPoolAxes];  // padding before the first element

  int64_t taps() const { return window[0] * window[1] * window[2]; }
};

// The maximum of an empty window is -infinity. A maximum is NaN if an element is, and +0 is larger than -0.
//
// The derivatives read the element that XLA's select_and_scatter selects: the first one in row-major order, unless a
// later one is larger, or one of the two is NaN. Padding takes part as -infinity; the gradients of windows that select
// it are dropped.
//
// Sums of 16-bit elements are float32. A sum is divided, if the call has a divisor, and then rounded once. Sums are in
// row-major order: of the elements of a window, and of the windows that an element is in. On a CPU, the sum of a window
// that has all elements of a plane has another order, if the plane is contiguous, and sums of more than 256 terms are
// sums of the sums of 256.
enum class PoolPass : int64_t {
  kMax,               // x -> y
  kMaxInputGradient,  // x, dy -> dx; adds in the order of the windows, and rounds each sum to the element type
  kMaxTangent,        // x, its tangent -> the tangent of y
  kSum,               // x -> y
  kSumInputGradient,  // dy -> dx
};
constexpr int64_t kPoolPasses = 5;

constexpr bool reads_x(PoolPass pass) { return pass != PoolPass::kSumInputGradient; }
constexpr bool returns_dx(PoolPass pass) {
  return pass == PoolPass::kMaxInputGradient || pass == PoolPass::kSumInputGradient;
}

}  // namespace jaxgrad

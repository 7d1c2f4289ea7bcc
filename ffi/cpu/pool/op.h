// Pooling on the CPU: the maximum or the sum over windows, and the derivatives. No XLA types.
//
// All passes share the geometry of the forward pass. There are three spatial axes; axes that are left out have size 1
// and come first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/runtime/parallel.h"
#include "cpu/runtime/storage.h"

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
// later one is larger, or one of the two is NaN. Padding takes part as -infinity, and what it is selected for is
// dropped.
//
// Sums of 16-bit elements are float32, and rounded once. They are in row-major order: of the elements of a window, and
// of the windows that an element is in.
enum class PoolPass : int64_t {
  kMax,               // x -> y
  kMaxInputGradient,  // x, dy -> dx; adds in the order of the windows, and rounds each sum to the element type
  kMaxTangent,        // x, its tangent -> the tangent of y
  kSum,               // x -> y
  kSumInputGradient,  // dy -> dx
};
constexpr int64_t kPoolPasses = 5;

inline bool reads_x(PoolPass pass) { return pass != PoolPass::kSumInputGradient; }
inline bool returns_dx(PoolPass pass) {
  return pass == PoolPass::kMaxInputGradient || pass == PoolPass::kSumInputGradient;
}

template <class S>
struct PoolCall {
  PoolPass pass;
  PoolShape shape;
  const S* x;       // null if the pass does not read it
  const S* second;  // dy, or the tangent of x; null in the passes that return y
  S* result;
  std::byte* workspace;
  int64_t workspace_bytes;
};

// The results do not depend on the number of threads.
template <class S>
void pool(const PoolCall<S>& call, Parallel& parallel);

// Bytes of workspace for a number of threads. With a smaller workspace, but at least that of one thread, a call uses
// fewer threads.
int64_t pool_workspace(PoolPass pass, const PoolShape& shape, int64_t storage_bytes, int64_t threads);

// Whether sizes are in range, and no product of sizes overflows. y may have any sizes: elements after the end of x are
// padding.
bool pool_sizes_fit(const PoolShape& shape, int64_t threads);

}  // namespace jaxgrad

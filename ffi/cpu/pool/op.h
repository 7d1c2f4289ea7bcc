// Pooling on the CPU: the maximum or the sum over windows, and the derivatives.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/pool_shape.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {

template <class S>
struct PoolCall {
  PoolPass pass;
  PoolShape shape;
  const S* x;       // null if the pass does not read it
  const S* second;  // dy, or the tangent of x; null in the passes that return y
  S* result;
  std::byte* workspace;
  int64_t workspace_bytes;
  int64_t divisor = 1;  // of sums, before they are rounded to the element type
};

// The results do not depend on the number of threads.
template <class S>
void pool(const PoolCall<S>& call, Parallel& parallel);

// Bytes of workspace for a number of threads. With a smaller workspace, but at least that of one thread, a call uses
// fewer threads.
int64_t pool_workspace(PoolPass pass, const PoolShape& shape, int64_t storage_bytes, int64_t threads);

}  // namespace jaxgrad

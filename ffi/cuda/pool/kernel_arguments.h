// The argument of the pooling kernels. Both the host compiler and NVRTC compile this file.
#pragma once

namespace jaxgrad {

// Arrays are [outer, sizes, channels]. A thread computes a vector of channels.
struct PoolArguments {
  unsigned channels;    // in vectors
  unsigned x[3], y[3];  // spatial sizes
  int padding[3];       // before the first element
  unsigned vectors;     // of the result
};

enum { kPoolThreads = 256 };  // per block

}  // namespace jaxgrad

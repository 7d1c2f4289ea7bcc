// The argument of the pooling kernels. Both the host compiler and NVRTC compile this file.
#pragma once

#ifndef __CUDACC_RTC__
#include "cuda/runtime/divisor.h"
#endif

namespace jaxgrad {

// Arrays are [outer, sizes, channels], with the channels in vectors.
struct PoolArguments {
  unsigned x[3], y[3];  // spatial sizes
  int padding[3];       // before the first element
  Divisor channels;
  Divisor blocks[3];  // of windows or elements that a thread computes, along each axis
  unsigned threads;
};

enum { kPoolThreads = 256 };  // per block

}  // namespace jaxgrad

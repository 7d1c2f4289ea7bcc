// The launch of a kernel of convolution.cu or toeplitz.cu.
#pragma once

#include <cstdint>

#include "cuda/depthwise/convolution_arguments.h"

namespace jaxgrad {

// How the items of a call are divided among the blocks.
struct DepthwiseGrid {
  DepthwiseArguments arguments;
  int64_t chunks, shares;
};

}  // namespace jaxgrad

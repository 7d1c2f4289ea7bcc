// The launch of a kernel of convolution.cu or toeplitz.cu.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/depthwise/convolution_arguments.h"
#include "cuda/depthwise/rounding.h"

namespace jaxgrad {

// How the items of a call are divided among the blocks.
struct DepthwiseGrid {
  DepthwiseArguments arguments;
  int64_t chunks, shares;
};

// Divides the items among at most `blocks` blocks: the fewest that need the same number of rounds.
inline void share(DepthwiseGrid& grid, int64_t chunks, int64_t blocks) {
  const int64_t items = std::max(grid.arguments.items, 1);
  const int64_t most = std::clamp<int64_t>(blocks / chunks, 1, items);
  grid.chunks = chunks;
  grid.shares = ceil_div(items, ceil_div(items, most));
}

}  // namespace jaxgrad

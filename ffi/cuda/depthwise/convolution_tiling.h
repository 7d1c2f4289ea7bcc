// Chooses how the kernel of convolution.cu divides a depthwise convolution into tiles and threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/depthwise/convolution_grid.h"
#include "cuda/depthwise/convolution_shape.h"
#include "cuda/depthwise/gpu.h"

namespace jaxgrad {

// The constants in capitals are explained in convolution.cu.
struct DepthwiseTile {
  int64_t V, R, COLUMNS, TN, PATCHES, STRIPS, CC, ROWS, STAGES, BLOCKS;
  bool weights_shared;  // whether the weights are in shared memory, otherwise in registers
  int64_t threads, shared_bytes;
  double estimated_us;
};

// The tile with the smallest estimated time; empty if none fits the GPU. Sizes are rounded up first, so that calls of
// similar sizes have the same tile.
std::optional<DepthwiseTile> depthwise_tile(const DepthwiseConvolution& convolution, const Gpu& gpu);

// The grid for a GPU of which each multiprocessor holds `resident` blocks.
DepthwiseGrid depthwise_grid(const DepthwiseConvolution& convolution, const DepthwiseTile& tile,
                             int64_t multiprocessors, int64_t resident);

// The macro definitions that precede the source of the kernel. They depend on no size but those of the window.
std::string depthwise_definitions(const DepthwiseConvolution& convolution, const DepthwiseTile& tile, bool relu);

}  // namespace jaxgrad

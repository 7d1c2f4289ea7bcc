// Chooses how the kernel of toeplitz.cu divides a depthwise convolution among blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/depthwise/convolution_grid.h"
#include "cuda/depthwise/convolution_shape.h"
#include "cuda/depthwise/gpu.h"

namespace jaxgrad {

// The constants in capitals are explained in toeplitz.cu.
struct ToeplitzTile {
  int64_t CC, TILES, BLOCKS;
  int64_t shared_bytes;
  double estimated_us;

  static constexpr int64_t threads = 256;
};

// The tile with the smallest estimated time. Empty if the kernel does not support the convolution or the GPU.
// Sizes are rounded up first, so that calls of similar sizes have the same tile.
std::optional<ToeplitzTile> toeplitz_tile(const DepthwiseConvolution& convolution, const Gpu& gpu);

// The grid for a GPU of which each multiprocessor holds `resident` blocks.
DepthwiseGrid toeplitz_grid(const DepthwiseConvolution& convolution, const ToeplitzTile& tile, int64_t multiprocessors,
                            int64_t resident);

// The macro definitions that precede the source of the kernel. They depend on no size but those of the window.
std::string toeplitz_definitions(const DepthwiseConvolution& convolution, const ToeplitzTile& tile, bool relu);

}  // namespace jaxgrad

// The kernel of a depthwise forward pass or input gradient: that of toeplitz.cu where it is estimated to be
// faster, otherwise that of convolution.cu.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "cuda/depthwise/convolution_tiling.h"
#include "cuda/depthwise/toeplitz_tile.h"

namespace jaxgrad {

class DepthwiseProgram {
 public:
  // Empty if the tiles of both kernels would be too large for the GPU.
  static std::optional<DepthwiseProgram> of(const DepthwiseConvolution& convolution, bool relu, const Gpu& gpu);

  std::string text() const;         // what NVRTC compiles: definitions, device functions and source
  std::string definitions() const;  // they determine the text
  const char* source() const;
  int64_t threads() const;       // of a block
  int64_t shared_bytes() const;  // of a block
  int64_t blocks() const;        // that a multiprocessor should hold at once

  // The launch for a GPU of which each multiprocessor holds `resident` blocks.
  DepthwiseGrid grid(int64_t multiprocessors, int64_t resident) const;

 private:
  DepthwiseProgram(const DepthwiseConvolution& convolution, bool relu, std::variant<DepthwiseTile, ToeplitzTile> tile)
      : convolution_(convolution), relu_(relu), tile_(tile) {}

  DepthwiseConvolution convolution_;
  bool relu_;
  std::variant<DepthwiseTile, ToeplitzTile> tile_;
};

}  // namespace jaxgrad

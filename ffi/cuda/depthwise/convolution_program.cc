#include "cuda/depthwise/convolution_program.h"

#include "cuda/depthwise/convolution_source.h"
#include "cuda/depthwise/toeplitz_source.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/matrix_source.h"

namespace jaxgrad {

std::optional<DepthwiseProgram> DepthwiseProgram::of(const DepthwiseConvolution& convolution, bool relu,
                                                     const Gpu& gpu) {
  const auto tile = depthwise_tile(convolution, gpu);
  const auto toeplitz = toeplitz_tile(convolution, gpu);
  if (toeplitz && (!tile || toeplitz->estimated_us < tile->estimated_us))
    return DepthwiseProgram(convolution, relu, *toeplitz);
  if (tile) return DepthwiseProgram(convolution, relu, *tile);
  return std::nullopt;
}

std::string DepthwiseProgram::text() const {
  const char* const matrix = std::holds_alternative<ToeplitzTile>(tile_) ? kMatrixSource : "";
  return definitions() + kDeviceSource + matrix + source();
}

std::string DepthwiseProgram::definitions() const {
  if (const auto* tile = std::get_if<ToeplitzTile>(&tile_)) return toeplitz_definitions(convolution_, *tile, relu_);
  return depthwise_definitions(convolution_, std::get<DepthwiseTile>(tile_), relu_);
}

const char* DepthwiseProgram::source() const {
  return std::holds_alternative<ToeplitzTile>(tile_) ? kDepthwiseToeplitzSource : kDepthwiseConvolutionSource;
}

int64_t DepthwiseProgram::threads() const {
  return std::visit([](const auto& tile) -> int64_t { return tile.threads; }, tile_);
}

int64_t DepthwiseProgram::shared_bytes() const {
  return std::visit([](const auto& tile) { return tile.shared_bytes; }, tile_);
}

int64_t DepthwiseProgram::blocks() const {
  return std::visit([](const auto& tile) { return tile.BLOCKS; }, tile_);
}

DepthwiseGrid DepthwiseProgram::grid(int64_t multiprocessors, int64_t resident) const {
  if (const auto* tile = std::get_if<ToeplitzTile>(&tile_))
    return toeplitz_grid(convolution_, *tile, multiprocessors, resident);
  return depthwise_grid(convolution_, std::get<DepthwiseTile>(tile_), multiprocessors, resident);
}

}  // namespace jaxgrad

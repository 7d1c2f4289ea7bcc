#include "cuda/depthwise/toeplitz_tile.h"

#include <algorithm>
#include <array>
#include <utility>

#include "cuda/depthwise/rounding.h"

namespace jaxgrad {
namespace {

constexpr int64_t kMinArchitecture = 90;          // stores of transposed matrices
constexpr int64_t kMinRows = 2, kMinColumns = 4;  // smaller windows have too few products for the transposes
constexpr int64_t kMaxWindow = 33;                // larger ones are not tested
constexpr int64_t kRows = 8;                      // of a step
constexpr int64_t kColumns = 16;                  // of a tile
constexpr int64_t kMaxBlocks = 3;                 // per multiprocessor: more have too few registers
constexpr int64_t kReservedShared = 1024;         // as in convolution_tiling.cc
constexpr int64_t kMaxTiles = 8;
constexpr std::array<int64_t, 2> kChannels = {16, 32};
constexpr std::array<int64_t, 4> kSegments = {1, 2, 4, 8};

double real(int64_t value) { return static_cast<double>(value); }

int64_t nonzero(const DepthwiseConvolution& c) { return ceil_div(c.window[2] + 7, 8); }
int64_t before(const DepthwiseConvolution& c) { return ceil_div(c.window[0] - 1, kRows); }
int64_t blocks_in(const DepthwiseConvolution& c, int64_t tiles) { return 2 * tiles + nonzero(c) - 1; }

int64_t shared_bytes_of(const DepthwiseConvolution& c, const ToeplitzTile& t) {
  const int64_t blocks = blocks_in(c, t.TILES), ring = kRows * (before(c) + 1);
  const int64_t stage = kRows * 8 * blocks * t.CC * 2;
  const int64_t plane = ring * 16 * (blocks | 1) + 16;
  const int64_t weights = c.window[0] * 2 * (8 * nonzero(c) + 8) * 2;
  return stage + t.CC * (plane + weights + 4);
}

bool supports(const DepthwiseConvolution& c) {
  return c.element_bytes() == 2 && c.channels % 8 == 0 && c.in[1] == 1 && c.out[1] == 1 && c.window[1] == 1 &&
         c.padding[1] == 0 && c.stride == DepthwiseConvolution::Axes{1, 1, 1} &&
         c.dilation == DepthwiseConvolution::Axes{1, 1, 1} && c.window[0] >= kMinRows && c.window[0] <= kMaxWindow &&
         c.window[2] >= kMinColumns && c.window[2] <= kMaxWindow;
}

DepthwiseGrid grid_of(const DepthwiseConvolution& c, const ToeplitzTile& t, int64_t blocks, int64_t segments) {
  const auto narrow = [](int64_t value) { return static_cast<int>(value); };
  const int64_t steps = ceil_div(c.out[0], kRows), length = std::max<int64_t>(1, ceil_div(steps, segments));
  DepthwiseGrid grid{};
  DepthwiseArguments& a = grid.arguments;
  a.images = narrow(c.images), a.channels = narrow(c.channels);
  for (int axis = 0; axis < 3; ++axis) {
    a.in[axis] = narrow(c.in[axis]), a.out[axis] = narrow(c.out[axis]);
    // The input gradient is a convolution with the reversed window.
    a.padding[axis] = narrow(c.is_gradient ? c.window[axis] - 1 - c.padding[axis] : c.padding[axis]);
  }
  a.length = narrow(length);
  a.stages = narrow(length + before(c));
  a.tiles[0] = narrow(ceil_div(steps, length)), a.tiles[1] = 1;
  a.tiles[2] = narrow(ceil_div(c.out[2], kColumns * t.TILES));
  a.items = narrow(c.images * a.tiles[0] * a.tiles[2]);
  share(grid, ceil_div(c.channels, t.CC), blocks);
  return grid;
}

DepthwiseGrid fastest_grid(const DepthwiseConvolution& c, const ToeplitzTile& t, int64_t blocks) {
  const auto time = [](const DepthwiseGrid& grid) {  // of the block with the most items, in steps
    return ceil_div(grid.arguments.items, grid.shares) * grid.arguments.stages;
  };
  DepthwiseGrid best = grid_of(c, t, blocks, kSegments[0]);
  for (const int64_t segments : kSegments) {
    const DepthwiseGrid grid = grid_of(c, t, blocks, segments);
    if (time(grid) < time(best)) best = grid;
  }
  return best;
}

// A rough estimate of the time in microseconds on an H100, on which accesses to shared memory bound the kernel: of 128
// bytes in a cycle. A copy or store of a warp takes a cycle for each 128 bytes of memory that it touches.
double estimate(const DepthwiseConvolution& c, const ToeplitzTile& t, int64_t multiprocessors) {
  constexpr double kClock = 1750, kLatency = 1800;  // of a step, in cycles
  constexpr double kAlone = 1.2;                    // one block on a multiprocessor, which often waits for its barriers
  const DepthwiseGrid grid = fastest_grid(c, t, multiprocessors * t.BLOCKS);
  const int64_t blocks = blocks_in(c, t.TILES);
  const int64_t operands = c.window[0] * (blocks + nonzero(c));  // accesses for a channel in a step
  const int64_t transposes = 2 * blocks + 7 * t.TILES;
  const int64_t pixels = kRows * (8 * blocks + kColumns * t.TILES);
  const int64_t resident = std::min(t.BLOCKS, ceil_div(grid.shares * grid.chunks, multiprocessors));
  const int64_t step = resident * (t.CC * (operands + transposes) + pixels);
  const int64_t steps = ceil_div(grid.arguments.items, grid.shares) * grid.arguments.stages;
  return real(steps) * std::max(real(step) * (resident == 1 ? kAlone : 1), kLatency) / kClock + 2;
}

}  // namespace

std::optional<ToeplitzTile> toeplitz_tile(const DepthwiseConvolution& convolution, const Gpu& gpu) {
  if (gpu.architecture < kMinArchitecture || !supports(convolution)) return std::nullopt;
  const DepthwiseConvolution c = with_rounded_sizes(convolution);
  std::optional<ToeplitzTile> best;
  for (const int64_t channels : kChannels)
    for (int64_t tiles = 1; tiles <= std::min(kMaxTiles, std::max<int64_t>(1, ceil_div(c.out[2], kColumns))); ++tiles) {
      if (channels > 16 && channels / 2 >= c.channels) continue;
      ToeplitzTile t{};
      t.CC = channels, t.TILES = tiles;
      t.shared_bytes = shared_bytes_of(c, t);
      if (t.shared_bytes > gpu.shared_bytes) continue;
      t.BLOCKS = std::min(kMaxBlocks, gpu.shared_bytes_in_all / (t.shared_bytes + kReservedShared));
      if (t.BLOCKS == 0) continue;
      t.estimated_us = estimate(c, t, gpu.multiprocessors);
      if (!best || t.estimated_us < best->estimated_us) best = t;
    }
  return best;
}

DepthwiseGrid toeplitz_grid(const DepthwiseConvolution& c, const ToeplitzTile& t, int64_t multiprocessors,
                            int64_t resident) {
  return fastest_grid(c, t, multiprocessors * resident);
}

std::string toeplitz_definitions(const DepthwiseConvolution& c, const ToeplitzTile& t, bool relu) {
  std::string definitions = "#define T Half\n";
  const std::pair<const char*, int64_t> constants[] = {
      {"ELEMENT_IS_BFLOAT16", c.type == FloatType::kBFloat16},
      {"GRADIENT", c.is_gradient},
      {"TAPS_LAST", c.taps_last},
      {"RELU", relu},
      {"K0", c.window[0]},
      {"K2", c.window[2]},
      {"CC", t.CC},
      {"TILES", t.TILES},
      {"BLOCKS", t.BLOCKS},
      {"SHARED_BYTES", t.shared_bytes},
  };
  for (const auto& [name, value] : constants)
    definitions += std::string("#define ") + name + " " + std::to_string(value) + "\n";
  return definitions;
}

}  // namespace jaxgrad

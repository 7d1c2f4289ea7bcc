#include "cuda/depthwise/convolution_tiling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <set>
#include <utility>
#include <vector>

#include "cuda/depthwise/rounding.h"

namespace jaxgrad {
namespace {

constexpr int64_t kSchedulers = 4;              // per multiprocessor
constexpr int64_t kSchedulerRegisters = 512;    // per lane
constexpr int64_t kMaxRegisters = 248;          // per thread
constexpr int64_t kOtherRegisters = 42;         // besides sums, weights, loaded elements and copies
constexpr int64_t kMaxRegisterWeights = 110;    // per thread; more are in shared memory
constexpr int64_t kLoadedAhead = 24;            // elements that the compiler loads ahead, per channel
constexpr int64_t kSharedWeightRegisters = 60;  // that the compiler uses to load weights ahead, per channel
constexpr int64_t kMaxThreads = 512;            // per block
constexpr int64_t kMaxBlocks = 8, kMaxResidentThreads = 2048;  // per multiprocessor, as far as they help
constexpr int64_t kReservedShared = 1024;                      // bytes of shared memory per block that the driver uses
constexpr std::array<int64_t, 3> kSegments = {1, 2, 4};

double real(int64_t value) { return static_cast<double>(value); }

// The number of inputs that `count` results of an axis depend on, as inputs() in the kernel.
int64_t inputs(const DepthwiseConvolution& c, int axis, int64_t count) {
  const int64_t window = c.window[axis], stride = c.stride[axis];
  return c.is_gradient ? ceil_div(window, stride) + (count - 1) / stride : (count - 1) * stride + window;
}
int64_t depth(const DepthwiseConvolution& c) { return ceil_div(c.window[0], c.stride[0]); }
int64_t phases(const DepthwiseConvolution& c) { return c.is_gradient ? c.stride[0] : 1; }
int64_t rows_in(const DepthwiseConvolution& c) { return c.is_gradient ? 1 : c.stride[0]; }

// The elements of a row of a tile in shared memory.
int64_t row_elements(const DepthwiseConvolution& c, const DepthwiseTile& t) {
  return t.TN * inputs(c, 1, t.PATCHES * t.R) * inputs(c, 2, t.STRIPS * t.COLUMNS) * t.CC;
}

// Elements per copy: 16 bytes, or fewer if the channels of a pixel or of a block are no multiple.
int64_t vector_of(const DepthwiseConvolution& c, int64_t block_channels) {
  int64_t vector = 16 / c.element_bytes();
  while (c.channels % vector != 0 || block_channels % vector != 0) vector /= 2;
  return vector;
}

int64_t weight_bytes(const DepthwiseConvolution& c, const DepthwiseTile& t) {
  const int64_t pitch = ceil_div(c.window[2], 4) / 2 * 8 + 4;  // as Weights::PITCH in the kernel
  return t.weights_shared ? c.window[0] * c.window[1] * t.CC * pitch * 4 : 0;
}

DepthwiseGrid grid_of(const DepthwiseConvolution& c, const DepthwiseTile& t, int64_t blocks, int64_t segments) {
  const auto narrow = [](int64_t value) { return static_cast<int>(value); };
  const int64_t steps = ceil_div(c.results(0), phases(c));
  const int64_t length = std::max<int64_t>(1, ceil_div(steps, segments));
  DepthwiseGrid grid{};
  DepthwiseArguments& a = grid.arguments;
  a.images = narrow(c.images), a.channels = narrow(c.channels);
  for (int axis = 0; axis < 3; ++axis) {
    a.in[axis] = narrow(c.in[axis]), a.out[axis] = narrow(c.out[axis]);
    a.padding[axis] = narrow(c.padding[axis]);
  }
  a.length = narrow(length);
  a.stages = narrow(ceil_div(length + depth(c) - 1, t.ROWS));
  const std::array<int64_t, 3> tiles = {ceil_div(steps, length), ceil_div(c.results(1), t.PATCHES * t.R),
                                        ceil_div(c.results(2), t.STRIPS * t.COLUMNS)};
  int64_t items = ceil_div(c.images, t.TN);
  for (int axis = 0; axis < 3; ++axis) a.tiles[axis] = narrow(tiles[axis]), items *= tiles[axis] * c.dilation[axis];
  a.items = narrow(items);
  share(grid, ceil_div(c.channels, t.CC), blocks);
  return grid;
}

// The accesses to shared memory that one load of a warp takes, because of bank conflicts.
int64_t wavefronts(const DepthwiseConvolution& c, const DepthwiseTile& t) {
  const int64_t lanes = t.CC / t.V, bytes = t.V * c.element_bytes();
  const int64_t in1 = inputs(c, 1, t.PATCHES * t.R), in2 = inputs(c, 2, t.STRIPS * t.COLUMNS);
  const auto first = [&](int axis, int64_t result) {
    return c.is_gradient ? result / c.stride[axis] : result * c.stride[axis];
  };
  const auto address = [&](int64_t thread) {
    const int64_t rest = thread / lanes, strip = rest % t.STRIPS, patch = rest / t.STRIPS % t.PATCHES;
    const int64_t pixel =
        (rest / (t.STRIPS * t.PATCHES) * in1 + first(1, patch * t.R)) * in2 + first(2, strip * t.COLUMNS);
    return (pixel * t.CC + thread % lanes * t.V) * c.element_bytes() / 4;
  };
  const int64_t at_once = bytes <= 4 ? 32 : 128 / bytes;
  int64_t found = 0;
  for (int64_t start = 0; start < 32; start += at_once) {
    std::array<std::set<int64_t>, 32> banks;
    for (int64_t thread = start; thread < start + at_once; ++thread)
      for (int64_t word = 0; word < std::max<int64_t>(1, bytes / 4); ++word)
        banks[(address(thread) + word) % 32].insert(address(thread) + word);
    size_t worst = 0;
    for (const auto& bank : banks) worst = std::max(worst, bank.size());
    found += static_cast<int64_t>(worst);
  }
  return found;
}

// What a thread does in one step.
struct Work {
  double products, loads, instructions;
  int64_t copies, registers;
};

Work work_of(const DepthwiseConvolution& c, const DepthwiseTile& t) {
  const bool half = c.element_bytes() == 2;
  const int64_t own1 = inputs(c, 1, t.R), own2 = inputs(c, 2, t.COLUMNS), results = phases(c) * t.R * t.COLUMNS;
  const double parts = c.is_gradient ? real(c.stride[0] * c.stride[1] * c.stride[2]) : 1;
  Work work{};
  work.copies = ceil_div(ceil_div(row_elements(c, t), vector_of(c, t.CC)), t.threads);
  work.products = real(results * t.V * c.taps()) / parts;
  work.loads = real(rows_in(c) * own1 * own2);
  const double weight_loads = t.weights_shared ? real(c.taps() * t.V * t.R) / 4 : 0;
  const double conversions = half ? real(t.V) : 0;
  work.instructions = work.products + work.loads * (1 + conversions) + weight_loads +
                      real(results) * (4 + 0.6 * conversions) + 8 * real(work.copies * rows_in(c)) + 36 / real(t.ROWS);
  const int64_t weights = t.V * (t.weights_shared ? kSharedWeightRegisters : c.taps());
  work.registers = depth(c) * results * t.V + weights + std::min<int64_t>(own1 * own2, kLoadedAhead) * t.V +
                   3 * work.copies + kOtherRegisters;
  return work;
}

// Computes the dependent members of the tile. Returns false if the GPU lacks the resources.
bool complete(const DepthwiseConvolution& c, const Gpu& gpu, const Work& work, DepthwiseTile& t) {
  if (work.registers > kMaxRegisters) return false;
  const int64_t warps = ceil_div(t.threads, 32);
  const int64_t per_scheduler = kSchedulerRegisters / (ceil_div(work.registers, 8) * 8);  // warps
  t.shared_bytes =
      ceil_div(t.STAGES * t.ROWS * rows_in(c) * row_elements(c, t) * c.element_bytes(), 16) * 16 + weight_bytes(c, t);
  if (t.shared_bytes > gpu.shared_bytes) return false;
  t.BLOCKS = std::min({kSchedulers * per_scheduler / warps, kMaxResidentThreads / t.threads, kMaxBlocks,
                       gpu.shared_bytes_in_all / (t.shared_bytes + kReservedShared)});
  return t.BLOCKS > 0;
}

// A rough estimate of the time in microseconds on an H200. Use it only to compare tiles and kernels.
double estimate(const DepthwiseConvolution& c, const Gpu& gpu, const DepthwiseTile& t, const Work& work,
                int64_t segments) {
  const DepthwiseGrid grid = grid_of(c, t, gpu.multiprocessors * t.BLOCKS, segments);
  const double clock = 1750, steps = real(grid.arguments.stages * t.ROWS);
  const int64_t warps = ceil_div(t.threads, 32), bytes = c.element_bytes();
  const int64_t rounds = ceil_div(grid.arguments.items, grid.shares);
  const int64_t resident = ceil_div(grid.shares * grid.chunks, gpu.multiprocessors);
  const double item = steps * work.instructions + 150 + 15 * real(work.copies);
  const double issued = std::min(0.9, 0.25 + 0.08 * real(warps * resident));  // share of the issue slots
  const double issue = real(rounds * ceil_div(resident * warps, kSchedulers)) * item / issued / clock;
  const double weights = t.weights_shared ? real(c.taps() * t.V * 4) * real(inputs(c, 1, t.R)) / real(c.window[1]) : 0;
  const double loaded = std::max(work.loads * real(wavefronts(c, t)),
                                 (work.loads * real(t.V * bytes) + weights) / 4);  // accesses per warp and step
  const double shared = real(rounds * resident * warps) * steps * loaded / clock;
  const double row = real(rows_in(c) * row_elements(c, t) * bytes);
  const double piece = real(t.CC * bytes);                                   // contiguous bytes
  const bool straddles = t.CC < c.channels && c.channels * bytes % 32 != 0;  // the sectors of memory
  const double pieces =
      (1 + 0.04 * std::max(0.0, 128 / piece - 1)) * std::max(1.0, 32 / piece) * (straddles ? (piece + 32) / piece : 1);
  const double copied = real(rounds * grid.shares * grid.chunks) * steps * row / 5.5e6 * pieces;
  const double in_flight = real(resident * (t.STAGES - 1) * t.ROWS) * row;
  const auto volume = [](const DepthwiseConvolution::Axes& sizes) { return real(sizes[0] * sizes[1] * sizes[2]); };
  const double moved = real(c.images * c.channels * bytes) * (volume(c.in) + volume(c.out)) / 4.2e6;
  const double memory = std::max(copied, moved * pieces * std::max(1.0, 20e3 / in_flight));
  return std::cbrt(issue * issue * issue + shared * shared * shared + memory * memory * memory) + 2;
}

// The counts of `part` results that are tried along an axis.
std::set<int64_t> part_counts(int64_t results, int64_t part, std::initializer_list<int64_t> counts) {
  std::set<int64_t> found;
  for (const int64_t count : counts) found.insert(std::min(count, std::max<int64_t>(1, ceil_div(results, part))));
  return found;
}

std::vector<int64_t> block_channels(const DepthwiseConvolution& c, int64_t channels) {
  std::set<int64_t> found;
  for (const int64_t lanes : {8, 16, 24, 32, 48, 64}) {
    const int64_t count = std::min(lanes * channels, ceil_div(c.channels, channels) * channels);
    const int64_t bytes = count * c.element_bytes();
    const bool breaks_vectors = bytes % 16 != 0 && c.channels * c.element_bytes() % 16 == 0;
    if (bytes % 4 == 0 && !breaks_vectors && (bytes >= 32 || count >= c.channels)) found.insert(count);
  }
  return {found.begin(), found.end()};
}

}  // namespace

std::optional<DepthwiseTile> depthwise_tile(const DepthwiseConvolution& convolution, const Gpu& gpu) {
  const DepthwiseConvolution c = with_rounded_sizes(convolution);
  std::optional<DepthwiseTile> best;
  DepthwiseTile t{};
  const bool walks = c.window[0] > 1 || c.out[0] > 1;  // along axis 0
  const int64_t width = c.results(2), height = c.results(1);
  const auto consider = [&] {
    t.threads = t.TN * t.PATCHES * t.STRIPS * (t.CC / t.V);
    if (t.threads > kMaxThreads) return;
    for (const int64_t rows : {1, 2}) {
      t.ROWS = rows;
      if (rows > 1 && (!walks || t.weights_shared)) continue;  // with shared weights, two rows need too many registers
      const Work work = work_of(c, t);
      for (const int64_t stages : {3, 4}) {
        t.STAGES = stages;
        if (!complete(c, gpu, work, t)) continue;
        for (const int64_t segments : kSegments) {
          if (segments > 1 && !walks) continue;
          t.estimated_us = estimate(c, gpu, t, work, segments);
          if (!best || t.estimated_us < best->estimated_us) best = t;
        }
      }
    }
  };
  const auto block = [&] {
    for (const int64_t channels : block_channels(c, t.V))
      for (const int64_t strips : part_counts(width, t.COLUMNS, {1, 2, 4, 7, 8, 14, 16}))
        for (const int64_t patches : part_counts(height, t.R, {1, 2, 4, 7, 8, 14}))
          for (const int64_t images : {1, 2, 4}) {
            t.CC = channels, t.STRIPS = strips, t.PATCHES = patches, t.TN = images;
            if (images == 1 || (images <= c.images && strips * t.COLUMNS >= width && patches * t.R >= height))
              consider();
          }
  };
  for (const int64_t channels : {1, 2, 4, 8})
    for (const int64_t columns : {1, 2, 3, 4, 6, 7, 8, 14, 16, 28, 32})
      for (const int64_t rows : {1, 2, 3, 4}) {
        t.V = channels, t.COLUMNS = columns, t.R = rows;
        t.weights_shared = c.taps() * t.V > kMaxRegisterWeights;
        if (c.channels % channels != 0 || channels * c.element_bytes() > 16) continue;
        if (c.is_gradient && (columns % c.stride[2] != 0 || rows % c.stride[1] != 0)) continue;
        if (columns > std::max({width, c.stride[2], int64_t{1}}) || rows > std::max(height, c.stride[1])) continue;
        block();
      }
  return best;
}

DepthwiseGrid depthwise_grid(const DepthwiseConvolution& c, const DepthwiseTile& t, int64_t multiprocessors,
                             int64_t resident) {
  // The time of the block with the most items, in stages.
  const auto time = [](const DepthwiseGrid& grid) {
    return ceil_div(grid.arguments.items, grid.shares) * grid.arguments.stages;
  };
  DepthwiseGrid best = grid_of(c, t, multiprocessors * resident, 1);
  for (const int64_t segments : kSegments) {
    const DepthwiseGrid grid = grid_of(c, t, multiprocessors * resident, segments);
    if (time(grid) < time(best)) best = grid;
  }
  return best;
}

std::string depthwise_definitions(const DepthwiseConvolution& c, const DepthwiseTile& t, bool relu) {
  std::string definitions = std::string("#define T ") + (c.type == FloatType::kFloat32 ? "float" : "Half") + "\n";
  const auto define = [&](const std::string& name, int64_t value) {
    definitions += "#define " + name + " " + std::to_string(value) + "\n";
  };
  define("ELEMENT_IS_BFLOAT16", c.type == FloatType::kBFloat16);
  define("GRADIENT", c.is_gradient);
  define("TAPS_LAST", c.taps_last);
  define("RELU", relu);
  for (int axis = 0; axis < 3; ++axis) {
    define("K" + std::to_string(axis), c.window[axis]);
    define("S" + std::to_string(axis), c.stride[axis]);
    define("D" + std::to_string(axis), c.dilation[axis]);
  }
  const std::pair<const char*, int64_t> constants[] = {
      {"V", t.V},
      {"R", t.R},
      {"COLUMNS", t.COLUMNS},
      {"TN", t.TN},
      {"PATCHES", t.PATCHES},
      {"STRIPS", t.STRIPS},
      {"CC", t.CC},
      {"ROWS", t.ROWS},
      {"STAGES", t.STAGES},
      {"BLOCKS", t.BLOCKS},
      {"VECTOR", vector_of(c, t.CC)},
      {"WEIGHTS_SHARED", t.weights_shared},
  };
  for (const auto& [name, value] : constants) define(name, value);
  return definitions;
}

}  // namespace jaxgrad

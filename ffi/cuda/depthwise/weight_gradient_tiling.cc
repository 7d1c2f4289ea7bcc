#include "cuda/depthwise/weight_gradient_tiling.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "cuda/depthwise/layout.h"
#include "cuda/depthwise/rounding.h"

namespace jaxgrad {
namespace {

constexpr int64_t kRegisters = 65536;      // per multiprocessor
constexpr int64_t kMaxRegisters = 250;     // per thread
constexpr double kCopyInstructions = 9;    // per copy
constexpr int64_t kOtherRegisters = 20;    // besides the sums and the loaded elements
constexpr int64_t kReservedShared = 1024;  // bytes of shared memory per block that the driver uses

// The number of elements of x that `count` neighboring elements of dy are multiplied with, along one axis.
int64_t x_elements(int64_t count, int64_t stride, int64_t taps, int64_t dilation) {
  std::set<int64_t> offsets;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = 0; k < taps; ++k) offsets.insert(i * stride + k * dilation);
  return static_cast<int64_t>(offsets.size());
}

// The number of elements per copy: 16 bytes, or fewer if the channels of a pixel or of a block are no multiple.
int64_t vector_of(const DepthwiseShape& shape, int64_t block_channels) {
  int64_t vector = 16 / shape.element_bytes();
  while (shape.C % vector != 0 || block_channels % vector != 0) vector /= 2;
  return vector;
}

std::vector<int64_t> block_channels(const DepthwiseShape& shape) {
  std::vector<int64_t> found;
  for (int64_t channels : {16, 32, 48, 64, 96})
    if (channels <= shape.C && (shape.C % channels == 0 || channels == 32)) found.push_back(channels);
  if (shape.C <= 64 && std::find(found.begin(), found.end(), shape.C) == found.end()) found.push_back(shape.C);
  return found;
}

// The numbers of parts of `part` elements that are tried for a tile along an axis of `size` elements.
std::vector<int64_t> part_counts(int64_t size, int64_t part) {
  const int64_t all = ceil_div(size, part);
  std::set<int64_t> found;
  for (int64_t count : {1, 2, 3, 4, 7, 8, 14, 16}) found.insert(std::min<int64_t>(count, all));
  return {found.begin(), found.end()};
}

// The work of one thread for one tile.
struct Work {
  int64_t products, loads, registers;
};

Work work_of(const DepthwiseShape& s, const DepthwiseTiling& t) {
  const int64_t columns = x_elements(t.SUB_W, s.SW, s.KW, s.DW), rows = x_elements(t.SUB_H, s.SH, t.KG, s.DH);
  const int64_t own = t.SUB_H * t.SUB_W;
  return {own * t.KG * s.KW, own + rows * columns,
          own + t.KG * s.KW + std::min<int64_t>(columns, 14) + kOtherRegisters};
}

// The rows and columns of x that a tile of dy needs.
int64_t x_rows(const DepthwiseShape& s, const DepthwiseTiling& t) {
  return (t.TH - 1) * s.SH + (t.GROUPS * t.KG - 1) * s.DH + 1;
}
int64_t x_columns(const DepthwiseShape& s, const DepthwiseTiling& t) {
  return (t.TW - 1) * s.SW + (s.KW - 1) * s.DW + 1;
}

int64_t stage_elements(const DepthwiseShape& s, const DepthwiseTiling& t) {
  return t.TN * (x_rows(s, t) * x_columns(s, t) + t.TH * t.TW) * t.CC;
}

// Divides the tiles of a shape among blocks.
void divide(const DepthwiseShape& s, const Gpu& gpu, DepthwiseTiling& t) {
  t.tiles = ceil_div(s.planes(), t.TN) * ceil_div(s.HO, t.TH) * ceil_div(s.WO, t.TW);
  t.chunks = ceil_div(s.C, t.CC);
  const int64_t most = std::max<int64_t>(1, gpu.multiprocessors * t.BLOCKS / (t.chunks * s.KZ));
  const int64_t rounds = std::max<int64_t>(1, ceil_div(t.tiles, most));
  t.shares = std::max<int64_t>(1, ceil_div(t.tiles, rounds));  // the fewest blocks that need as many rounds
}

// Computes the dependent members of the tiling. Returns false if the GPU lacks the resources.
bool complete(const DepthwiseShape& s, const Gpu& gpu, const Work& work, DepthwiseTiling& t) {
  const int64_t subs = t.TN * (t.TH / t.SUB_H) * (t.TW / t.SUB_W);
  t.threads = subs * t.GROUPS * t.CC;
  if (t.threads < 32 || t.threads > 1024) return false;
  const int64_t warps = ceil_div(t.threads, 32);
  if (work.registers > std::min(kMaxRegisters, kRegisters / (warps * 32 * t.BLOCKS))) return false;
  t.shared_bytes = std::max(t.STAGES * stage_elements(s, t) * s.element_bytes(),
                            subs * t.GROUPS * t.KG * s.KW * t.CC * static_cast<int64_t>(sizeof(float)));
  if (t.shared_bytes > gpu.shared_bytes) return false;
  if ((t.shared_bytes + kReservedShared) * t.BLOCKS > gpu.shared_bytes_in_all) return false;
  divide(s, gpu, t);
  return true;
}

// The number of copies of one thread for a box of a tile; see copy_box() in the kernel.
int64_t copies(const DepthwiseTiling& t, int64_t rows, int64_t columns) {
  const int64_t lanes = columns * t.CC / t.VECTOR, passes = ceil_div(lanes, t.threads);
  return passes * t.TN * ceil_div(rows, passes > 1 ? 1 : t.threads / lanes);
}

// A rough estimate of the time in microseconds on an H200, with coefficients fitted to the times of about 300 tilings
// of 24 shapes. Use it only to compare tilings.
double estimate(const DepthwiseShape& s, const Gpu& gpu, const DepthwiseTiling& t, const Work& work) {
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  const double warps = real(t.threads) / 32, bytes = real(stage_elements(s, t) * s.element_bytes());
  const double load = s.element_bytes() == 2 ? 2.5 : 1;  // instructions
  const double copied = real(copies(t, x_rows(s, t), x_columns(s, t)) + copies(t, t.TH, t.TW));
  const double instructions = real(work.products) + load * real(work.loads) + kCopyInstructions * copied + 35;
  const int64_t rounds = ceil_div(t.tiles, t.shares);
  const int64_t resident = std::min(t.BLOCKS, ceil_div(t.shares * t.chunks * s.KZ, gpu.multiprocessors));  // blocks
  const double issued = std::min(0.98, 0.3 + 0.04 * warps * real(resident));  // share of the issue slots
  const double compute = real(rounds * resident) * warps * instructions / 4 / issued / 1750;
  const double cache = real(t.tiles * t.chunks * s.KZ) * bytes / 6.9e6;
  const double size = real(s.N * (s.Z * s.H * s.W + s.ZO * s.HO * s.WO) * s.C * s.element_bytes());
  const double piece = real(t.CC * s.element_bytes());  // contiguous bytes
  const double pieces = 1 + 0.04 * std::max(0.0, 128 / piece - 1);
  const double memory = size / 5.3e6 * pieces * std::max(1.0, 64e3 / (real((t.STAGES - 1) * resident) * bytes));
  return std::sqrt(compute * compute + cache * cache + memory * memory) + 3;
}

DepthwiseShape with_rounded_sizes(DepthwiseShape s) {
  const auto round = [](int64_t size) { return size <= 64 ? size : rounded_up(size); };
  s.N = rounded_up(std::clamp<int64_t>(s.N, 1, 1024));
  s.Z = round(s.Z), s.H = round(s.H), s.W = round(s.W);
  s.ZO = round(s.ZO), s.HO = round(s.HO), s.WO = round(s.WO);
  return s;
}

bool has_planes_alike(const DepthwiseShape& s) { return s.Z == 1 && s.ZO == 1 && s.KZ == 1; }

}  // namespace

std::optional<DepthwiseShape> depthwise_shape(const ConvProblem& problem, FloatType type, std::string& reason) {
  const auto fail = [&](const char* why) {
    reason = why;
    return std::nullopt;
  };
  const int n = problem.spatial;
  if (problem.pass != ConvPass::kWeightGradient) return fail("it computes weight gradients only");
  if (type == FloatType::kFloat64) return fail("it does not support float64");
  if (problem.groups != problem.x.sizes[1] || problem.w.sizes[0] != problem.groups)
    return fail("the convolution is not depthwise");
  DepthwiseShape s{};
  s.type = type;
  s.N = problem.x.sizes[0];
  s.C = problem.x.sizes[1];
  const int w = n + 1;  // the last spatial axis of an operand
  const auto of = [&](const ConvOperand& operand, int axis) { return axis < 2 ? 1 : operand.sizes[axis]; };
  s.Z = n == 3 ? problem.x.sizes[2] : 1, s.ZO = n == 3 ? problem.y.sizes[2] : 1, s.KZ = n == 3 ? problem.w.sizes[2] : 1;
  s.H = of(problem.x, w - 1), s.W = of(problem.x, w);
  s.HO = of(problem.y, w - 1), s.WO = of(problem.y, w);
  s.KH = of(problem.w, w - 1), s.KW = of(problem.w, w);
  const auto parameter = [&](const auto& values, int from_last, int64_t otherwise) {
    return n > from_last ? values[n - 1 - from_last] : otherwise;
  };
  s.SZ = parameter(problem.window_strides, 2, 1), s.SH = parameter(problem.window_strides, 1, 1);
  s.PZ = parameter(problem.padding_low, 2, 0), s.PH = parameter(problem.padding_low, 1, 0);
  s.DZ = parameter(problem.rhs_dilation, 2, 1), s.DH = parameter(problem.rhs_dilation, 1, 1);
  s.SW = problem.window_strides[n - 1], s.PW = problem.padding_low[n - 1], s.DW = problem.rhs_dilation[n - 1];
  if (!is_channels_last(problem.x, n) || !is_channels_last(problem.y, n))
    return fail("the operands must be channels last");
  s.taps_last = !has_tap_order(problem.w, n, false);
  if (s.taps_last && !has_tap_order(problem.w, n, true))
    return fail("the channels of the weights must come first or last");
  if (s.C * s.element_bytes() % 4 != 0) return fail("the channels of a pixel must be a multiple of 4 bytes");
  constexpr int64_t max = std::numeric_limits<int32_t>::max();
  if (s.H * s.W * s.C > max / 64 || s.N > max || s.HO * s.WO * s.planes() > max || s.N * s.Z > max ||
      s.taps() * s.C > max / 4096)
    return fail("the arrays are too large for 32-bit indices");
  for (const int64_t value : {s.SZ, s.SH, s.SW, s.DZ, s.DH, s.DW, s.PZ, s.PH, s.PW})
    if (value > max / 4096 || value < -max / 4096) return fail("the strides, dilation or padding are too large");
  return s;
}

std::optional<DepthwiseTiling> depthwise_tiling(const DepthwiseShape& exact, const Gpu& gpu) {
  const DepthwiseShape shape = with_rounded_sizes(exact);
  std::optional<DepthwiseTiling> best;
  double best_time = std::numeric_limits<double>::max();
  DepthwiseTiling t{};
  const auto consider = [&](const Work& work) {
    if (!complete(shape, gpu, work, t)) return;
    const double time = estimate(shape, gpu, t, work);
    if (time < best_time) best = t, best_time = time;
  };
  const auto tiles = [&](const Work& work) {
    for (const int64_t rows : part_counts(shape.HO, t.SUB_H))
      for (const int64_t columns : part_counts(shape.WO, t.SUB_W))
        for (const int64_t images : {1, 2, 4}) {
          t.TH = rows * t.SUB_H, t.TW = columns * t.SUB_W, t.TN = images;
          if (images > 1 && (images > shape.planes() || t.TH < shape.HO || t.TW < shape.WO)) continue;
          for (const int64_t channels : block_channels(shape)) {
            t.CC = channels, t.VECTOR = vector_of(shape, channels);
            for (const int64_t stages : {2, 3})
              for (const int64_t blocks : {1, 2, 3, 4}) {
                t.STAGES = stages, t.BLOCKS = blocks;
                consider(work);
              }
          }
        }
  };
  std::set<int64_t> seen;
  for (t.GROUPS = 1; t.GROUPS <= shape.KH; ++t.GROUPS) {
    t.KG = ceil_div(shape.KH, t.GROUPS);
    if (!seen.insert(t.KG).second) continue;  // as many rows per group as with fewer groups
    for (const int64_t sub_h : {1, 2, 3, 4, 7, 8})
      for (const int64_t sub_w : {1, 2, 4, 7, 8, 14}) {
        t.SUB_H = sub_h, t.SUB_W = sub_w;
        if (sub_h > shape.HO || (sub_w > shape.WO && sub_w > 4)) continue;
        const Work work = work_of(shape, t);
        if (work.registers <= kMaxRegisters) tiles(work);
      }
  }
  if (best) divide(exact, gpu, *best);
  return best;
}

DepthwiseGradientArguments depthwise_arguments(const DepthwiseShape& s, const DepthwiseTiling& t) {
  const auto narrow = [](int64_t value) { return static_cast<int>(value); };
  return {narrow(s.planes()),
          narrow(s.C),
          {narrow(s.Z), narrow(s.H), narrow(s.W)},
          {narrow(s.ZO), narrow(s.HO), narrow(s.WO)},
          {narrow(s.PZ), narrow(s.PH), narrow(s.PW)},
          narrow(t.tiles),
          narrow(ceil_div(s.HO, t.TH)),
          narrow(ceil_div(s.WO, t.TW))};
}

std::string depthwise_definitions(const DepthwiseShape& s, const DepthwiseTiling& t) {
  const std::pair<const char*, int64_t> numbers[] = {
      {"ELEMENT_IS_BFLOAT16", s.type == FloatType::kBFloat16},
      {"TAPS_LAST", s.taps_last},
      {"SLICES", kDepthwiseSumSlices},
      {"PLANES_ALIKE", has_planes_alike(s)},
      {"WHOLE_TILES", s.planes() % t.TN == 0},
      {"WHOLE_BLOCKS", s.C % t.CC == 0},
      {"KZ", s.KZ},
      {"KH", s.KH},
      {"KW", s.KW},
      {"SZ", s.SZ},
      {"DZ", s.DZ},
      {"SH", s.SH},
      {"SW", s.SW},
      {"DH", s.DH},
      {"DW", s.DW},
      {"SUB_H", t.SUB_H},
      {"SUB_W", t.SUB_W},
      {"TN", t.TN},
      {"TH", t.TH},
      {"TW", t.TW},
      {"CC", t.CC},
      {"GROUPS", t.GROUPS},
      {"KG", t.KG},
      {"STAGES", t.STAGES},
      {"BLOCKS", t.BLOCKS},
      {"VECTOR", t.VECTOR},
  };
  std::string definitions = std::string("#define T ") + (s.type == FloatType::kFloat32 ? "float" : "Half") + "\n";
  for (const auto& [name, value] : numbers)
    definitions += std::string("#define ") + name + " " + std::to_string(value) + "\n";
  return definitions;
}

}  // namespace jaxgrad

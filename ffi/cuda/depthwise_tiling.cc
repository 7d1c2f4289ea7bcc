#include "depthwise_tiling.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <set>
#include <vector>

#include "kernel_sources.h"

namespace jaxgrad {
namespace {

constexpr int64_t kRegisters = 65536;      // of a multiprocessor
constexpr int64_t kMostRegisters = 250;    // of a thread
constexpr int64_t kOtherRegisters = 26;    // beside the sums and the elements at hand
constexpr int64_t kReservedShared = 1024;  // bytes of each block's shared memory that the driver takes

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many places of x `count` neighbouring elements of dy meet along an axis.
int64_t places(int64_t count, int64_t stride, int64_t taps, int64_t dilation) {
  std::set<int64_t> met;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = 0; k < taps; ++k) met.insert(i * stride + k * dilation);
  return static_cast<int64_t>(met.size());
}

// Elements of one copy of 16 bytes, or fewer where channels or a block's share of them do not divide so.
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

// The counts of parts of `part` elements that a tile may have along an axis of `size`: few, some, or all there are.
std::vector<int64_t> part_counts(int64_t size, int64_t part) {
  const int64_t all = ceil_div(size, part);
  std::set<int64_t> found;
  for (int64_t count : {1, 2, 3, 4, 7, 8, 14, 16}) found.insert(std::min<int64_t>(count, all));
  return {found.begin(), found.end()};
}

// What one thread does for one tile.
struct Work {
  int64_t products, loads, registers;
};

Work work_of(const DepthwiseShape& s, const DepthwiseTiling& t) {
  const int64_t columns = places(t.SUB_W, s.SW, s.KW, s.DW), rows = places(t.SUB_H, s.SH, t.KG, s.DH);
  const int64_t own = t.SUB_H * t.SUB_W;
  return {own * t.KG * s.KW, own + rows * columns,
          own + t.KG * s.KW + std::min<int64_t>(columns, 14) + kOtherRegisters};
}

int64_t stage_elements(const DepthwiseShape& s, const DepthwiseTiling& t) {
  const int64_t x_rows = (t.TH - 1) * s.SH + (t.GROUPS * t.KG - 1) * s.DH + 1;
  const int64_t x_columns = (t.TW - 1) * s.SW + (s.KW - 1) * s.DW + 1;
  return t.TN * (x_rows * x_columns + t.TH * t.TW) * t.CC;
}

// Fills in what follows from the rest; false where the GPU has no room for it.
bool complete(const DepthwiseShape& s, const Gpu& gpu, const Work& work, DepthwiseTiling& t) {
  const int64_t subs = t.TN * (t.TH / t.SUB_H) * (t.TW / t.SUB_W);
  t.threads = subs * t.GROUPS * t.CC;
  if (t.threads < 32 || t.threads > 1024) return false;
  const int64_t warps = ceil_div(t.threads, 32);
  if (work.registers > std::min(kMostRegisters, kRegisters / (warps * 32 * t.BLOCKS))) return false;
  t.shared_bytes = std::max(t.STAGES * stage_elements(s, t) * s.element_bytes(),
                            subs * t.GROUPS * t.KG * s.KW * t.CC * static_cast<int64_t>(sizeof(float)));
  if (t.shared_bytes > gpu.shared_bytes) return false;
  if ((t.shared_bytes + kReservedShared) * t.BLOCKS > gpu.shared_bytes_in_all) return false;
  t.tiles = ceil_div(s.N, t.TN) * ceil_div(s.HO, t.TH) * ceil_div(s.WO, t.TW);
  t.chunks = ceil_div(s.C, t.CC);
  const int64_t most = std::clamp<int64_t>(gpu.multiprocessors * t.BLOCKS / t.chunks, 1, t.tiles);
  t.shares = ceil_div(t.tiles, ceil_div(t.tiles, most));  // no more than it takes to have as few rounds
  return true;
}

// Microseconds, roughly: what an H200 takes. Of use to compare tilings with, and for nothing else.
double estimate(const DepthwiseShape& s, const Gpu& gpu, const DepthwiseTiling& t, const Work& work) {
  const double warps = static_cast<double>(t.threads) / 32, resident = warps * static_cast<double>(t.BLOCKS);
  const double elements = static_cast<double>(stage_elements(s, t)), bytes = static_cast<double>(s.element_bytes());
  const double copies = elements / static_cast<double>(t.VECTOR * t.threads);
  const double instructions =
      static_cast<double>(work.products + work.loads * (s.element_bytes() == 2 ? 2 : 1)) + 16 * copies + 40;
  const double busy = std::min(0.9, 0.35 + 0.035 * resident);
  const double cycles = warps * std::max(instructions / 4 / busy, 1.1 * static_cast<double>(work.loads));
  const double rounds = static_cast<double>(ceil_div(t.tiles * t.chunks, gpu.multiprocessors));
  const double compute = rounds * cycles / 1750;
  const double cache = static_cast<double>(t.tiles * t.chunks) * elements * bytes / 5.5e6;
  const double in_flight = static_cast<double>((t.STAGES - 1) * t.BLOCKS) * elements * bytes;
  const double size = static_cast<double>(s.N * (s.H * s.W + s.HO * s.WO) * s.C) * bytes;
  const double memory = size / 4e6 * std::max(1.0, 40e3 / in_flight);
  return std::max({compute, cache, memory}) + 0.2 * (compute + cache + memory);
}

}  // namespace

std::optional<DepthwiseShape> depthwise_shape(const ConvShape& call, ConvType type, std::string& reason) {
  const auto fail = [&](const char* why) {
    reason = why;
    return std::nullopt;
  };
  const int n = call.spatial;
  if (call.kind != ConvKind::kBackwardFilter) return fail("it computes weight gradients alone");
  if (type == ConvType::kFloat64) return fail("it has no float64");
  if (call.groups != call.x.sizes[1] || call.w.sizes[0] != call.groups) return fail("it is for depthwise convolutions");
  if (n > 2) return fail("it takes one or two spatial axes");
  DepthwiseShape s{};
  s.type = type;
  s.N = call.x.sizes[0];
  s.C = call.x.sizes[1];
  const int w = n + 1;  // of the last spatial axis among an operand's
  const auto of = [&](const ConvOperand& operand, int axis) { return axis < 2 ? 1 : operand.sizes[axis]; };
  s.H = of(call.x, w - 1), s.W = of(call.x, w);
  s.HO = of(call.y, w - 1), s.WO = of(call.y, w);
  s.KH = of(call.w, w - 1), s.KW = of(call.w, w);
  s.SH = n == 2 ? call.window_strides[0] : 1, s.SW = call.window_strides[n - 1];
  s.PH = n == 2 ? call.padding_low[0] : 0, s.PW = call.padding_low[n - 1];
  s.DH = n == 2 ? call.rhs_dilation[0] : 1, s.DW = call.rhs_dilation[n - 1];
  const auto channels_last = [&](const ConvOperand& operand, int64_t height, int64_t width) {
    return operand.strides[1] == 1 && operand.strides[w] == s.C && (n == 1 || operand.strides[2] == width * s.C) &&
           operand.strides[0] == height * width * s.C;
  };
  if (!channels_last(call.x, s.H, s.W) || !channels_last(call.y, s.HO, s.WO))
    return fail("it takes channels-last operands");
  s.taps_last = call.w.strides[w] == 1;
  const int64_t column = s.taps_last ? 1 : s.C, channel = s.taps_last ? s.taps() : 1;
  if (call.w.strides[w] != column || call.w.strides[0] != channel || (n == 2 && call.w.strides[2] != s.KW * column))
    return fail("it takes weights whose channels stand first or last");
  if (s.C * s.element_bytes() % 4 != 0) return fail("it copies 4 bytes or more at a time");
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (s.H * s.W * s.C > most / 64 || s.N > most || s.HO * s.WO * s.N > most || s.taps() * s.C > most / 4096)
    return fail("it counts in 32 bits");
  return s;
}

std::optional<DepthwiseTiling> depthwise_tiling(const DepthwiseShape& shape, const Gpu& gpu) {
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
          if (images > 1 && (images > shape.N || t.TH < shape.HO || t.TW < shape.WO)) continue;
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
    if (!seen.insert(t.KG).second) continue;  // the same rows to each as with fewer groups
    for (const int64_t sub_h : {1, 2, 3, 4, 7, 8})
      for (const int64_t sub_w : {1, 2, 4, 7, 8, 14}) {
        t.SUB_H = sub_h, t.SUB_W = sub_w;
        if (sub_h > shape.HO || (sub_w > shape.WO && sub_w > 4)) continue;
        const Work work = work_of(shape, t);
        if (work.registers <= kMostRegisters) tiles(work);
      }
  }
  return best;
}

std::string depthwise_source(const DepthwiseShape& s, const DepthwiseTiling& t) {
  std::string source;
  const auto define = [&](const char* name, const auto& value) {
    source += std::string("#define ") + name + " ";
    if constexpr (std::is_convertible_v<decltype(value), int64_t>) {
      source += std::to_string(value);
    } else {
      source += value;
    }
    source += "\n";
  };
  define("T", s.type == ConvType::kFloat32 ? "float" : "Half");
  define("ELEMENT_IS_BFLOAT16", static_cast<int64_t>(s.type == ConvType::kBFloat16));
  define("TAPS_LAST", static_cast<int64_t>(s.taps_last));
  define("SLICES", kDepthwiseSumSlices);
#define JAXGRAD_DEFINE(from, name) define(#name, from.name);
#define JAXGRAD_OF_SHAPE(name) JAXGRAD_DEFINE(s, name)
#define JAXGRAD_OF_TILING(name) JAXGRAD_DEFINE(t, name)
  JAXGRAD_OF_SHAPE(N)
      JAXGRAD_OF_SHAPE(H) JAXGRAD_OF_SHAPE(W) JAXGRAD_OF_SHAPE(C) JAXGRAD_OF_SHAPE(HO) JAXGRAD_OF_SHAPE(WO)
          JAXGRAD_OF_SHAPE(KH) JAXGRAD_OF_SHAPE(KW) JAXGRAD_OF_SHAPE(SH) JAXGRAD_OF_SHAPE(SW) JAXGRAD_OF_SHAPE(PH)
              JAXGRAD_OF_SHAPE(PW) JAXGRAD_OF_SHAPE(DH) JAXGRAD_OF_SHAPE(DW) JAXGRAD_OF_TILING(SUB_H)
                  JAXGRAD_OF_TILING(SUB_W) JAXGRAD_OF_TILING(TN) JAXGRAD_OF_TILING(TH) JAXGRAD_OF_TILING(TW)
                      JAXGRAD_OF_TILING(CC) JAXGRAD_OF_TILING(GROUPS) JAXGRAD_OF_TILING(KG) JAXGRAD_OF_TILING(STAGES)
                          JAXGRAD_OF_TILING(BLOCKS) JAXGRAD_OF_TILING(VECTOR) return source +
      kDeviceSource + kDepthwiseFilterSource;
}

}  // namespace jaxgrad

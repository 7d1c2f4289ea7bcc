#include "cuda/norm/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "cuda/norm/columns_backward_source.h"
#include "cuda/norm/columns_forward_source.h"
#include "cuda/norm/rows_backward_source.h"
#include "cuda/norm/rows_forward_source.h"
#include "cuda/runtime/no_plan.h"

namespace jaxgrad {
namespace {

constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max();  // the kernels use 32-bit indices
constexpr int64_t kItemBytes = 16;
constexpr int64_t kColumnThreads = 512, kRowThreads = 512;
constexpr int64_t kHeldForward = 16, kHeldBackward = 6;  // items in the registers of a thread
constexpr int64_t kFewItems = 8;                         // that stay there
constexpr int64_t kItemsAtOnce = 8;                      // of a thread that keeps none

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
int64_t aligned(int64_t bytes) { return divide_up(bytes, 256) * 256; }

bool is_backward(const NormKey& key) { return key.pass == NormPass::kBackward; }

bool writes_result(const NormKey& key) { return is_backward(key) ? key.needs_dx : key.pass != NormPass::kStatistics; }

// How many arrays of the size of x a pass reads, and how many it writes.
int64_t arrays_read(const NormKey& key) {
  if (is_backward(key)) return 2 + (key.third != NormThird::kNone);
  return 1 + key.residual;
}
int64_t arrays_written(const NormKey& key) { return writes_result(key) + (is_backward(key) && key.residual); }

std::string definitions_of(const NormKey& key, int64_t vector, int64_t threads, int64_t blocks) {
  std::string text;
  const auto define = [&](const char* name, const std::string& value) {
    text += std::string("#define ") + name + " " + value + "\n";
  };
  const auto number = [&](const char* name, int64_t value) { define(name, std::to_string(value)); };
  number("ELEMENT_IS_BFLOAT16", key.type == FloatType::kBFloat16);
  define("ELEMENT", key.type == FloatType::kFloat32 ? "float" : "Half");
  number("VECTOR", vector);
  number("THREADS", threads);
  number("BLOCKS", blocks);
  number("ACTIVATION", static_cast<int64_t>(key.activation));
  number("CENTERED", key.centered);
  number("FROZEN", key.frozen);
  number("RESIDUAL", key.residual);
  number("THIRD", static_cast<int64_t>(key.third));
  number("SUMS", is_backward(key) ? key.needs_sums : key.pass != NormPass::kNormalize);
  number("RESULT", writes_result(key));
  return text;
}

// Statistics over columns.

// How a problem is divided; see columns.cuh.
struct Tiling {
  int64_t width, blocks, teams;
};

struct ColumnPlan {
  const NormKey& key;
  const NormGpu& gpu;
  bool channels_last;
  int64_t vector, bytes, group, rows, held, items_of_row;

  ColumnPlan(const NormKey& key, const NormGpu& gpu) : key(key), gpu(gpu) {
    const NormShape& s = key.shape;
    bytes = bytes_of(key.type);
    channels_last = s.I == 1;
    vector = kItemBytes / bytes;
    while ((channels_last ? s.C : s.I) % vector != 0) vector /= 2;
    group = s.group_channels();
    rows = channels_last ? s.O : s.O * (s.I / vector);
    held = is_backward(key) ? kHeldBackward : kHeldForward;
    items_of_row = is_backward(key) ? 2 : 1;
  }

  bool keeps_items() const {
    if (key.pass == NormPass::kForward) return true;
    return is_backward(key) && key.needs_dx && !key.frozen;
  }
  bool exchanges() const {
    if (is_backward(key)) return key.needs_sums || keeps_items();
    return key.pass != NormPass::kNormalize;
  }

  int64_t columns(int64_t width) const { return channels_last ? width / vector : width; }
  int64_t lanes(int64_t width) const { return kColumnThreads / columns(width); }
  int64_t chunks(int64_t width) const { return divide_up(key.shape.C, width); }
  int64_t problems(int64_t width) const { return key.shape.S * chunks(width); }
  int64_t items(const Tiling& t) const { return divide_up(divide_up(rows, t.blocks), lanes(t.width)); }

  // Floats of shared memory for pairs of sums: of the warps or threads that share a channel (see sum_over_block), or of
  // the blocks (see sum_rows).
  int64_t floats_of_sums(int64_t width) const {
    const int64_t rows_of_sums = channels_last && 32 % columns(width) == 0 ? kColumnThreads / 32 : lanes(width);
    return 2 * std::max({rows_of_sums * width, kColumnThreads, width});
  }
  // Shared memory without stored items.
  int64_t scratch_bytes(int64_t width) const { return 4 * (floats_of_sums(width) + kNormChannelValues * width); }
  int64_t stored_bytes() const { return kColumnThreads * std::max<int64_t>(4, vector * bytes) * items_of_row; }
  // Items of a thread for which shared memory has room.
  int64_t room(int64_t width) const {
    return std::max<int64_t>(0, (gpu.shared_bytes - scratch_bytes(width)) / stored_bytes());
  }
  int64_t stored(const Tiling& t) const {
    return keeps_items() ? std::clamp<int64_t>(items(t) - held, 0, room(t.width)) : 0;
  }

  bool fits(int64_t width) const {
    return columns(width) <= kColumnThreads && scratch_bytes(width) <= gpu.shared_bytes;
  }

  // Estimated microseconds, with numbers that were fitted to 46 sweeps over tilings on an H200. In 44 of them the
  // tiling of the least cost takes at most 5 % longer than the fastest, in the others 8 and 15 %.
  double cost(const Tiling& t) const {
    constexpr double kBytesOfBlock = 29e3, kBytesOfGpu = 3.5e6;  // in a microsecond, that move
    constexpr double kRound = 3.5, kExchange = 2.8, kOfBlockAndChannel = 0.018 / 64;
    constexpr double kReadAgain = 0.86;  // the L2 cache has a part
    const auto real = [](int64_t value) { return static_cast<double>(value); };
    double passes = real(arrays_read(key) + arrays_written(key));
    if (keeps_items()) {
      const double again = std::max(0.0, 1 - real(held + stored(t)) / real(items(t)));
      passes += kReadAgain * again * real(is_backward(key) ? arrays_read(key) : 1);
    }
    const int64_t run = (channels_last ? t.width : lanes(t.width) * vector) * bytes;  // neighboring bytes
    double efficiency = run >= 128 ? 1 : run >= 64 ? 0.89 : run >= 32 ? 0.45 : 0.25;
    if (channels_last && t.width < key.shape.C && run % 128 != 0 && run > 64) efficiency *= 0.87;  // lines in two parts
    const double used = real(columns(t.width) * lanes(t.width)) / real(kColumnThreads);
    const double rate = std::min(kBytesOfBlock * (0.17 + 0.83 * used), kBytesOfGpu / real(t.teams * t.blocks));
    const double moved = real(divide_up(rows, t.blocks) * t.width * (channels_last ? 1 : vector) * bytes) * passes;
    const double exchange = t.blocks == 1 ? 0 : kExchange + kOfBlockAndChannel * real(t.blocks * t.width);
    return real(divide_up(problems(t.width), t.teams)) * (moved / (rate * efficiency) + kRound + exchange);
  }

  Tiling best() const {
    const int64_t unit = channels_last ? std::lcm(vector, group) : group;
    const int64_t most = divide_up(key.shape.C, unit);
    Tiling found{};
    double least = std::numeric_limits<double>::infinity();
    for (int64_t n = 1; n <= most; ++n) {
      const int64_t width = n * unit;
      if (!fits(width)) break;
      if (n > 1 && chunks(width) == chunks(width - unit)) continue;  // as many problems as before, of more channels
      for (int64_t blocks = 1; blocks <= std::min(gpu.multiprocessors, rows); ++blocks) {
        const Tiling tiling{width, blocks, std::min(problems(width), gpu.multiprocessors / blocks)};
        const double time = cost(tiling);
        if (time < least) {
          least = time;
          found = tiling;
        }
      }
    }
    if (found.width == 0)
      throw NoPlan("the normalization kernels take groups of fewer channels than " + std::to_string(group));
    return found;
  }

  // Without an exchange each block computes a part of a problem, a few items of each thread. A problem may have parts
  // of groups.
  Tiling elementwise() const {
    const int64_t unit = channels_last ? vector : 1, most = channels_last ? 32 * vector : kColumnThreads / 32;
    Tiling found{};
    found.width = std::min(divide_up(key.shape.C, unit) * unit, most);
    found.blocks = std::max<int64_t>(1, divide_up(rows, lanes(found.width) * kItemsAtOnce));
    found.teams = problems(found.width);
    return found;
  }

  NormProgram program() const {
    const NormShape& s = key.shape;
    const Tiling t = exchanges() ? best() : elementwise();
    // Few items stay in registers. Of more, as many as it has room for are in shared memory: the kernel is shorter.
    int64_t kept = stored(t), in_registers = held;
    const bool rereads = !keeps_items() || items(t) > held + kept;
    if (!rereads) {
      const int64_t least = items(t) <= std::min(held, kFewItems) ? items(t) : items(t) - room(t.width);
      while (in_registers > 1 && in_registers / 2 >= least) in_registers /= 2;
      kept = std::max<int64_t>(0, items(t) - in_registers);
    }
    NormProgram p;
    p.has_columns = true;
    p.definitions = definitions_of(key, vector, kColumnThreads, 1) + "#define CHANNELS_LAST " +
                    std::to_string(channels_last) + "\n#define HELD " + std::to_string(in_registers) +
                    "\n#define STORES " + std::to_string(kept > 0) + "\n#define REREADS " + std::to_string(rereads) +
                    "\n#define EXCHANGES " + std::to_string(exchanges()) + "\n";
    p.source = is_backward(key) ? kNormColumnsBackwardSource : kNormColumnsForwardSource;
    p.kernel = is_backward(key) ? "norm_columns_backward" : "norm_columns_forward";
    p.threads = kColumnThreads;
    p.blocks = t.teams * t.blocks;
    p.shared_bytes = scratch_bytes(t.width) + kept * stored_bytes();
    NormColumns& a = p.columns;
    const auto set = [](unsigned& member, int64_t value) { member = static_cast<unsigned>(value); };
    set(a.rows, rows);
    set(a.channels, s.C);
    set(a.groups, s.G);
    a.group = divisor(static_cast<unsigned>(group));
    set(a.width, t.width);
    set(a.chunks, chunks(t.width));
    set(a.problems, problems(t.width));
    set(a.teams, t.teams);
    set(a.blocks, t.blocks);
    set(a.samples, s.call_samples());
    set(a.stored, kept);
    set(a.floats_of_sums, floats_of_sums(t.width));
    set(a.stride, s.C);
    a.inner = divisor(static_cast<unsigned>(channels_last ? 1 : s.I / vector));
    a.count = static_cast<float>(s.O * s.I);
    if (!exchanges()) return p;
    const bool over_samples = is_backward(key) && key.needs_sums && a.samples > 1;
    p.cooperative = t.blocks > 1 || over_samples;
    p.sums = t.blocks > 1 ? aligned(8 * problems(t.width) * t.blocks * t.width) : 0;
    p.flags = p.sums + (over_samples ? aligned(8 * s.S * s.C) : 0);
    p.workspace_bytes = p.flags + 8 * (t.teams * (t.blocks + 1) + (over_samples ? problems(t.width) : 0));
    return p;
  }
};

// Statistics over rows.

struct RowPlan {
  static constexpr int64_t kStages = 2;  // more are not faster
  static constexpr int64_t kMaxLanes = 1024;
  static constexpr int64_t kKept = 16;  // elements of a row in a thread whose scale and bias it keeps
  static constexpr int64_t kMaxForward = 64;

  const NormKey& key;
  const NormGpu& gpu;
  int64_t stages = kStages, vector = 0, lanes = 0, items = 0;

  RowPlan(const NormKey& key, const NormGpu& gpu) : key(key), gpu(gpu) {
    for (int64_t most = kKept; most <= (is_backward(key) ? kKept : kMaxForward); most *= 4)
      for (stages = kStages; stages > 0; --stages)
        if (choose(most)) return;
    throw NoPlan("rows of " + std::to_string(key.shape.C) +
                 " elements do not fit the shared memory that the normalization kernels need");
  }

  // Chooses the lanes of a row, each of which has at most `most` elements. The factors are from sweeps over widths of
  // 32 to 4096 on an H200.
  bool choose(int64_t most) {
    const int64_t width = key.shape.C, bytes = bytes_of(key.type);
    double best = 0;
    for (const int64_t bytes_of_item : {kItemBytes, kItemBytes / 2}) {
      int64_t tried_vector = bytes_of_item / bytes;
      while (width % tried_vector != 0) tried_vector /= 2;
      const int64_t count = width / tried_vector;
      for (int64_t tried = 1; tried <= kMaxLanes; tried += tried < 32 ? tried : 32) {
        const int64_t each = divide_up(count, tried), elements = each * tried_vector;
        if (elements > most || ring_bytes(tried, each, tried_vector) > gpu.shared_bytes - kStaticBytes) continue;
        const double used = static_cast<double>(count) / static_cast<double>(tried * each);
        const double share = static_cast<double>(std::min(elements, kKept)) / kKept;
        const bool is_narrow = tried < count && tried * tried_vector * bytes < 64;  // runs of memory
        const double score =
            used * std::sqrt(std::sqrt(share)) * (bytes_of_item < kItemBytes ? 0.9 : 1) * (is_narrow ? 0.8 : 1);
        if (score <= best) continue;
        best = score, vector = tried_vector, lanes = tried, items = each;
      }
    }
    return best > 0;
  }

  static constexpr int64_t kStaticBytes = 9 << 10;  // of shared memory: at most 272 for each warp

  static int64_t threads(int64_t lanes) { return lanes * std::max<int64_t>(1, kRowThreads / lanes); }
  int64_t ring_bytes(int64_t lanes, int64_t items, int64_t vector) const {
    return stages * arrays_read(key) * items * threads(lanes) * std::max<int64_t>(4, vector * bytes_of(key.type));
  }

  NormProgram program() const {
    const NormShape& s = key.shape;
    NormProgram p;
    p.has_columns = false;
    p.threads = threads(lanes);
    const int64_t rows_of_block = p.threads / lanes, rows = s.call_samples();
    const int64_t left = lanes < 32 ? p.threads / 32 : rows_of_block;  // see sum_over_rows
    p.shared_bytes = ring_bytes(lanes, items, vector);
    if (is_backward(key) && left > 1) p.shared_bytes = std::max(p.shared_bytes, 8 * left * s.C);
    const int64_t room = gpu.shared_bytes / (p.shared_bytes + kStaticBytes);
    const int64_t resident = std::clamp<int64_t>(std::min((is_backward(key) ? 512 : 1024) / p.threads, room), 1, 2);
    const int64_t at_once = std::max<int64_t>(1, resident * gpu.multiprocessors / s.K);
    const int64_t blocks = std::min(divide_up(rows, rows_of_block), at_once);
    int64_t columns = 4;  // at a time, of the last sums
    while (columns < 32 && columns * blocks < s.C) columns *= 2;
    p.definitions = definitions_of(key, vector, p.threads, resident) + "#define LANES " + std::to_string(lanes) +
                    "\n#define VECTORS " + std::to_string(items) + "\n#define STAGES " + std::to_string(stages) +
                    "\n#define COLUMNS " + std::to_string(columns) + "\n";
    p.source = is_backward(key) ? kNormRowsBackwardSource : kNormRowsForwardSource;
    p.kernel = is_backward(key) ? "norm_rows_backward" : "norm_rows_forward";
    p.blocks = s.K * blocks;
    NormRows& a = p.rows;
    a.calls = static_cast<unsigned>(s.K);
    a.rows = static_cast<unsigned>(rows);
    a.blocks = static_cast<unsigned>(blocks);
    a.width = static_cast<unsigned>(s.C);
    if (!is_backward(key) || !key.needs_sums) return p;
    p.cooperative = blocks > 1;
    p.sums = p.flags = aligned(8 * p.blocks * s.C);
    p.workspace_bytes = p.flags + 8 * s.K * (blocks + 1);
    return p;
  }
};

}  // namespace

NormProgram norm_program(const NormKey& key, const NormGpu& gpu) {
  const NormShape& s = key.shape;
  if (key.type == FloatType::kFloat64) throw NoPlan("the normalization kernels do not compute float64");
  if (s.elements() == 0) throw NoPlan("the normalization kernels take no empty arrays");
  if (s.elements() > kMaxElements) throw NoPlan("the normalization kernels take arrays of fewer than 2^31 elements");
  const bool has_rows = s.O == 1 && s.I == 1 && s.G == 1 && s.C > 1 && !key.frozen;
  const bool whole = key.pass == NormPass::kForward || is_backward(key);
  return has_rows && whole ? RowPlan(key, gpu).program() : ColumnPlan(key, gpu).program();
}

}  // namespace jaxgrad

#include "cuda/gru/op.h"

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gru/block_backward_source.h"
#include "cuda/gru/block_forward_source.h"
#include "cuda/gru/cluster_backward_source.h"
#include "cuda/gru/cluster_forward_source.h"
#include "cuda/gru/instructions_source.h"
#include "cuda/gru/team_backward_source.h"
#include "cuda/gru/team_forward_source.h"
#include "cuda/gru/tensor_block_backward_source.h"
#include "cuda/gru/tensor_block_forward_source.h"
#include "cuda/runtime/device_caches.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/module.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {

namespace {

int blocks_of(const GruVariant& variant) {  // of a holder
  return variant.holder == GruHolder::kBlock ? 1 : variant.padded / variant.units;
}

bool fills_registers(const GruVariant& variant) {
  return variant.holder == GruHolder::kBlock && gru_block_fills_registers(variant.padded);
}

// A launch of a variant. The blocks of a cluster run at once, and so do all blocks of teams, or the launch fails.
struct Launch {
  std::array<CUlaunchAttribute, 2> attributes{};
  CUlaunchConfig config{};

  Launch(const GruVariant& variant, CUstream stream) {
    const int in_cluster = variant.holder == GruHolder::kCluster ? blocks_of(variant) : variant.pair;
    const auto add = [&]() -> CUlaunchAttribute& { return attributes[config.numAttrs++]; };
    if (in_cluster > 1) {
      CUlaunchAttribute& cluster = add();
      cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      cluster.value.clusterDim.x = static_cast<unsigned>(in_cluster);
      cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
    }
    if (variant.holder == GruHolder::kTeam) {
      CUlaunchAttribute& cooperative = add();
      cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      cooperative.value.cooperative = 1;
    }
    config.gridDimX = static_cast<unsigned>(variant.holders * blocks_of(variant));
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = static_cast<unsigned>(gru_threads(variant));
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned>(variant.shared_bytes);
    config.hStream = stream;
    config.attrs = attributes.data();
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
};

}  // namespace

// One kernel, loaded on one device.
class GruKernel {
 public:
  GruKernel(const std::string& source, const char* name, const GruVariant& variant, int device)
      : module_(nvrtc::compile(source, driver::architecture(device),
                               /*has_specific_instructions=*/fills_registers(variant))),
        function_(module_.function(name, variant.shared_bytes)) {
    int registers = 0;  // of a thread
    JAXGRAD_DRIVER(driver::api().cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function_));
    if (fills_registers(variant) &&
        registers * gru_threads(variant) < gru_block_registers(variant.padded, variant.rows))
      throw NoPlan("a thread of a kernel of jaxgrad's GRU starts with only " + std::to_string(registers) +
                   " registers");
    const bool is_cluster = variant.holder == GruHolder::kCluster;
    if (is_cluster || variant.pair > 1) {
      int clusters = 0;
      Launch launch(variant, nullptr);
      launch.config.numAttrs = 1;  // the size of a cluster
      JAXGRAD_DRIVER(driver::api().cuOccupancyMaxActiveClusters(&clusters, function_, &launch.config));
      blocks_at_once_ = int64_t{clusters} * (is_cluster ? blocks_of(variant) : variant.pair);
    } else {
      const int64_t resident = driver::resident_blocks(function_, gru_threads(variant), variant.shared_bytes);
      blocks_at_once_ = resident * driver::attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    }
  }

  CUfunction function() const { return function_; }
  int64_t blocks_at_once() const { return blocks_at_once_; }  // on the device

 private:
  driver::Module module_;
  CUfunction function_;
  int64_t blocks_at_once_ = 0;
};

namespace {

constexpr size_t kCapacity = 64;             // loaded kernels of a device
constexpr int kMinArchitecture = 80;         // products of tensor cores of bfloat16 and TF32
constexpr int kMinClusterArchitecture = 90;  // clusters of blocks
constexpr std::array<int, 7> kPadded = {128, 256, 512, 768, 1024, 1536, 2048};
constexpr int64_t kMaxStepSize = 1 << 27;  // rows times hidden units, so that strides of two directions fit in 32 bits
constexpr int kMaxClusterHidden = 256, kMinTeamHidden = 256;
constexpr int kMaxBlockHidden = 128;      // whose recurrent weights fit in the registers of a block
constexpr int kFillingArchitecture = 90;  // of blocks that fill the registers; on others, the kernels have not run
constexpr int kBlockUnits = 32;           // hidden units are rounded up to a multiple
constexpr int kMaxBlockStates = 192;      // rows of a block times hidden units
constexpr int kNarrow = 16;               // units of the blocks of a team that have few
constexpr int kMinPairBytes = 64 << 10;   // that each block would load in a step without pairs

int mode_of(const GruKey& key) {
  if (key.type != FloatType::kFloat32) return kGruHalf;
  return key.allow_tf32 ? kGruTf32 : kGruSplit;
}

int shared_bytes_of(const GruKey& key, const GruVariant& v) {
  if (v.holder == GruHolder::kTeam)
    return gru_team_shared_bytes(
        {mode_of(key), key.is_backward, key.linear_before_reset, v.padded, v.units, v.row_tiles, v.batches, v.pair});
  const auto bytes = key.is_backward ? gru_backward_shared_bytes : gru_forward_shared_bytes;
  return bytes(mode_of(key), v.padded, key.linear_before_reset);
}

// The hidden units that a block has room for.
int padded_of_block(const GruKey& key) {
  return static_cast<int>((key.hidden + kBlockUnits - 1) / kBlockUnits * kBlockUnits);
}

// The ways to split rows, from few rows at a time to many.
struct Tiling {
  int units, row_tiles, batches, pair = 1;
};
using Tilings = std::vector<Tiling>;

// Clusters of 8 rows that take turns are mostly faster than clusters of 16 rows.
Tilings cluster_tilings() { return {{32, 1, 1}}; }

Tilings wide_team_tilings() { return {{32, 1, 1}, {32, 2, 1}, {32, 2, 2}}; }

Tilings narrow_team_tilings(bool is_split) {  // split operands have three planes of words
  if (is_split) return {{16, 2, 1}, {16, 2, 2}, {16, 2, 4}};
  return {{16, 2, 1}, {16, 4, 1}, {16, 4, 2}};
}

// The same numbers of rows for pairs of blocks, if they have room for their sums.
Tilings pair_tilings(bool is_split) {
  if (is_split) return {{16, 2, 1, 2}, {16, 2, 2, 2}, {16, 2, 4, 2}};
  return {{16, 2, 1, 2}, {16, 4, 1, 2}, {16, 4, 2, 2}};
}

// Chooses the fewest rows at a time with which all clusters or teams run at once, and no more than there are. With more
// parts of rows than teams, they take turns. Returns false if none fits the GPU.
bool choose_tiling(GruVariant& variant, const GruKey& key, const Tilings& tilings, int multiprocessors,
                   int shared_bytes) {
  GruVariant tried = variant;
  bool fits = false;
  for (const Tiling& tiling : tilings) {
    tried.units = tiling.units;
    tried.row_tiles = tiling.row_tiles;
    tried.batches = tiling.batches;
    tried.pair = tiling.pair;
    tried.shared_bytes = shared_bytes_of(key, tried);
    const int64_t at_once = multiprocessors / blocks_of(tried);
    if (tried.shared_bytes > shared_bytes || at_once == 0) break;
    tried.rows = tried.batches * tried.row_tiles * kGruTile;
    tried.tiles = (key.rows + tried.rows - 1) / tried.rows;
    const int64_t parts = tried.tiles * key.problems;
    tried.holders = tried.holder == GruHolder::kCluster ? parts : std::min(parts, at_once);
    variant = tried;
    fits = true;
    if (parts <= at_once || tried.tiles == 1) break;
  }
  return fits;
}

// Whether blocks compute a call. With up to 96 hidden units, blocks are faster than clusters (on an H100). With up to
// 128, a block has one row, and is faster (on an H200), in bfloat16 and TF32 only if no blocks take turns. Other GPUs
// are not measured.
bool has_block(const GruKey& key, int architecture, int multiprocessors) {
  if (key.hidden > kMaxBlockHidden) return false;
  const GruVariant variant = gru_block_variant(key, 1);
  if (!fills_registers(variant)) return true;
  return architecture == kFillingArchitecture && (mode_of(key) == kGruSplit || variant.holders <= multiprocessors);
}

// The fewest rows with which there are no more blocks than multiprocessors, as long as rows times hidden units, rounded
// up, are at most kMaxBlockStates.
GruVariant choose_block(const GruKey& key, int multiprocessors) {
  GruVariant variant = gru_block_variant(key, 1);
  while (variant.holders > multiprocessors && 2 * variant.rows * variant.padded <= kMaxBlockStates)
    variant = gru_block_variant(key, 2 * variant.rows);
  return variant;
}

// Whether blocks on tensor cores compute a call. They are faster than the other kernels with many rows for each
// multiprocessor and 64 to 128 hidden units (on an H200), and never with 32 (on an H100). The limits were measured
// before the kernels knew the number of hidden units that fill a block. Other GPUs are not measured.
bool has_tensor_block(const GruKey& key, int multiprocessors) {
  const int padded = padded_of_block(key);
  if (key.hidden > kMaxBlockHidden || padded <= 32 || mode_of(key) == kGruSplit) return false;
  if (key.rows <= kGruTile / 2) return false;          // a tile would be mostly empty
  double most = mode_of(key) == kGruTf32 ? 4.5 : 3.5;  // rows for each multiprocessor, with which others are faster
  if (padded == 64 && !key.is_backward) most = 7;
  return static_cast<double>(key.rows * key.problems) > most * multiprocessors;
}

// One tile of rows; two if one gives more blocks than multiprocessors, with 128 hidden units, except in the backward
// pass in TF32 with linear_before_reset, which has no registers for two. With fewer units, one was faster.
GruVariant choose_tensor_block(const GruKey& key, int multiprocessors, int shared_bytes) {
  const GruVariant one = gru_tensor_block_variant(key, 1), two = gru_tensor_block_variant(key, 2);
  const bool fits_registers = mode_of(key) == kGruHalf || !key.linear_before_reset || !key.is_backward;
  const bool has_room = one.padded == kMaxBlockHidden && fits_registers;
  return has_room && one.holders > multiprocessors && one.tiles > 1 && two.shared_bytes <= shared_bytes ? two : one;
}

GruResets resets_of(const GruKey& key) {
  if (!key.has_resets) return kGruNoResets;
  return key.has_reset_h ? kGruResetsToGiven : kGruResetsToZero;
}

}  // namespace

std::string gru_definitions(const GruKey& key, const GruVariant& variant) {
  const auto define = [](const char* name, const std::string& value) {
    return std::string("#define ") + name + " " + value + "\n";
  };
  const auto number = [&](const char* name, int value) { return define(name, std::to_string(value)); };
  const bool is_block = variant.holder == GruHolder::kBlock;
  // Blocks multiply in float32, with either precision of it.
  const int mode = is_block && key.type == FloatType::kFloat32 ? kGruSplit : mode_of(key);
  return number("ELEMENT_IS_BFLOAT16", key.type == FloatType::kBFloat16) +
         define("T", key.type == FloatType::kFloat32 ? "float" : "unsigned short") + number("MODE", mode) +
         number("HIDDEN", variant.padded) + number("UNITS", variant.units) + number("ROW_TILES", variant.row_tiles) +
         number("BATCHES", variant.batches) + number("PAIR", variant.pair) +
         number("FILLED", key.hidden == variant.padded) + number("LINEAR", key.linear_before_reset) +
         number("LENGTHS", key.has_lengths) + number("RESETS", resets_of(key)) + number("CLIP", key.has_clip) +
         number("BACKWARD", key.is_backward) + number("BLOCK_ROWS", is_block ? variant.rows : 0);
}

const char* gru_source(const GruKey& key, const GruVariant& variant) {
  const auto of_pass = [&](const char* forward, const char* backward) { return key.is_backward ? backward : forward; };
  switch (variant.holder) {
    case GruHolder::kBlock:
      return of_pass(kGruBlockForwardSource, kGruBlockBackwardSource);
    case GruHolder::kTensorBlock:
      return of_pass(kGruTensorBlockForwardSource, kGruTensorBlockBackwardSource);
    case GruHolder::kCluster:
      return of_pass(kGruClusterForwardSource, kGruClusterBackwardSource);
    case GruHolder::kTeam:
      break;
  }
  return of_pass(kGruTeamForwardSource, kGruTeamBackwardSource);
}

int64_t gru_padded_hidden(int64_t hidden) {
  for (const int padded : kPadded)
    if (hidden <= padded) return padded;
  return 0;
}

int gru_threads(const GruVariant& variant) {
  switch (variant.holder) {
    case GruHolder::kBlock:
      return gru_block_threads(variant.padded, variant.rows);
    case GruHolder::kTensorBlock:
      return gru_tensor_block_threads(variant.padded);
    default:
      return kGruThreads;
  }
}

GruVariant gru_block_variant(const GruKey& key, int rows) {
  GruVariant variant;
  variant.holder = GruHolder::kBlock;
  variant.padded = padded_of_block(key);
  variant.rows = rows;
  variant.tiles = (key.rows + rows - 1) / rows;
  variant.holders = variant.tiles * key.problems;
  variant.shared_bytes = gru_block_shared_bytes(variant.padded, rows, key.is_backward);
  return variant;
}

GruVariant gru_tensor_block_variant(const GruKey& key, int row_tiles) {
  GruVariant variant;
  variant.holder = GruHolder::kTensorBlock;
  variant.padded = variant.units = padded_of_block(key);
  variant.row_tiles = row_tiles;
  variant.batches = 1;
  variant.rows = row_tiles * kGruTile;
  variant.tiles = (key.rows + variant.rows - 1) / variant.rows;
  variant.holders = variant.tiles * key.problems;
  variant.shared_bytes = gru_tensor_block_shared_bytes(mode_of(key), variant.padded, variant.rows, key.is_backward,
                                                       key.linear_before_reset);
  return variant;
}

GruVariant gru_variant(const GruKey& key) {
  if (key.type == FloatType::kFloat64) throw NoPlan("jaxgrad's GRU kernels do not compute float64");
  if (gru_padded_hidden(key.hidden) == 0)
    throw NoPlan("jaxgrad's GRU kernels have at most " + std::to_string(kPadded.back()) + " hidden units");
  if (key.rows * key.hidden > kMaxStepSize)
    throw NoPlan("jaxgrad's GRU kernels compute at most " + std::to_string(kMaxStepSize) + " states in a step");
  const int architecture = driver::architecture(key.device);
  if (architecture < kMinArchitecture)
    throw NoPlan("jaxgrad's GRU kernels require a GPU of compute capability 8.0 or later");
  const int multiprocessors = driver::attribute(key.device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  const int shared_bytes = driver::attribute(key.device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  if (has_tensor_block(key, multiprocessors)) {
    const GruVariant variant = choose_tensor_block(key, multiprocessors, shared_bytes);
    if (variant.shared_bytes <= shared_bytes) return variant;
  }
  if (has_block(key, architecture, multiprocessors)) return choose_block(key, multiprocessors);

  GruVariant variant;
  variant.padded = static_cast<int>(gru_padded_hidden(key.hidden));
  variant.holder = GruHolder::kCluster;
  if (architecture >= kMinClusterArchitecture && variant.padded <= kMaxClusterHidden &&
      choose_tiling(variant, key, cluster_tilings(), multiprocessors, shared_bytes))
    return variant;

  variant.holder = GruHolder::kTeam;
  variant.padded = std::max(variant.padded, kMinTeamHidden);
  const bool is_split = mode_of(key) == kGruSplit;
  const auto choose = [&](GruVariant& chosen, const Tilings& tilings) {
    return choose_tiling(chosen, key, tilings, multiprocessors, shared_bytes);
  };
  GruVariant narrow = variant;
  // Wide blocks have no registers for three planes of their weights.
  const bool has_wide = !is_split && choose(variant, wide_team_tilings());
  const bool has_narrow = choose(narrow, narrow_team_tilings(is_split));
  if (!has_wide && !has_narrow)
    throw NoPlan("the recurrent weights of " + std::to_string(key.hidden) + " hidden units do not fit in the " +
                 std::to_string(multiprocessors) + " multiprocessors of the GPU, with " + std::to_string(shared_bytes) +
                 " bytes of shared memory each");
  // How often the teams take turns.
  const auto turns = [&](const GruVariant& v) { return (v.tiles * key.problems + v.holders - 1) / v.holders; };
  if (!has_wide || (has_narrow && turns(narrow) < turns(variant))) variant = narrow;

  const auto slot_bytes = [&] {
    return gru_slot_bytes(mode_of(key), variant.padded, variant.rows,
                          gru_regions(key.is_backward, key.linear_before_reset));
  };
  // Pairs make backward steps of narrow blocks faster, but backward steps of wide blocks and all forward steps slower
  // (measured with 1024 and 2048 hidden units).
  const int bytes_of_pair = 2 * kGruThreads / 32 * 64;  // of a row, that the warps of a pair load at once
  GruVariant pairs = variant;
  if (architecture >= kMinClusterArchitecture && key.is_backward && variant.units == kNarrow &&
      slot_bytes() >= kMinPairBytes && variant.padded * gru_element_bytes(mode_of(key)) % bytes_of_pair == 0 &&
      choose(pairs, pair_tilings(is_split)) && pairs.rows == variant.rows)
    variant = pairs;
  variant.workspace_bytes = variant.holders * kGruSlots * slot_bytes();
  return variant;
}

GruPlan gru_plan(const GruKey& key) {
  static auto& loaded = *new DeviceCaches<std::string, GruKernel, std::hash<std::string>>(kCapacity);
  const GruVariant variant = gru_variant(key);
  const driver::RelaxedCapture relaxed;
  const std::string definitions = gru_definitions(key, variant);
  auto kernel = loaded.of(key.device).get(definitions, [&] {
    const std::string source = definitions + kDeviceSource + kGruInstructionsSource + gru_source(key, variant);
    const char* const name = key.is_backward ? "gru_backward" : "gru_forward";
    return std::make_shared<const GruKernel>(source, name, variant, key.device);
  });
  // Only teams wait for each other.
  const int64_t needed = (variant.holder == GruHolder::kTeam ? variant.holders : 1) * blocks_of(variant);
  if (kernel->blocks_at_once() < needed && needed == 1)
    throw NoPlan("a block of a kernel of jaxgrad's GRU does not fit a multiprocessor of the GPU");
  if (kernel->blocks_at_once() < needed)
    throw NoPlan("the GPU runs " + std::to_string(kernel->blocks_at_once()) +
                 " blocks of a kernel of jaxgrad's GRU at once, and " + std::to_string(needed) + " exchange the state");
  return GruPlan(std::move(kernel), variant, key.problems);
}

GruPlan::GruPlan(std::shared_ptr<const GruKernel> kernel, const GruVariant& variant, int64_t problems)
    : kernel_(std::move(kernel)), variant_(variant), problems_(problems) {}

void GruPlan::run(CUstream stream, GruArguments arguments, void* workspace) const {
  arguments.problems = static_cast<int>(problems_);
  arguments.tiles = static_cast<int>(variant_.tiles);
  arguments.exchange = workspace;
  if (variant_.workspace_bytes > 0)
    JAXGRAD_DRIVER(driver::api().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(workspace), ~0u,
                                                  static_cast<size_t>(variant_.workspace_bytes / 4), stream));
  const Launch launch(variant_, stream);
  std::array<void*, 1> parameters = {&arguments};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernelEx(&launch.config, kernel_->function(), parameters.data(), nullptr));
}

}  // namespace jaxgrad

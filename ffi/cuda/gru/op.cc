#include "cuda/gru/op.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "cuda/gru/cluster_backward_source.h"
#include "cuda/gru/cluster_forward_source.h"
#include "cuda/gru/team_backward_source.h"
#include "cuda/gru/team_forward_source.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/module.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {

namespace {

int blocks_of(const GruVariant& variant) { return variant.padded / variant.units; }

// A launch of a variant. Blocks of a cluster run at once, and so do all blocks of teams, or the launch fails.
struct Launch {
  CUlaunchAttribute together{};
  CUlaunchConfig config{};

  Launch(const GruVariant& variant, CUstream stream) {
    if (variant.is_cluster) {
      together.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      together.value.clusterDim.x = static_cast<unsigned>(blocks_of(variant));
      together.value.clusterDim.y = together.value.clusterDim.z = 1;
    } else {
      together.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      together.value.cooperative = 1;
    }
    config.gridDimX = static_cast<unsigned>(variant.teams * blocks_of(variant));
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = kGruThreads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned>(variant.shared_bytes);
    config.hStream = stream;
    config.attrs = &together;
    config.numAttrs = 1;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
};

}  // namespace

// One kernel, loaded on one device.
class GruKernel {
 public:
  GruKernel(const std::string& source, const char* name, const GruVariant& variant, int architecture)
      : module_(nvrtc::compile(source, architecture)), function_(module_.function(name)) {
    const auto& api = driver::api();
    JAXGRAD_DRIVER(
        api.cuFuncSetAttribute(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, variant.shared_bytes));
    if (variant.is_cluster) {
      const Launch launch(variant, nullptr);
      JAXGRAD_DRIVER(api.cuOccupancyMaxActiveClusters(&at_once_, function_, &launch.config));
    } else {
      JAXGRAD_DRIVER(api.cuOccupancyMaxActiveBlocksPerMultiprocessor(&at_once_, function_, kGruThreads,
                                                                     static_cast<size_t>(variant.shared_bytes)));
    }
  }

  CUfunction function() const { return function_; }
  // Clusters that the GPU can run at once; or blocks, each of its multiprocessors.
  int at_once() const { return at_once_; }

 private:
  driver::Module module_;
  CUfunction function_;
  int at_once_ = 0;
};

namespace {

constexpr size_t kCapacity = 64;             // loaded kernels
constexpr int kMinArchitecture = 80;         // products of tensor cores of bfloat16 and TF32
constexpr int kMinClusterArchitecture = 90;  // clusters of blocks
constexpr std::array<int, 7> kPadded = {128, 256, 512, 768, 1024, 1536, 2048};
constexpr int64_t kMaxStepSize = 1 << 27;  // rows times hidden units, so that strides of two directions fit in 32 bits
constexpr int kMaxClusterHidden = 256, kMinTeamHidden = 256;

int mode_of(const GruKey& key) {
  if (key.type != FloatType::kFloat32) return kGruHalf;
  return key.allow_tf32 ? kGruTf32 : kGruSplit;
}

int attribute_of(int device, CUdevice_attribute which) {
  CUdevice found = 0;
  int value = 0;
  JAXGRAD_DRIVER(driver::api().cuDeviceGet(&found, device));
  JAXGRAD_DRIVER(driver::api().cuDeviceGetAttribute(&value, which, found));
  return value;
}

int rows_of(const GruVariant& variant) { return variant.batches * variant.row_tiles * kGruTile; }

int shared_bytes_of(const GruKey& key, const GruVariant& v) {
  if (!v.is_cluster)
    return gru_team_shared_bytes({mode_of(key), key.is_backward, v.padded, v.units, v.row_tiles, v.batches});
  const auto bytes = key.is_backward ? gru_backward_shared_bytes : gru_forward_shared_bytes;
  return bytes(mode_of(key), v.padded, v.row_tiles, key.linear_before_reset);
}

// The ways to split rows, from few rows at a time to many.
struct Tiling {
  int units, row_tiles, batches;
};
constexpr std::array<Tiling, 3> kClusterTilings = {{{32, 1, 1}, {32, 2, 1}, {32, 4, 1}}};
constexpr std::array<Tiling, 3> kWideTeamTilings = {{{32, 1, 1}, {32, 2, 1}, {32, 2, 2}}};
constexpr std::array<Tiling, 3> kNarrowTeamTilings = {{{16, 2, 1}, {16, 4, 1}, {16, 4, 2}}};
constexpr std::array<Tiling, 3> kNarrowSplitTilings = {{{16, 2, 1}, {16, 2, 2}, {16, 2, 4}}};  // two planes of words

// Chooses the fewest rows at a time with which all clusters or teams run at once. With more parts of rows than teams,
// they take turns. Returns false if none fits the GPU.
bool choose_tiling(GruVariant& variant, const GruKey& key, const std::array<Tiling, 3>& tilings, int multiprocessors,
                   int shared_bytes) {
  GruVariant tried = variant;
  bool fits = false;
  for (const Tiling& tiling : tilings) {
    tried.units = tiling.units;
    tried.row_tiles = tiling.row_tiles;
    tried.batches = tiling.batches;
    tried.shared_bytes = shared_bytes_of(key, tried);
    const int64_t at_once = multiprocessors / blocks_of(tried);
    if (tried.shared_bytes > shared_bytes || at_once == 0) break;
    tried.tiles = (key.rows + rows_of(tried) - 1) / rows_of(tried);
    const int64_t parts = tried.tiles * key.problems;
    tried.teams = tried.is_cluster ? parts : std::min(parts, at_once);
    variant = tried;
    fits = true;
    if (parts <= at_once) break;
  }
  return fits;
}

}  // namespace

int64_t gru_padded_hidden(int64_t hidden) {
  for (const int padded : kPadded)
    if (hidden <= padded) return padded;
  return 0;
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
  const int multiprocessors = attribute_of(key.device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  const int shared_bytes = attribute_of(key.device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  GruVariant variant;
  variant.padded = static_cast<int>(gru_padded_hidden(key.hidden));
  variant.is_cluster = architecture >= kMinClusterArchitecture && variant.padded <= kMaxClusterHidden;
  if (variant.is_cluster && choose_tiling(variant, key, kClusterTilings, multiprocessors, shared_bytes)) return variant;

  variant.is_cluster = false;
  variant.padded = std::max(variant.padded, kMinTeamHidden);
  const auto& narrow = mode_of(key) == kGruSplit ? kNarrowSplitTilings : kNarrowTeamTilings;
  if (!choose_tiling(variant, key, kWideTeamTilings, multiprocessors, shared_bytes) &&
      !choose_tiling(variant, key, narrow, multiprocessors, shared_bytes))
    throw NoPlan("the recurrent weights of " + std::to_string(key.hidden) + " hidden units do not fit in the " +
                 std::to_string(multiprocessors) + " multiprocessors of the GPU, with " + std::to_string(shared_bytes) +
                 " bytes of shared memory each");
  const int64_t slot_bytes = gru_slot_bytes(mode_of(key), variant.padded, rows_of(variant),
                                            gru_regions(key.is_backward, key.linear_before_reset));
  variant.workspace_bytes = variant.teams * kGruSlots * slot_bytes;
  return variant;
}

std::string gru_source(const GruKey& key, const GruVariant& variant) {
  const auto define = [](const char* name, const std::string& value) {
    return std::string("#define ") + name + " " + value + "\n";
  };
  const auto number = [&](const char* name, int value) { return define(name, std::to_string(value)); };
  const char* source = variant.is_cluster ? (key.is_backward ? kGruClusterBackwardSource : kGruClusterForwardSource)
                                          : (key.is_backward ? kGruTeamBackwardSource : kGruTeamForwardSource);
  return number("ELEMENT_IS_BFLOAT16", key.type == FloatType::kBFloat16) +
         define("T", key.type == FloatType::kFloat32 ? "float" : "unsigned short") + number("MODE", mode_of(key)) +
         number("HIDDEN", variant.padded) + number("UNITS", variant.units) + number("ROW_TILES", variant.row_tiles) +
         number("BATCHES", variant.batches) + number("LINEAR", key.linear_before_reset) +
         number("BACKWARD", key.is_backward) + kDeviceSource + source;
}

std::shared_ptr<const GruPlan> gru_plan(const GruKey& key) {
  static auto& loaded = *new LruCache<std::string, GruKernel, std::hash<std::string>>(kCapacity);
  const GruVariant variant = gru_variant(key);
  const driver::RelaxedCapture relaxed;
  const std::string source = gru_source(key, variant);
  auto kernel = loaded.get(std::to_string(key.device) + "\n" + source, [&] {
    return std::make_shared<const GruKernel>(source, key.is_backward ? "gru_backward" : "gru_forward", variant,
                                             driver::architecture(key.device));
  });
  if (kernel->at_once() == 0)
    throw NoPlan("the GPU cannot run " + std::to_string(blocks_of(variant)) +
                 " blocks of jaxgrad's GRU kernels at once, which exchange the state");
  return std::make_shared<const GruPlan>(std::move(kernel), variant, key.problems);
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

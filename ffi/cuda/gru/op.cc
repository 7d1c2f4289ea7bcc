#include "cuda/gru/op.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "cuda/gru/backward_source.h"
#include "cuda/gru/forward_source.h"
#include "cuda/gru/kernel_source.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/module.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {

// One kernel, loaded on one device.
class GruKernel {
 public:
  GruKernel(const std::string& source, const char* name, int shared_bytes, int architecture)
      : module_(nvrtc::compile(source, architecture)), function_(module_.function(name)), shared_bytes_(shared_bytes) {
    JAXGRAD_DRIVER(
        driver::api().cuFuncSetAttribute(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes));
  }

  CUfunction function() const { return function_; }
  unsigned shared_bytes() const { return static_cast<unsigned>(shared_bytes_); }

 private:
  driver::Module module_;
  CUfunction function_;
  int shared_bytes_;
};

namespace {

constexpr size_t kCapacity = 64;      // loaded kernels
constexpr int kMinArchitecture = 90;  // clusters of blocks
constexpr std::array<int, 3> kPadded = {128, 256, 0};
constexpr std::array<int, 3> kRowTiles = {1, 2, 4};

int mode_of(const GruKey& key) {
  if (key.type != FloatType::kFloat32) return kGruHalf;
  return key.allow_tf32 ? kGruTf32 : kGruSplit;
}

int shared_bytes_of(const GruKey& key, int row_tiles) {
  const auto bytes = key.is_backward ? gru_backward_shared_bytes : gru_forward_shared_bytes;
  return bytes(mode_of(key), static_cast<int>(gru_padded_hidden(key.hidden)), row_tiles, key.linear_before_reset);
}

int attribute_of(int device, CUdevice_attribute which) {
  CUdevice found = 0;
  int value = 0;
  JAXGRAD_DRIVER(driver::api().cuDeviceGet(&found, device));
  JAXGRAD_DRIVER(driver::api().cuDeviceGetAttribute(&value, which, found));
  return value;
}

int64_t tiles_of(int64_t rows, int row_tiles) { return (rows + row_tiles * kGruTile - 1) / (row_tiles * kGruTile); }

// The fewest tiles of rows in a cluster with which all clusters run at once; clusters do not wait for each other, so
// more of them only take turns.
int row_tiles_of(const GruKey& key) {
  const int blocks = static_cast<int>(gru_padded_hidden(key.hidden)) / kGruUnits;
  const int64_t at_once = attribute_of(key.device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) / blocks;
  const int available = attribute_of(key.device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  int chosen = 0;
  for (const int row_tiles : kRowTiles) {
    if (shared_bytes_of(key, row_tiles) > available) break;
    chosen = row_tiles;
    if (tiles_of(key.rows, row_tiles) * key.problems <= at_once) break;
  }
  return chosen;
}

}  // namespace

int64_t gru_padded_hidden(int64_t hidden) {
  for (const int padded : kPadded)
    if (hidden <= padded) return padded;
  return 0;
}

void check_gru(const GruKey& key) {
  if (key.type == FloatType::kFloat64) throw NoPlan("jaxgrad's GRU kernels do not compute float64");
  if (gru_padded_hidden(key.hidden) == 0) throw NoPlan("jaxgrad's GRU kernels have at most 256 hidden units");
  if (driver::architecture(key.device) < kMinArchitecture)
    throw NoPlan("jaxgrad's GRU kernels require a GPU of compute capability 9.0 or later");
  if (row_tiles_of(key) == 0) throw NoPlan("the GPU has too little shared memory for jaxgrad's GRU kernels");
}

std::string gru_source(const GruKey& key, int row_tiles) {
  const auto define = [](const char* name, const std::string& value) {
    return std::string("#define ") + name + " " + value + "\n";
  };
  return define("ELEMENT_IS_BFLOAT16", key.type == FloatType::kBFloat16 ? "1" : "0") +
         define("T", key.type == FloatType::kFloat32 ? "float" : "unsigned short") +
         define("MODE", std::to_string(mode_of(key))) +
         define("HIDDEN", std::to_string(gru_padded_hidden(key.hidden))) +
         define("LINEAR", key.linear_before_reset ? "1" : "0") + define("ROW_TILES", std::to_string(row_tiles)) +
         kDeviceSource + kGruSource + (key.is_backward ? kGruBackwardSource : kGruForwardSource);
}

std::shared_ptr<const GruPlan> gru_plan(const GruKey& key) {
  check_gru(key);
  static auto& loaded = *new LruCache<std::string, GruKernel, std::hash<std::string>>(kCapacity);
  const int row_tiles = row_tiles_of(key);
  const driver::RelaxedCapture relaxed;
  const std::string source = gru_source(key, row_tiles);
  auto kernel = loaded.get(std::to_string(key.device) + "\n" + source, [&] {
    return std::make_shared<const GruKernel>(source, key.is_backward ? "gru_backward" : "gru_forward",
                                             shared_bytes_of(key, row_tiles), driver::architecture(key.device));
  });
  return std::make_shared<const GruPlan>(std::move(kernel), row_tiles, key.problems, key.rows,
                                         static_cast<int>(gru_padded_hidden(key.hidden)) / kGruUnits);
}

GruPlan::GruPlan(std::shared_ptr<const GruKernel> kernel, int row_tiles, int64_t problems, int64_t rows, int blocks)
    : kernel_(std::move(kernel)),
      tiles_(static_cast<int>(tiles_of(rows, row_tiles))),
      blocks_(blocks),
      problems_(problems) {}

void GruPlan::run(CUstream stream, GruArguments arguments) const {
  arguments.tiles = tiles_;
  CUlaunchAttribute cluster{};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim.x = static_cast<unsigned>(blocks_);
  cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(problems_ * tiles_ * blocks_);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = kGruThreads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel_->shared_bytes();
  config.hStream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  std::array<void*, 1> parameters = {&arguments};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernelEx(&config, kernel_->function(), parameters.data(), nullptr));
}

}  // namespace jaxgrad

#include "cuda/depthwise/op.h"

#include <array>
#include <limits>

#include "common/lru_cache.h"
#include "cuda/depthwise/kernel_source.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {
namespace {

constexpr size_t kCapacity = std::numeric_limits<size_t>::max();  // a CUDA graph may run one for as long as it lives
constexpr int kOldestArchitecture = 80;                           // the first with asynchronous copies to shared memory

Gpu gpu_of(int device) {
  CUdevice found = 0;
  JAXGRAD_DRIVER(driver::api().cuDeviceGet(&found, device));
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    JAXGRAD_DRIVER(driver::api().cuDeviceGetAttribute(&value, which, found));
    return value;
  };
  return {10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
              attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
          attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
          attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
          attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)};
}

struct KeyHash {
  size_t operator()(const DepthwiseFilterKey& key) const {
    Hash hash;
    hash.mix(static_cast<const ConvShape&>(key));
    hash.mix(static_cast<int64_t>(key.type));
    hash.mix(key.device);
    return hash.value();
  }
};

PlanCache<DepthwiseFilterKey, DepthwiseFilterPlan, KeyHash>& cache() {
  static auto& plans = *new PlanCache<DepthwiseFilterKey, DepthwiseFilterPlan, KeyHash>(kCapacity);
  return plans;
}

struct Found {
  DepthwiseShape shape;
  DepthwiseTiling tiling;
  Gpu gpu;
};

Found find(const DepthwiseFilterKey& key) {
  std::string reason;
  const auto shape = depthwise_shape(key, key.type, reason);
  if (!shape) throw NoPlan("jaxgrad's own kernel cannot take this convolution: " + reason);
  const Gpu gpu = gpu_of(key.device);
  if (gpu.architecture < kOldestArchitecture)
    throw NoPlan("jaxgrad's own kernel needs a GPU of compute capability 8.0 or later");
  const auto tiling = depthwise_tiling(*shape, gpu);
  if (!tiling) throw NoPlan("the tiles that jaxgrad's own kernel would need are too large for the GPU");
  return {*shape, *tiling, gpu};
}

std::shared_ptr<const DepthwiseFilterPlan> build(const DepthwiseFilterKey& key) {
  const Found found = find(key);
  const driver::RelaxedCapture relaxed;
  return std::make_shared<const DepthwiseFilterPlan>(found.shape, found.tiling, found.gpu);
}

unsigned narrow(int64_t value) { return static_cast<unsigned>(value); }

}  // namespace

DepthwiseFilterPlan::DepthwiseFilterPlan(const DepthwiseShape& shape, const DepthwiseTiling& t, const Gpu& gpu)
    : tiling_(t),
      workspace_bytes_(t.partial_bytes(shape)),
      elements_(shape.taps() * shape.C),
      code_(nvrtc::compile(depthwise_definitions(shape, t) + kDeviceSource + kDepthwiseWeightGradientSource,
                           gpu.architecture)) {
  const driver::Api& api = driver::api();
  JAXGRAD_DRIVER(api.cuModuleLoadData(&module_, code_->data()));
  try {
    // Asked for by name, a kernel is loaded at once, and not when it is first launched.
    JAXGRAD_DRIVER(api.cuModuleGetFunction(&partial_, module_, "depthwise_filter_partial"));
    JAXGRAD_DRIVER(api.cuModuleGetFunction(&sum_, module_, "depthwise_filter_sum"));
    JAXGRAD_DRIVER(api.cuFuncSetAttribute(partial_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                          static_cast<int>(t.shared_bytes)));
  } catch (...) {
    api.cuModuleUnload(module_);
    throw;
  }
}

DepthwiseFilterPlan::~DepthwiseFilterPlan() { driver::api().cuModuleUnload(module_); }

void DepthwiseFilterPlan::run(CUstream stream, const void* x, const void* dy, void* dw, void* workspace) const {
  const DepthwiseTiling& t = tiling_;
  std::array<void*, 3> partial = {&x, &dy, &workspace};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(partial_, narrow(t.chunks), narrow(t.shares), 1, narrow(t.threads), 1, 1,
                                              narrow(t.shared_bytes), stream, partial.data(), nullptr));
  int shares = static_cast<int>(t.shares);
  std::array<void*, 3> sum = {&workspace, &dw, &shares};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(sum_, narrow((elements_ + 31) / 32), 1, 1,
                                              narrow(32 * kDepthwiseSumSlices), 1, 1, 0, stream, sum.data(), nullptr));
}

void check_depthwise_filter(const DepthwiseFilterKey& key) { find(key); }

void check_compiler(int device) {
  nvrtc::compile("extern \"C\" __global__ void nothing() {}", gpu_of(device).architecture);
}

std::shared_ptr<const DepthwiseFilterPlan> depthwise_filter_plan(const DepthwiseFilterKey& key) {
  return cache().get(key, [&] { return build(key); });
}

}  // namespace jaxgrad

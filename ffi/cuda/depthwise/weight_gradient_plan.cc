#include "cuda/depthwise/weight_gradient_plan.h"

#include <array>
#include <functional>
#include <utility>

#include "cuda/depthwise/weight_gradient_source.h"
#include "cuda/runtime/device_caches.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/module.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {

// The kernels, loaded on one device. Sizes of the arrays share them.
class DepthwiseKernels {
 public:
  DepthwiseKernels(const std::string& definitions, int64_t shared_bytes, int architecture)
      : module_(nvrtc::compile(definitions + kDeviceSource + kDepthwiseWeightGradientSource, architecture)),
        partial_(module_.function("depthwise_weight_gradient_partial", shared_bytes)),
        sum_(module_.function("depthwise_weight_gradient_sum")) {}

  CUfunction partial() const { return partial_; }
  CUfunction sum() const { return sum_; }

 private:
  driver::Module module_;
  CUfunction partial_, sum_;
};

namespace {

// Of a device.
constexpr size_t kCapacity = 256;        // plans, which keep kernels loaded
constexpr size_t kKernelCapacity = 128;  // programs

struct KeyHash {
  size_t operator()(const DepthwiseKey& key) const {
    Hash hash;
    hash.mix(static_cast<const ConvProblem&>(key));
    hash.mix(static_cast<int64_t>(key.type));
    hash.mix(key.device);
    return hash.value();
  }
};

auto& caches() {
  static auto& plans = *new DeviceCaches<DepthwiseKey, DepthwisePlan, KeyHash>(kCapacity);
  return plans;
}

std::shared_ptr<const DepthwiseKernels> kernels_of(const DepthwiseShape& shape, const DepthwiseTiling& tiling,
                                                   const Gpu& gpu, int device) {
  static auto& loaded = *new DeviceCaches<std::string, DepthwiseKernels, std::hash<std::string>>(kKernelCapacity);
  const std::string definitions = depthwise_definitions(shape, tiling);
  return loaded.of(device).get(definitions, [&] {
    return std::make_shared<const DepthwiseKernels>(definitions, tiling.shared_bytes, gpu.architecture);
  });
}

struct Variant {
  DepthwiseShape shape;
  DepthwiseTiling tiling;
  Gpu gpu;
};

Variant find_variant(const DepthwiseKey& key) {
  std::string reason;
  const auto shape = depthwise_shape(key, key.type, reason);
  if (!shape) throw NoPlan("the depthwise kernel does not support this convolution: " + reason);
  const Gpu gpu = gpu_of(key.device);
  check_depthwise_gpu(gpu);
  const auto tiling = depthwise_tiling(*shape, gpu);
  if (!tiling) throw NoPlan("the tiles of the depthwise kernel would be too large for the GPU");
  return {*shape, *tiling, gpu};
}

std::shared_ptr<const DepthwisePlan> build(const DepthwiseKey& key) {
  const Variant variant = find_variant(key);
  const driver::RelaxedCapture relaxed;
  return std::make_shared<const DepthwisePlan>(variant.shape, variant.tiling,
                                               kernels_of(variant.shape, variant.tiling, variant.gpu, key.device));
}

unsigned narrow(int64_t value) { return static_cast<unsigned>(value); }

}  // namespace

DepthwisePlan::DepthwisePlan(const DepthwiseShape& shape, const DepthwiseTiling& t,
                             std::shared_ptr<const DepthwiseKernels> kernels)
    : tiling_(t),
      arguments_(depthwise_arguments(shape, t)),
      taps_axis_(shape.KZ),
      workspace_bytes_(t.partial_bytes(shape)),
      dw_elements_(shape.taps() * shape.C),
      kernels_(std::move(kernels)) {}

void DepthwisePlan::run(CUstream stream, const void* x, const void* dy, void* dw, void* workspace) const {
  const DepthwiseTiling& t = tiling_;
  DepthwiseGradientArguments arguments = arguments_;
  std::array<void*, 4> partial = {&x, &dy, &workspace, &arguments};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(kernels_->partial(), narrow(t.chunks * taps_axis_), narrow(t.shares), 1,
                                              narrow(t.threads), 1, 1, narrow(t.shared_bytes), stream, partial.data(),
                                              nullptr));
  int shares = static_cast<int>(t.shares);
  std::array<void*, 4> sum = {&workspace, &dw, &shares, &arguments.channels};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(kernels_->sum(), narrow((dw_elements_ + 31) / 32), 1, 1,
                                              narrow(32 * kDepthwiseSumSlices), 1, 1, 0, stream, sum.data(), nullptr));
}

void check_depthwise(const DepthwiseKey& key) { find_variant(key); }

void check_compiler(int device) { nvrtc::compile_nothing(gpu_of(device).architecture); }

std::shared_ptr<const DepthwisePlan> depthwise_plan(const DepthwiseKey& key) {
  return caches().of(key.device).get(key, [&] { return build(key); });
}

CacheInfo depthwise_plan_cache_info() { return caches().info(); }

}  // namespace jaxgrad

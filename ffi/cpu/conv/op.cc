#include "cpu/conv/op.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <string>

#include "cpu/conv/onednn_plan.h"

namespace jaxgrad {
namespace {

constexpr size_t kCapacity = 512;

bool is_channels_last(const ConvOperand& operand) { return operand.strides[1] == 1; }

// Whether the convolution is a matrix product for each image, which needs no copy of features-first activations.
bool is_pointwise(const ConvKey& key) {
  bool pointwise = key.groups == 1;
  for (int i = 0; i < key.spatial; ++i)
    pointwise = pointwise && key.w.sizes[i + 2] == 1 && key.window_strides[i] == 1 && key.padding_low[i] == 0 &&
                key.padding_high[i] == 0;
  return pointwise;
}

bool is_gemm(const ConvPlan& plan) { return plan.implementation().find("gemm") != std::string::npos; }

// The layout in which the kernel reads the activations. As measured:
//   - The gradient of an input of few features is a matrix product whose result is gathered from all windows; the
//     direct kernels would pad the features to blocks of 16.
//   - Other channels-last activations are read as they lie, and so are all others by the matrix product for each image
//     that a window of one element comes to.
//   - Others are reordered to what the kernel likes best, but for weight gradients whose kernel would then be a matrix
//     product on a copy of all windows (depthwise: 6x slower): these take the direct kernel of channels-last
//     activations.
std::shared_ptr<const ConvPlan> build_plan(const ConvKey& key) {
  constexpr int64_t kFewFeatures = 4;
  if (key.kind == ConvKind::kBackwardInput && key.groups == 1 && key.x.sizes[1] <= kFewFeatures)
    return make_onednn_conv(key, ConvLayout::kFeaturesFirst);
  if ((is_channels_last(key.x) && is_channels_last(key.y)) || is_pointwise(key))
    return make_onednn_conv(key, ConvLayout::kAsItLies);
  auto plan = make_onednn_conv(key, ConvLayout::kAny);
  if (key.kind != ConvKind::kBackwardFilter || !is_gemm(*plan)) return plan;
  auto other = make_onednn_conv(key, ConvLayout::kChannelsLast);
  return is_gemm(*other) ? plan : other;
}

PlanCache<ConvKey, ConvPlan, ConvKeyHash>& cache() {
  static PlanCache<ConvKey, ConvPlan, ConvKeyHash> plans(kCapacity);
  return plans;
}

}  // namespace

bool ConvKey::operator==(const ConvKey& o) const {
  return ConvShape::operator==(o) && type == o.type && has_bias == o.has_bias && threads == o.threads;
}

size_t ConvKeyHash::operator()(const ConvKey& key) const {
  Hash hash;
  hash.mix(static_cast<const ConvShape&>(key));
  hash.mix(static_cast<int64_t>(key.type));
  hash.mix(key.has_bias);
  hash.mix(key.threads);
  return hash.value();
}

std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key) {
  return cache().get(key, [&] { return build_plan(key); });
}

PlanCacheInfo conv_plan_cache_info() { return cache().info(); }

void run_conv(const ConvPlan& plan, const ConvWork& work, const ConvArrays& arrays, std::byte* workspace,
              Parallel& parallel) {
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex one_error;
  auto worker = [&](int64_t index) {
    std::byte* const own = workspace + index * plan.workspace_bytes();
    try {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < work.examples;)
        plan.run(arrays.first.of(i), arrays.second.of(i), arrays.bias.of(i), arrays.result.of(i), own);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(one_error);
      error = std::current_exception();
    }
  };
  parallel.run(work.workers, &worker,
               [](void* context, int64_t index) { (*static_cast<decltype(worker)*>(context))(index); });
  if (error) std::rethrow_exception(error);
}

}  // namespace jaxgrad

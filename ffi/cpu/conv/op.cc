#include "cpu/conv/op.h"

#include <atomic>
#include <string>

#include "cpu/conv/onednn_plan.h"
#include "cpu/conv/small_plan.h"
#include "cpu/conv/summed_plan.h"
#include "cpu/runtime/arena.h"
#include "cpu/runtime/onednn.h"

namespace jaxgrad {
namespace {

constexpr size_t kCapacity = 512;

bool is_channels_last(const ConvKey& key) {
  return is_channels_last(key.x, key.spatial) && is_channels_last(key.y, key.spatial);
}

bool is_features_first(const ConvOperand& operand, int spatial) {
  return operand.strides == dense_strides(operand, spatial, false);
}

// Whether the convolution is one matrix product per image, which reads features-first activations without a copy.
bool is_pointwise(const ConvKey& key) {
  bool pointwise = key.groups == 1 && is_features_first(key.x, key.spatial) && is_features_first(key.y, key.spatial);
  for (int i = 0; i < key.spatial; ++i)
    pointwise = pointwise && key.w.sizes[i + 2] == 1 && key.window_strides[i] == 1 && key.padding_low[i] == 0 &&
                key.padding_high[i] == 0;
  return pointwise;
}

bool is_gemm(const ConvPlan& plan) { return plan.implementation().find("gemm") != std::string::npos; }

// Selects the kernel: that of small_plan.h, or oneDNN with a layout of the activations, by measurements:
//   - Input gradients of few features: features first. oneDNN computes a matrix product and gathers the result from all
//     windows; its direct kernels would pad the features to blocks of 16.
//   - Channels-last activations, and features-first ones with a 1x1 window: the layout of the caller.
//   - Other activations: the layout that oneDNN prefers, at the cost of a reorder. If the weight gradient would then
//     be a matrix product on a copy of all windows (slow for depthwise convolutions), channels last, if oneDNN
//     has a direct kernel for it.
std::shared_ptr<const ConvPlan> build_plan(const ConvKey& key) {
  constexpr int64_t kFewFeatures = 4;
  if (is_small_weight_gradient(key)) return make_small_plan(key);
  if (const auto parts = conv_parts(key); parts.size() > 1) return make_summed_plan(key, parts);
  if (key.pass == ConvPass::kInputGradient && key.groups == 1 && key.x.sizes[1] <= kFewFeatures)
    return make_onednn_plan(key, ConvLayout::kFeaturesFirst);
  if (is_channels_last(key) || is_pointwise(key)) return make_onednn_plan(key, ConvLayout::kCaller);
  auto plan = make_onednn_plan(key, ConvLayout::kAny);
  if (key.pass != ConvPass::kWeightGradient || !is_gemm(*plan)) return plan;
  auto channels_last = make_onednn_plan(key, ConvLayout::kChannelsLast);
  return is_gemm(*channels_last) ? plan : channels_last;
}

LruCache<ConvKey, ConvPlan, ConvKeyHash>& cache() {
  static LruCache<ConvKey, ConvPlan, ConvKeyHash> plans(kCapacity);
  return plans;
}

}  // namespace

std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key) {
  return cache().get(key, [&] { return build_plan(key); });
}

CacheInfo conv_plan_cache_info() { return cache().info(); }

void clear_conv_plan_cache() {
  cache().clear();
  onednn::clear_primitive_cache();
}

namespace {

// The workspace of a call.
struct Scratch {
  Scratch(const ConvPlan& plan, const ConvSchedule& schedule, std::byte* base) : arena(base) {
    const ConvKey& key = schedule.key;
    worker_bytes = round_up(plan.workspace_bytes(), 64);
    workers = arena.take<std::byte>(schedule.num_workers * worker_bytes);
    if (key.pass != ConvPass::kWeightGradient) return;
    weights = elements(key.w, key.spatial);
    features = key.has_bias ? key.w.sizes[0] : 0;
    gradients = arena.take<float>(schedule.num_problems * (schedule.num_parts - 1) * (weights + features));
  }

  // The weight gradient of a part other than the first of its problem, followed by the bias gradient.
  float* gradient(int64_t problem, int64_t part, int64_t num_parts) const {
    return gradients + (problem * (num_parts - 1) + part - 1) * (weights + features);
  }

  Arena arena;
  int64_t worker_bytes, weights = 0, features = 0;
  std::byte* workers;
  float* gradients = nullptr;
};

}  // namespace

int64_t conv_workspace(const ConvPlan& plan, const ConvSchedule& schedule) {
  return Scratch(plan, schedule, nullptr).arena.bytes();
}

void run_conv(const ConvPlan& plan, const ConvSchedule& schedule, const ConvArrays& arrays, std::byte* workspace,
              Parallel& parallel) {
  const Scratch scratch(plan, schedule, workspace);
  const int64_t num_parts = schedule.num_parts;
  const bool is_weight_gradient = schedule.key.pass == ConvPass::kWeightGradient;
  auto run_part = [&](int64_t problem, int64_t part, std::byte* own_workspace) {
    const std::byte* const first = arrays.first.of(problem) + part * (arrays.first.bytes / num_parts);
    const std::byte* second = arrays.second.of(problem);
    std::byte *bias = arrays.bias.of(problem), *result = arrays.result.of(problem);
    if (!is_weight_gradient) {
      result += part * (arrays.result.bytes / num_parts);
    } else {
      second += part * (arrays.second.bytes / num_parts);
      if (part > 0) {
        float* const gradient = scratch.gradient(problem, part, num_parts);
        result = reinterpret_cast<std::byte*>(gradient);
        if (bias != nullptr) bias = reinterpret_cast<std::byte*>(gradient + scratch.weights);
      }
    }
    plan.run(first, second, bias, result, own_workspace);
  };
  std::atomic<int64_t> next{0};
  auto worker = [&](int64_t index) {
    std::byte* const own_workspace = scratch.workers + index * scratch.worker_bytes;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < schedule.num_problems * num_parts;)
      run_part(i / num_parts, i % num_parts, own_workspace);
  };
  parallel.run(schedule.num_workers, &worker,
               [](void* context, int64_t index) { (*static_cast<decltype(worker)*>(context))(index); });
  if (!is_weight_gradient || num_parts == 1) return;
  // Each worker adds the gradients of all parts, in their order, for some of the weights.
  auto adder = [&](int64_t index) {
    for (int64_t problem = 0; problem < schedule.num_problems; ++problem) {
      auto add_share = [&](std::byte* to, int64_t offset, int64_t count) {
        const int64_t first = count * index / schedule.num_workers, last = count * (index + 1) / schedule.num_workers;
        for (int64_t part = 1; part < num_parts; ++part)
          add(reinterpret_cast<float*>(to) + first, scratch.gradient(problem, part, num_parts) + offset + first,
              last - first);
      };
      add_share(arrays.result.of(problem), 0, scratch.weights);
      if (scratch.features > 0) add_share(arrays.bias.of(problem), scratch.weights, scratch.features);
    }
  };
  parallel.run(schedule.num_workers, &adder,
               [](void* context, int64_t index) { (*static_cast<decltype(adder)*>(context))(index); });
}

}  // namespace jaxgrad

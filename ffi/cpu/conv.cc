#include "conv.h"

#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "onednn_conv.h"

namespace jaxgrad {
namespace {

constexpr size_t kCapacity = 512;

// A bounded cache, the plan unused for longest leaving first.
class PlanCache {
 public:
  std::shared_ptr<const ConvPlan> get(const ConvKey& key) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (auto found = index_.find(key); found != index_.end()) {
        ++hits_;
        order_.splice(order_.begin(), order_, found->second);
        return found->second->second;
      }
      ++misses_;
    }
    // Built outside the lock: another thread may build the same plan, and then one of the two is dropped.
    auto plan = build_plan(key);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(key); found != index_.end()) return found->second->second;
    order_.emplace_front(key, plan);
    index_.emplace(key, order_.begin());
    if (order_.size() > kCapacity) {
      index_.erase(order_.back().first);
      order_.pop_back();
    }
    return plan;
  }

  ConvPlanCacheInfo info() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {hits_, misses_, static_cast<int64_t>(order_.size()), static_cast<int64_t>(kCapacity)};
  }

 private:
  static std::shared_ptr<const ConvPlan> build_plan(const ConvKey& key);

  using Entry = std::pair<ConvKey, std::shared_ptr<const ConvPlan>>;
  std::mutex mutex_;
  std::list<Entry> order_;
  std::unordered_map<ConvKey, std::list<Entry>::iterator, ConvKeyHash> index_;
  int64_t hits_ = 0, misses_ = 0;
};

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
//   direct
//     kernels would pad the features to blocks of 16.
//   - Other channels-last activations are read as they lie, and so are all others by the matrix product for each image
//     that a window of one element comes to.
//   - Others are reordered to what the kernel likes best, but for weight gradients whose kernel would then be a matrix
//     product on a copy of all windows (depthwise: 6x slower): these take the direct kernel of channels-last
//     activations.
std::shared_ptr<const ConvPlan> PlanCache::build_plan(const ConvKey& key) {
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

PlanCache& cache() {
  static PlanCache plans;
  return plans;
}

}  // namespace

bool ConvKey::operator==(const ConvKey& o) const {
  return kind == o.kind && type == o.type && has_bias == o.has_bias && spatial == o.spatial && groups == o.groups &&
         x == o.x && w == o.w && y == o.y && window_strides == o.window_strides && rhs_dilation == o.rhs_dilation &&
         padding_low == o.padding_low && padding_high == o.padding_high && threads == o.threads;
}

size_t ConvKeyHash::operator()(const ConvKey& key) const {
  size_t hash = 0;
  auto mix = [&](int64_t value) { hash = (hash ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u + (hash >> 29); };
  auto mix_all = [&](const auto& values) {
    for (int64_t value : values) mix(value);
  };
  mix(static_cast<int64_t>(key.kind));
  mix(static_cast<int64_t>(key.type));
  mix(key.has_bias);
  mix(key.spatial);
  mix(key.groups);
  for (const ConvOperand* operand : {&key.x, &key.w, &key.y}) {
    mix_all(operand->sizes);
    mix_all(operand->strides);
  }
  mix_all(key.window_strides);
  mix_all(key.rhs_dilation);
  mix_all(key.padding_low);
  mix_all(key.padding_high);
  mix(key.threads);
  return hash;
}

std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key) { return cache().get(key); }

ConvPlanCacheInfo conv_plan_cache_info() { return cache().info(); }

}  // namespace jaxgrad

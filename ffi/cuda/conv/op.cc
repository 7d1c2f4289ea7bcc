#include "cuda/conv/op.h"

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda/conv/execution.h"
#include "cuda/conv/graph.h"
#include "cuda/conv/search.h"

namespace jaxgrad {
namespace {

constexpr size_t kCapacity = 1024;

// Whether cuDNN does not support the problem, as opposed to a failure.
bool is_unsupported(const cudnn::Error& error) {
  const int category = CUDNN_STATUS_CATEGORY(error.status);
  return category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM;
}

ConvPointers pointers_of(ConvPass pass, const void* first, const void* second, const void* bias, void* result) {
  void *a = const_cast<void*>(first), *b = const_cast<void*>(second);
  switch (pass) {
    case ConvPass::kForward:
      return {a, b, result, const_cast<void*>(bias)};
    case ConvPass::kInputGradient:
      return {result, b, a, nullptr};
    default:
      return {a, result, b, nullptr};
  }
}

std::shared_ptr<const ConvPlan> build_first(const ConvKey& key, cudnn::Handle& handle, bool may_time,
                                            const std::set<int>& failed_places) {
  const driver::RelaxedCapture relaxed;
  ConvGraph graph = conv_graph(key, handle);
  std::vector<ConvCandidate> candidates = conv_candidates(key, graph);
  SearchOrder order = search_order(key, candidates, failed_places);
  if (key.search == ConvSearch::kExhaustive && failed_places.empty())
    move_fastest_to_front(key, candidates, handle, may_time, order);
  for (const int place : order.places) {
    ConvCandidate& candidate = candidates[place];
    try {
      auto made = std::make_shared<ConvPlan>();
      const auto built = order.built.find(place);
      made->plan = built == order.built.end() ? build_execution_plan(candidate, handle) : std::move(built->second);
      made->workspace_bytes = made->plan.integer(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
      if (made->workspace_bytes > key.workspace_limit) continue;
      made->reserved_bytes = std::max(order.reserved_bytes, made->workspace_bytes);
      made->name = candidate.name;
      made->place = place;
      made->failed_places = failed_places;
      made->pass = key.pass;
      made->descriptors = std::move(graph.descriptors);
      made->descriptors.push_back(std::move(candidate.config));
      return made;
    } catch (const cudnn::Error& error) {
      // Another candidate may need another workspace, and the lowered program must not depend on the free memory.
      const bool may_be_lowering = failed_places.empty();
      if (may_be_lowering && !is_unsupported(error) && driver::is_full()) throw driver::OutOfMemory(error.what());
      order.rejections += "; " + candidate.name + ": " + error.what();
    }
  }
  throw NoPlan("cuDNN has no plan for this convolution within " + std::to_string(key.workspace_limit) +
               " bytes of workspace" + order.rejections);
}

std::shared_ptr<const ConvPlan> build_plan(const ConvKey& key, cudnn::Handle& handle, bool may_time,
                                           const std::set<int>& failed_places) {
  try {
    return build_first(key, handle, may_time, failed_places);
  } catch (const cudnn::Error& error) {  // while the graph is described
    if (is_unsupported(error)) throw NoPlan(error.what());
    if (driver::is_full()) throw driver::OutOfMemory(error.what());
    throw;
  }
}

LruCache<ConvKey, ConvPlan, ConvKeyHash>& cache() {
  // Never destroyed: at exit, the driver may be unloaded before the plans.
  static auto& plans = *new LruCache<ConvKey, ConvPlan, ConvKeyHash>(kCapacity);
  return plans;
}

struct RetainedPlans {
  std::mutex mutex;
  std::unordered_set<std::shared_ptr<const ConvPlan>> plans;
};

RetainedPlans& retained_plans() {
  static auto& retained = *new RetainedPlans;
  return retained;
}

}  // namespace

void ConvPlan::run(const cudnn::Handle& handle, const void* first, const void* second, const void* bias, void* result,
                   void* workspace) const {
  execute(plan, handle, pointers_of(pass, first, second, bias, result), workspace);
}

std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key, cudnn::Handle& handle, bool may_time) {
  return cache().get(key, [&] {
    auto plan = build_plan(key, handle, may_time, {});
    // The call will run with exactly the reserved workspace as its limit. It has the same candidates and the same plan.
    ConvKey key_of_call = key;
    key_of_call.workspace_limit = plan->reserved_bytes;
    if (!(key_of_call == key)) cache().add(key_of_call, plan);
    return plan;
  });
}

std::shared_ptr<const ConvPlan> conv_plan_after(const ConvKey& key, const ConvPlan& failed, cudnn::Handle& handle) {
  std::set<int> failed_places = failed.failed_places;
  failed_places.insert(failed.place);
  auto plan = build_plan(key, handle, false, failed_places);
  cache().put(key, plan);
  return plan;
}

void retain_for_cuda_graph(std::shared_ptr<const ConvPlan> plan) {
  RetainedPlans& retained = retained_plans();
  const std::lock_guard<std::mutex> lock(retained.mutex);
  retained.plans.insert(std::move(plan));
}

int64_t num_retained_conv_plans() {
  RetainedPlans& retained = retained_plans();
  const std::lock_guard<std::mutex> lock(retained.mutex);
  return static_cast<int64_t>(retained.plans.size());
}

CacheInfo conv_plan_cache_info() { return cache().info(); }

}  // namespace jaxgrad

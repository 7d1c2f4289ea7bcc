#include "cuda/cudnn_conv/op.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/cudnn_conv/engine_check.h"
#include "cuda/cudnn_conv/execution.h"
#include "cuda/cudnn_conv/graph.h"
#include "cuda/cudnn_conv/search.h"
#include "cuda/cudnn_conv/trial.h"
#include "cuda/runtime/device_caches.h"

namespace jaxgrad {
namespace {

constexpr size_t kCapacity = 1024;  // plans of a device

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

// What cuDNN says about a problem.
struct Description {
  ConvGraph graph;
  std::vector<ConvCandidate> candidates;
};

Description describe(const ConvKey& key, bool capturing, bool with_known_wrong = false) {
  const cudnn::Handle handle(key.device);
  try {
    ConvGraph graph = conv_graph(key, handle);
    std::vector<ConvCandidate> candidates = conv_candidates(key, graph, with_known_wrong);
    return {std::move(graph), std::move(candidates)};
  } catch (const cudnn::Error& error) {
    if (cudnn::is_unsupported(error)) throw NoPlan(error.what());
    if (!capturing) handle.check_device(error);
    throw;
  }
}

// Fixes the workspace that the call reserves, given the first plan that was built, of the candidate
// order.places[first]. It does not depend on which engines are wrong: a process that cannot check them must lower the
// same program. If that plan is wrong, the candidates that fit are tried before those that need more, and one more
// candidate fits in any case.
void reserve_workspace(const ConvKey& key, const std::vector<ConvCandidate>& candidates, size_t first, int64_t bytes,
                       SearchOrder& order) {
  const auto next = order.places.begin() + static_cast<ptrdiff_t>(first) + 1;
  const auto workspace_of = [&](int place) { return candidates[place].workspace_bytes; };
  order.reserved_bytes = std::max(order.reserved_bytes, bytes);
  if (key.search != ConvSearch::kExhaustive && next != order.places.end()) {
    const auto least =
        std::min_element(next, order.places.end(), [&](int a, int b) { return workspace_of(a) < workspace_of(b); });
    order.reserved_bytes = std::max(order.reserved_bytes, workspace_of(*least));
  }
  std::stable_partition(next, order.places.end(),
                        [&](int place) { return workspace_of(place) <= order.reserved_bytes; });
}

// failed_places: empty unless a plan failed to run.
std::shared_ptr<const ConvPlan> build_plan(const ConvKey& key, bool capturing, const std::set<int>& failed_places) {
  const driver::RelaxedCapture relaxed;
  auto [graph, candidates] = describe(key, capturing);
  SearchOrder order = search_order(key, candidates, failed_places);
  EngineChecks checks(key, capturing);
  if (key.search == ConvSearch::kExhaustive && failed_places.empty())
    move_fastest_to_front(key, candidates, capturing, checks, order);
  bool reserved = false;
  for (size_t i = 0; i < order.places.size(); ++i) {
    const int place = order.places[i];
    ConvCandidate& candidate = candidates[place];
    try {
      auto made = std::make_shared<ConvPlan>();
      const auto built = order.built.find(place);
      ExecutionPlan plan = built == order.built.end() ? build_execution_plan(candidate, key.device, capturing)
                                                      : std::move(built->second);
      if (plan.workspace_bytes > key.workspace_limit) {
        order.rejections += "; " + candidate.name + " needs " + std::to_string(plan.workspace_bytes) + " bytes";
        continue;
      }
      if (!std::exchange(reserved, true)) reserve_workspace(key, candidates, i, plan.workspace_bytes, order);
      const Verdict verdict = checks.verdict(candidate, plan, /*trial=*/nullptr);
      if (verdict == Verdict::kWrong) {
        order.rejections +=
            "; " + candidate.name + (candidate.is_known_wrong ? " was wrong in cuDNN 9.19" : " computes wrong values");
        continue;
      }
      if (verdict == Verdict::kUnchecked) count_unchecked_plan();
      made->plan = std::move(plan.plan);
      made->workspace_bytes = plan.workspace_bytes;
      made->reserved_bytes = std::max(order.reserved_bytes, made->workspace_bytes);
      made->name = candidate.name;
      made->place = place;
      made->failed_places = failed_places;
      made->pass = key.pass;
      made->descriptors = std::move(graph.descriptors);
      made->descriptors.push_back(std::move(candidate.config));
      return made;
    } catch (const cudnn::Error& error) {
      order.rejections += "; " + candidate.name + ": " + error.what();
      order.failed = order.failed || !cudnn::is_unsupported(error);
    } catch (const driver::OutOfMemory& error) {
      // Another candidate may need another workspace, and the lowered program must not depend on the free memory. After
      // a plan failed to run the workspace is given, and a candidate that needs less memory may do.
      if (failed_places.empty()) throw;
      order.rejections += "; " + candidate.name + ": " + error.what();
      order.failed = true;
    }
  }
  const std::string within =
      " for this convolution within " + std::to_string(key.workspace_limit) + " bytes of workspace" + order.rejections;
  if (order.failed) throw std::runtime_error("cuDNN could not build a plan" + within);
  throw NoPlan("cuDNN has no plan" + within);
}

auto& caches() {
  // Without the plan that replaced one, the call would try the one again that failed to run.
  const auto replaced_another = [](const ConvPlan& plan) { return !plan.failed_places.empty(); };
  static auto& plans = *new DeviceCaches<ConvKey, ConvPlan, ConvKeyHash>(kCapacity, replaced_another);
  return plans;
}

// Held while a thread builds plans for a device: a second thread would disturb the measurements, and may need the same
// plan.
std::mutex& building_on(int device) {
  static std::mutex mutex;
  static auto& found = *new std::map<int, std::mutex>;
  const std::lock_guard<std::mutex> lock(mutex);
  return found[device];
}

}  // namespace

ConvPlan::~ConvPlan() {
  context_.free([&] {
    plan = cudnn::Descriptor();
    descriptors.clear();
  });
}

void ConvPlan::run(const cudnn::Handle& handle, const void* first, const void* second, const void* bias, void* result,
                   void* workspace) const {
  execute(plan, handle, pointers_of(pass, first, second, bias, result), workspace);
}

std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key, bool capturing) {
  auto& cache = caches().of(key.device);
  if (auto found = cache.find(key)) return found;
  const std::lock_guard<std::mutex> lock(building_on(key.device));
  return cache.get(key, [&] {
    auto plan = build_plan(key, capturing, {});
    // The call will run with exactly the reserved workspace as its limit. It has the same candidates and the same plan.
    ConvKey key_of_call = key;
    key_of_call.workspace_limit = plan->reserved_bytes;
    if (!(key_of_call == key)) cache.add(key_of_call, plan);
    return plan;
  });
}

std::shared_ptr<const ConvPlan> conv_plan_after(const ConvKey& key, const ConvPlan& failed, bool replace) {
  const std::lock_guard<std::mutex> lock(building_on(key.device));
  std::set<int> failed_places = failed.failed_places;
  failed_places.insert(failed.place);
  auto plan = build_plan(key, /*capturing=*/false, failed_places);
  if (replace) caches().of(key.device).put(key, plan);
  return plan;
}

std::vector<EngineResult> run_every_engine(const ConvKey& key, const EngineFilter& wanted) {
  const auto [graph, candidates] = describe(key, /*capturing=*/false, /*with_known_wrong=*/true);
  int64_t workspace = 0;
  for (const ConvCandidate& candidate : candidates)
    if (candidate.workspace_bytes <= key.workspace_limit) workspace = std::max(workspace, candidate.workspace_bytes);
  ConvTrial trial(key, workspace);
  if (!trial.has_reference()) throw std::runtime_error("NVRTC cannot compile the reference");
  std::vector<EngineResult> results;
  for (const ConvCandidate& candidate : candidates) {
    if (candidate.workspace_bytes > key.workspace_limit) continue;
    const std::string tag = tag_of(candidate);
    if (!wanted(tag, candidate.is_known_wrong)) continue;
    EngineResult& result = results.emplace_back(EngineResult{tag, 0, ""});
    try {
      const ExecutionPlan plan = build_execution_plan(candidate, key.device, /*capturing=*/false);
      if (trial.has_workspace(plan.workspace_bytes))
        result.error = trial.error_of(plan.plan, candidate.has_transforms);
      else
        result.failure = "the plan needs more workspace than cuDNN announced";
    } catch (const cudnn::Error& error) {
      result.failure = error.what();
    }
  }
  return results;
}

CacheInfo conv_plan_cache_info() { return caches().info(); }

}  // namespace jaxgrad

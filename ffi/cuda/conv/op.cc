#include "cuda/conv/op.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "cuda/conv/graph.h"
#include "cuda/conv/plan_key.h"
#include "cuda/conv/plan_store.h"

namespace jaxgrad {
namespace {

using cudnn::api;
using cudnn::Descriptor;

constexpr size_t kCapacity = 1024;
constexpr size_t kTimed = 8;  // candidates that the exhaustive search times; building all 15 to 45 takes up to 24 s
constexpr int64_t kLeastLean = 64 << 20;
constexpr double kTimingSeconds = 0.8;
constexpr int kTimedRuns = 3;
constexpr float kFarFromBest = 1.5f;       // times the best of the first runs: not timed again
constexpr uint32_t kPattern = 0x3c003c00;  // 1 in float16, 0.0078 in bfloat16 and float32

int64_t bytes_of(const ConvKey& key, const ConvOperand& operand) {
  int64_t bytes = bytes_of(key.type);
  for (int axis = 0; axis < key.spatial + 2; ++axis) bytes *= operand.sizes[axis];
  return bytes;
}

Descriptor build(const ConvCandidate& candidate, const cudnn::Handle& handle) {
  Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle.get())
      .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, candidate.config)
      .finalise();
  return plan;
}

// Whether cuDNN says that it cannot do what it is asked, rather than that something went wrong.
bool is_refusal(const cudnn::Error& error) {
  const int category = CUDNN_STATUS_CATEGORY(error.status);
  return category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM;
}

// x, w, y and the bias, null where there is none.
using Operands = std::array<void*, 4>;

// In the order of their ids, from the operands of a kind.
Operands in_order(ConvKind kind, const void* first, const void* second, const void* bias, void* result) {
  void *a = const_cast<void*>(first), *b = const_cast<void*>(second);
  switch (kind) {
    case ConvKind::kForward:
      return {a, b, result, const_cast<void*>(bias)};
    case ConvKind::kBackwardInput:
      return {result, b, a, nullptr};
    default:
      return {a, result, b, nullptr};
  }
}

void execute(const Descriptor& plan, const cudnn::Handle& handle, Operands operands, void* workspace) {
  constexpr std::array<int64_t, 4> ids = {kXId, kWId, kYId, kBiasId};
  const int64_t count = operands.back() == nullptr ? 3 : 4;
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids.data(), count)
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, operands.data(), count)
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &workspace, 1)
      .finalise();
  JAXGRAD_CUDNN(api().cudnnBackendExecute(handle.get(), plan.get(), pack.get()));
}

// What a candidate of the exhaustive search may ask for, all of which a call reserves, whether or not the fastest needs
// it: as much as the operands and the result take, or the first candidate, which a call without a search would take.
int64_t lean_bytes(const ConvKey& key, const std::vector<ConvCandidate>& candidates) {
  const int64_t operands = bytes_of(key, key.x) + bytes_of(key, key.w) + bytes_of(key, key.y);
  const int64_t first = candidates.empty() ? 0 : candidates.front().workspace_bytes;
  return std::max({kLeastLean, operands, first});
}

// The candidates that are to be tried, by their places in the list, and why the others are not.
struct Tries {
  std::vector<int> places;
  size_t timed = 0;                 // how many of the first ones are to be timed
  std::map<int, Descriptor> built;  // by place: cuDNN does not always build a plan a second time
  int64_t reserved_bytes = 0;
  std::string refused;
};

Tries tries(const ConvKey& key, const std::vector<ConvCandidate>& candidates, const std::set<int>& failed) {
  Tries found;
  std::vector<int> large;
  const int64_t most_lean = lean_bytes(key, candidates);
  for (size_t i = 0; i < candidates.size(); ++i) {
    const ConvCandidate& candidate = candidates[i];
    if (failed.count(static_cast<int>(i)) > 0) continue;
    if (candidate.workspace_bytes > key.workspace_limit) {
      found.refused += "; " + candidate.name + " needs " + std::to_string(candidate.workspace_bytes) + " bytes";
      continue;
    }
    const bool lean = key.search != ConvSearch::kExhaustive || candidate.workspace_bytes <= most_lean;
    (lean ? found.places : large).push_back(static_cast<int>(i));
  }
  if (key.search == ConvSearch::kExhaustive) {
    found.timed = std::min(kTimed, found.places.size());
    for (size_t i = 0; i < found.timed; ++i)
      found.reserved_bytes = std::max(found.reserved_bytes, candidates[found.places[i]].workspace_bytes);
  }
  found.places.insert(found.places.end(), large.begin(), large.end());
  return found;
}

struct Timed {
  float milliseconds;
  int place;
  Descriptor plan;
};

// The plans of the first few candidates with the time of each: the best of some runs, in turns, so that what else the
// device does hits all of them alike. Empty where the device has no memory to time in.
std::vector<Timed> timed_plans(const ConvKey& key, const std::vector<ConvCandidate>& candidates, cudnn::Handle& handle,
                               const Tries& tries) {
  using Clock = std::chrono::steady_clock;
  std::vector<Timed> timed;
  const auto start = Clock::now();
  try {
    driver::Stopwatch watch;
    driver::Memory x(bytes_of(key, key.x)), w(bytes_of(key, key.w)), y(bytes_of(key, key.y)),
        bias(key.has_bias ? bytes_of(key, bias_of(key)) : 0), workspace(tries.reserved_bytes);
    for (driver::Memory* memory : {&x, &w, &y, &bias, &workspace}) memory->fill(kPattern, watch.stream());
    const Operands operands = {x.data(), w.data(), y.data(), key.has_bias ? bias.data() : nullptr};
    handle.set_stream(watch.stream());
    const auto milliseconds = [&](const Descriptor& plan) {
      watch.start();
      execute(plan, handle, operands, workspace.data());
      return watch.stop_milliseconds();
    };
    for (size_t i = 0; i < tries.timed; ++i) {
      if (!timed.empty() && std::chrono::duration<double>(Clock::now() - start).count() > kTimingSeconds) break;
      try {
        const int place = tries.places[i];
        Descriptor plan = build(candidates[place], handle);
        milliseconds(plan);  // loads its kernels
        const float first = milliseconds(plan);
        timed.push_back({first, place, std::move(plan)});
      } catch (const cudnn::Error&) {  // one that does not build or run is no candidate for the fastest
      }
    }
    float best = std::numeric_limits<float>::max();
    for (const Timed& one : timed) best = std::min(best, one.milliseconds);
    for (int run = 0; run < kTimedRuns; ++run) {
      for (Timed& one : timed) {
        if (one.milliseconds > kFarFromBest * best) continue;
        try {
          one.milliseconds = std::min(one.milliseconds, milliseconds(one.plan));
        } catch (const cudnn::Error&) {  // nor is one that fails later
          one.milliseconds = std::numeric_limits<float>::max();
        }
      }
    }
    handle.leave_stream();
  } catch (const driver::Error& error) {
    handle.leave_stream();
    if (error.status != CUDA_ERROR_OUT_OF_MEMORY) throw;
    return {};
  }
  return timed;
}

// Moves the fastest of the first few to the front; leaves all as they are where none could be timed.
void sort_by_time(const ConvKey& key, const std::vector<ConvCandidate>& candidates, cudnn::Handle& handle,
                  Tries& tries) {
  if (tries.timed < 2) return;
  std::vector<Timed> timed = timed_plans(key, candidates, handle, tries);
  std::sort(timed.begin(), timed.end(), [](const Timed& a, const Timed& b) { return a.milliseconds < b.milliseconds; });
  std::vector<int> sorted;
  for (Timed& one : timed) {
    sorted.push_back(one.place);
    tries.built.emplace(one.place, std::move(one.plan));
  }
  for (int place : tries.places)
    if (std::find(sorted.begin(), sorted.end(), place) == sorted.end()) sorted.push_back(place);
  tries.places = std::move(sorted);
}

// A candidate's place in cuDNN's list, and what stands there: what is kept of a choice.
std::string choice_of(const std::vector<ConvCandidate>& candidates, int place) {
  return std::to_string(place) + " " + tag_of(candidates[place]);
}

// Moves the choice of an earlier process, or for another device of the same kind, to the front; false where none is
// kept, or it is none of this list's any more.
bool take_kept_choice(const std::string& kept_under, const std::vector<ConvCandidate>& candidates,
                      const cudnn::Handle& handle, Tries& tries) {
  const std::optional<std::string> kept = plan_store().find(kept_under);
  if (!kept) return false;
  const auto end = tries.places.begin() + static_cast<ptrdiff_t>(tries.timed);
  const auto is_it = [&](int place) { return choice_of(candidates, place) == *kept; };
  const auto chosen = std::find_if(tries.places.begin(), end, is_it);
  if (chosen == end) return false;
  try {
    tries.built.emplace(*chosen, build(candidates[*chosen], handle));
  } catch (const cudnn::Error&) {  // then it is searched for as ever
    return false;
  }
  std::rotate(tries.places.begin(), chosen, chosen + 1);
  return true;
}

// The exhaustive search's order: the choice of this process first, or else of an earlier one, or else the fastest.
void choose(const ConvKey& key, const std::vector<ConvCandidate>& candidates, cudnn::Handle& handle, bool may_time,
            Tries& tries) {
  const std::string kept_under = choice_key(key, tries.reserved_bytes);
  if (take_kept_choice(kept_under, candidates, handle, tries) || !may_time) return;
  sort_by_time(key, candidates, handle, tries);
  const bool timed = !tries.built.empty();
  if (timed) plan_store().keep(kept_under, choice_of(candidates, tries.places.front()));
}

std::shared_ptr<const ConvPlan> first_that_builds(const ConvKey& key, cudnn::Handle& handle, bool may_time,
                                                  const std::set<int>& failed) {
  const driver::RelaxedCapture relaxed;
  ConvGraph graph = conv_graph(key, handle);
  std::vector<ConvCandidate> candidates = conv_candidates(key, graph);
  Tries found = tries(key, candidates, failed);
  if (key.search == ConvSearch::kExhaustive && failed.empty()) choose(key, candidates, handle, may_time, found);
  for (const int place : found.places) {
    ConvCandidate& candidate = candidates[place];
    try {
      auto made = std::make_shared<ConvPlan>();
      const auto built = found.built.find(place);
      made->plan = built == found.built.end() ? build(candidate, handle) : std::move(built->second);
      made->workspace_bytes = made->plan.integer(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
      if (made->workspace_bytes > key.workspace_limit) continue;
      made->reserved_bytes = std::max(found.reserved_bytes, made->workspace_bytes);
      made->name = candidate.name;
      made->candidate = place;
      made->failed = failed;
      made->kind = key.kind;
      made->parts = std::move(graph.parts);
      made->parts.push_back(std::move(candidate.config));
      return made;
    } catch (const cudnn::Error& error) {
      // Another plan may take another workspace: what is lowered must not depend on the memory that happens to be free.
      const bool may_be_lowered = failed.empty();
      if (may_be_lowered && !is_refusal(error) && driver::is_full()) throw driver::OutOfMemory(error.what());
      found.refused += "; " + candidate.name + ": " + error.what();
    }
  }
  throw NoPlan("cuDNN has no plan for this convolution within " + std::to_string(key.workspace_limit) +
               " bytes of workspace" + found.refused);
}

// What cuDNN refuses while the graph is described, it has no plan for; other failures stay what they are.
std::shared_ptr<const ConvPlan> build_plan(const ConvKey& key, cudnn::Handle& handle, bool may_time,
                                           const std::set<int>& failed) {
  try {
    return first_that_builds(key, handle, may_time, failed);
  } catch (const cudnn::Error& error) {
    if (is_refusal(error)) throw NoPlan(error.what());
    if (driver::is_full()) throw driver::OutOfMemory(error.what());
    throw;
  }
}

PlanCache<ConvKey, ConvPlan, ConvKeyHash>& cache() {
  static auto& plans = *new PlanCache<ConvKey, ConvPlan, ConvKeyHash>(kCapacity);  // the driver may be gone at exit
  return plans;
}

struct Kept {
  std::mutex mutex;
  std::unordered_set<std::shared_ptr<const ConvPlan>> plans;
};

Kept& kept_for_graphs() {
  static auto& kept = *new Kept;
  return kept;
}

}  // namespace

bool ConvKey::operator==(const ConvKey& o) const {
  return ConvShape::operator==(o) && type == o.type && has_bias == o.has_bias && relu == o.relu &&
         allow_tf32 == o.allow_tf32 && deterministic == o.deterministic && search == o.search &&
         workspace_limit == o.workspace_limit && device == o.device;
}

size_t ConvKeyHash::operator()(const ConvKey& key) const {
  Hash hash;
  hash.mix(static_cast<const ConvShape&>(key));
  hash.mix(static_cast<int64_t>(key.type));
  hash.mix(key.has_bias);
  hash.mix(key.relu);
  hash.mix(key.allow_tf32);
  hash.mix(key.deterministic);
  hash.mix(static_cast<int64_t>(key.search));
  hash.mix(key.workspace_limit);
  hash.mix(key.device);
  return hash.value();
}

void ConvPlan::run(const cudnn::Handle& handle, const void* first, const void* second, const void* bias, void* result,
                   void* workspace) const {
  execute(plan, handle, in_order(kind, first, second, bias, result), workspace);
}

std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key, cudnn::Handle& handle, bool may_time) {
  return cache().get(key, [&] {
    auto plan = build_plan(key, handle, may_time, {});
    // A call that has just what the plan asks to be reserved has the same candidates, and so the same plan.
    ConvKey as_called = key;
    as_called.workspace_limit = plan->reserved_bytes;
    if (!(as_called == key)) cache().add(as_called, plan);
    return plan;
  });
}

std::shared_ptr<const ConvPlan> conv_plan_after(const ConvKey& key, const ConvPlan& failed, cudnn::Handle& handle) {
  std::set<int> all = failed.failed;
  all.insert(failed.candidate);
  auto plan = build_plan(key, handle, false, all);
  cache().put(key, plan);
  return plan;
}

void keep_for_graph(std::shared_ptr<const ConvPlan> plan) {
  Kept& kept = kept_for_graphs();
  const std::lock_guard<std::mutex> lock(kept.mutex);
  kept.plans.insert(std::move(plan));
}

int64_t conv_plans_kept() {
  Kept& kept = kept_for_graphs();
  const std::lock_guard<std::mutex> lock(kept.mutex);
  return static_cast<int64_t>(kept.plans.size());
}

PlanCacheInfo conv_plan_cache_info() { return cache().info(); }

}  // namespace jaxgrad

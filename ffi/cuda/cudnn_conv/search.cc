#include "cuda/cudnn_conv/search.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <utility>

#include "cuda/cudnn_conv/plan_store.h"
#include "cuda/cudnn_conv/trial.h"

namespace jaxgrad {
namespace {

// The exhaustive search times at most this many candidates: building all 15 to 45 takes up to 24 s.
constexpr size_t kMaxTimed = 8;
constexpr int64_t kMinSearchWorkspace = 64 << 20;  // bytes
constexpr double kTimingSeconds = 0.8;             // no further candidate is built after this time
constexpr int kTimedRuns = 3;
constexpr float kSlowFactor = 1.5f;  // candidates slower than this times the best are not timed again

// The largest workspace of a candidate of the exhaustive search. A call reserves the largest workspace of all timed
// candidates, whichever is chosen. So the cap is the size of the operands and the result, but at least the workspace of
// the first candidate, which a call without a search would use.
int64_t search_workspace_cap(const ConvKey& key, const std::vector<ConvCandidate>& candidates) {
  const int64_t arrays = bytes_of(key, key.x) + bytes_of(key, key.w) + bytes_of(key, key.y);
  const int64_t first = candidates.empty() ? 0 : candidates.front().workspace_bytes;
  return std::max({kMinSearchWorkspace, arrays, first});
}

struct TimedPlan {
  float milliseconds;
  int place;
  ExecutionPlan plan;
};

struct TimedPlans {
  std::vector<TimedPlan> plans;
  bool complete = true;  // no candidate is missing for a lack of memory, which may pass
};

// Times the first candidates that are right: the minimum of several runs. The runs of the candidates alternate, so that
// other work on the device slows all of them alike. Returns an empty list if the device lacks the memory.
TimedPlans time_plans(const ConvKey& key, const std::vector<ConvCandidate>& candidates, const SearchOrder& order,
                      EngineChecks& checks) {
  using Clock = std::chrono::steady_clock;
  TimedPlans found;
  std::vector<TimedPlan>& timed = found.plans;
  try {
    ConvTrial trial(key, order.reserved_bytes);
    const auto start = Clock::now();
    for (size_t i = 0; i < order.num_timed; ++i) {
      if (!timed.empty() && std::chrono::duration<double>(Clock::now() - start).count() > kTimingSeconds) break;
      try {
        const int place = order.places[i];
        ExecutionPlan plan = build_execution_plan(candidates[place], key.device, /*capturing=*/false);
        if (!trial.has_workspace(plan.workspace_bytes)) continue;
        if (checks.verdict(candidates[place], plan, &trial) == Verdict::kWrong) continue;
        trial.run(plan.plan);  // loads the kernels
        const float first = trial.run(plan.plan);
        timed.push_back({first, place, std::move(plan)});
      } catch (const cudnn::Error&) {  // a candidate that cannot be built or run is skipped
      } catch (const driver::OutOfMemory&) {
        found.complete = false;
      }
    }
    float best = std::numeric_limits<float>::max();
    for (const TimedPlan& candidate : timed) best = std::min(best, candidate.milliseconds);
    for (int run = 0; run < kTimedRuns; ++run) {
      for (TimedPlan& candidate : timed) {
        if (candidate.milliseconds > kSlowFactor * best) continue;
        try {
          candidate.milliseconds = std::min(candidate.milliseconds, trial.run(candidate.plan.plan));
        } catch (const cudnn::Error&) {
          candidate.milliseconds = std::numeric_limits<float>::max();
        } catch (const driver::OutOfMemory&) {
          candidate.milliseconds = std::numeric_limits<float>::max();
          found.complete = false;
        }
      }
    }
  } catch (const driver::Error& error) {
    if (error.status != CUDA_ERROR_OUT_OF_MEMORY) throw;
    return {{}, false};
  }
  return found;
}

// Sorts the timed candidates by time. Does not change the order if none could be timed. Returns whether the first one
// is the fastest of all candidates that work.
bool sort_by_time(const ConvKey& key, const std::vector<ConvCandidate>& candidates, EngineChecks& checks,
                  SearchOrder& order) {
  if (order.num_timed < 2) return false;
  TimedPlans found = time_plans(key, candidates, order, checks);
  std::vector<TimedPlan>& timed = found.plans;
  std::sort(timed.begin(), timed.end(),
            [](const TimedPlan& a, const TimedPlan& b) { return a.milliseconds < b.milliseconds; });
  std::vector<int> sorted;
  for (TimedPlan& candidate : timed) {
    sorted.push_back(candidate.place);
    order.built.emplace(candidate.place, std::move(candidate.plan));
  }
  for (int place : order.places)
    if (std::find(sorted.begin(), sorted.end(), place) == sorted.end()) sorted.push_back(place);
  order.places = std::move(sorted);
  return found.complete && !timed.empty();
}

// The value in the plan store: the place of a candidate in the list of cuDNN, and its engine and knobs.
std::string stored_value(const std::vector<ConvCandidate>& candidates, int place) {
  return std::to_string(place) + " " + tag_of(candidates[place]);
}

// Moves the stored candidate to the front. Returns false if nothing is stored, or the candidate is not in this list or
// wrong.
bool move_stored_to_front(const std::string& stored_key, const std::vector<ConvCandidate>& candidates, int device,
                          bool capturing, EngineChecks& checks, SearchOrder& order) {
  const std::optional<std::string> stored = plan_store().find(stored_key);
  if (!stored) return false;
  const auto end = order.places.begin() + static_cast<ptrdiff_t>(order.num_timed);
  const auto is_stored = [&](int place) { return stored_value(candidates, place) == *stored; };
  const auto chosen = std::find_if(order.places.begin(), end, is_stored);
  if (chosen == end) return false;
  try {
    ExecutionPlan plan = build_execution_plan(candidates[*chosen], device, capturing);
    if (checks.verdict(candidates[*chosen], plan, /*trial=*/nullptr) == Verdict::kWrong) return false;
    order.built.emplace(*chosen, std::move(plan));
  } catch (const cudnn::Error&) {  // the search then runs as if nothing were stored
    return false;
  }
  std::rotate(order.places.begin(), chosen, chosen + 1);
  return true;
}

}  // namespace

SearchOrder search_order(const ConvKey& key, const std::vector<ConvCandidate>& candidates,
                         const std::set<int>& failed_places) {
  SearchOrder order;
  std::vector<int> above_cap;
  const int64_t cap = search_workspace_cap(key, candidates);
  for (size_t i = 0; i < candidates.size(); ++i) {
    const ConvCandidate& candidate = candidates[i];
    if (failed_places.count(static_cast<int>(i)) > 0) continue;
    if (candidate.workspace_bytes > key.workspace_limit) {
      order.rejections += "; " + candidate.name + " needs " + std::to_string(candidate.workspace_bytes) + " bytes";
      continue;
    }
    const bool within_cap = key.search != ConvSearch::kExhaustive || candidate.workspace_bytes <= cap;
    (within_cap ? order.places : above_cap).push_back(static_cast<int>(i));
  }
  if (key.search == ConvSearch::kExhaustive) {
    order.num_timed = std::min(kMaxTimed, order.places.size());
    for (size_t i = 0; i < order.num_timed; ++i)
      order.reserved_bytes = std::max(order.reserved_bytes, candidates[order.places[i]].workspace_bytes);
  }
  order.places.insert(order.places.end(), above_cap.begin(), above_cap.end());
  return order;
}

void move_fastest_to_front(const ConvKey& key, const std::vector<ConvCandidate>& candidates, bool capturing,
                           EngineChecks& checks, SearchOrder& order) {
  const std::string stored_key = stored_plan_key(key, order.reserved_bytes);
  if (move_stored_to_front(stored_key, candidates, key.device, capturing, checks, order) || capturing) return;
  if (sort_by_time(key, candidates, checks, order))
    plan_store().put(stored_key, stored_value(candidates, order.places.front()));
}

}  // namespace jaxgrad

// The three convolution passes on the GPU, computed by cuDNN. No XLA types.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/lru_cache.h"
#include "cuda/cudnn_conv/plan_key.h"
#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/no_plan.h"

namespace jaxgrad {

// A cuDNN engine, built for one key. Immutable.
class ConvPlan {
 public:
  ~ConvPlan();
  ConvPlan() = default;
  ConvPlan(const ConvPlan&) = delete;
  ConvPlan& operator=(const ConvPlan&) = delete;

  // first, second: (x, w), (dy, w) or (x, dy), depending on the pass. bias: null without bias. The handle is that of
  // the plan's device. Throws cudnn::Error.
  void run(const cudnn::Handle& handle, const void* first, const void* second, const void* bias, void* result,
           void* workspace) const;

  int64_t workspace_bytes = 0;  // needed by this plan
  int64_t reserved_bytes = 0;   // to be reserved by the call, enough for every plan that the search may choose
  std::string name;             // the engine's number in cuDNN, such as "engine 52"
  int place = 0;                // in the list of candidates
  std::set<int> failed_places;  // of candidates that failed to run and are excluded
  ConvPass pass{};
  std::deque<cudnn::Descriptor> descriptors;  // of the graph and the engine configuration, which the plan refers to
  cudnn::Descriptor plan;

 private:
  driver::OwningContext context_;
};

// Returns the cached plan of a key and builds it on a miss. The key's device must be current; the caller must not hold
// its handle. Candidates are not timed if `capturing`: while the stream is captured. Throws NoPlan if cuDNN supports no
// plan. Other exceptions may pass: driver::OutOfMemory if memory lacks to build a plan, driver::DeviceFault,
// cudnn::Error, and std::runtime_error if every candidate failed. Thread-safe.
std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key, bool capturing);

// Returns the plan after one that failed to run. `replace`: for later calls as well. Throws as conv_plan() does.
std::shared_ptr<const ConvPlan> conv_plan_after(const ConvKey& key, const ConvPlan& failed, bool replace);

CacheInfo conv_plan_cache_info();

// The result of running one engine of cuDNN for a problem, for tests.
struct EngineResult {
  std::string tag;      // number and knobs
  double error;         // as ConvTrial::error_of() returns it
  std::string failure;  // why it cannot run; empty if it runs
};

// Asked before an engine runs, with its tag and whether it is known to be wrong.
using EngineFilter = std::function<bool(const std::string& tag, bool is_known_wrong)>;

// Runs every engine that cuDNN lists for the key and that is wanted. Throws std::runtime_error if nothing can be
// checked.
std::vector<EngineResult> run_every_engine(const ConvKey& key, const EngineFilter& wanted);

}  // namespace jaxgrad

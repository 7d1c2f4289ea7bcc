// The three convolution passes on the GPU, computed by cuDNN. No XLA types.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>

#include "common/lru_cache.h"
#include "cuda/conv/plan_key.h"
#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/no_plan.h"

namespace jaxgrad {

// A cuDNN engine, built for one key. Immutable. Running it requires the handle of its device.
class ConvPlan {
 public:
  // first, second: (x, w), (dy, w) or (x, dy), depending on the pass. bias: null without bias.
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
};

// Returns the cached plan of a key and builds it on a miss. The caller holds the handle of the key's device. Candidates
// are timed only if `may_time`, which must be false while the stream is captured. Throws NoPlan if cuDNN has no plan,
// and driver::OutOfMemory if the device lacks the memory to build one. Thread-safe.
std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key, cudnn::Handle& handle, bool may_time);

// Replaces a plan that failed to run by the next one. Throws as conv_plan() does.
std::shared_ptr<const ConvPlan> conv_plan_after(const ConvKey& key, const ConvPlan& failed, cudnn::Handle& handle);

// Keeps a plan for the rest of the process: a CUDA graph was captured from it and runs its code.
void retain_for_cuda_graph(std::shared_ptr<const ConvPlan> plan);

int64_t num_retained_conv_plans();

CacheInfo conv_plan_cache_info();

}  // namespace jaxgrad

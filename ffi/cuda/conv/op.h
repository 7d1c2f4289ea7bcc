// The convolution triangle on the GPU, by cuDNN: y = conv(x, w) and its two transposes, dx from (dy, w), dw from (x,
// dy).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/conv_problem.h"
#include "common/lru_cache.h"
#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

// How a plan is chosen among those that cuDNN offers for a shape.
enum class ConvSearch : int64_t {
  kHeuristic = 0,   // the first that works of those which cuDNN's model ranks by speed
  kExhaustive = 1,  // the fastest of the first few of them, timed once
  kDefault = 2      // the first that works of those which cuDNN lists as working in general
};

// Everything that a plan bakes in; what plans are cached under.
struct ConvKey : ConvShape {
  FloatType type{};
  bool has_bias = false;   // forward: [output features] are added to the result, before it is written
  bool relu = false;       // forward: and then its negative elements become zero; NaN stays NaN
  bool allow_tf32 = true;  // float32 operands may be rounded to TF32, on tensor cores
  bool deterministic = false;
  ConvSearch search{};
  int64_t workspace_limit = 0;  // bytes
  int device = 0;

  bool operator==(const ConvKey& other) const;
};

struct ConvKeyHash {
  size_t operator()(const ConvKey& key) const;
};

// cuDNN has no plan for a key; what() says why.
class NoPlan : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One engine of cuDNN's, made ready for one shape. Immutable, and run by the holder of its device's handle.
class ConvPlan {
 public:
  // The operands, in the order of the kind's name: (x, w), (dy, w) or (x, dy). bias: null without one.
  void run(const cudnn::Handle& handle, const void* first, const void* second, const void* bias, void* result,
           void* workspace) const;

  int64_t workspace_bytes = 0;  // what it needs
  int64_t reserved_bytes = 0;   // what a call should have, so that any plan which the search may choose fits
  std::string name;             // cuDNN's number of the engine, such as "engine 52"
  int candidate = 0;            // its place in cuDNN's list
  std::set<int> failed;         // places passed over because the plans there failed to run

  ConvKind kind{};
  // Built from first to last, each from those before; kept as long as the plan.
  std::vector<cudnn::Descriptor> parts;
  cudnn::Descriptor plan;
};

// The plan of a key: built at its first use, then kept. Throws NoPlan, and driver::OutOfMemory where nothing can be
// built for want of memory, which is no property of the key. Thread-safe. The caller holds `handle`, which is
// that of the key's device. Candidates are timed only where `may_time` says so: never while a stream is being captured.
std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key, cudnn::Handle& handle, bool may_time);

// The plan to take in the place of one that failed to run; kept from then on. Throws as conv_plan() does.
std::shared_ptr<const ConvPlan> conv_plan_after(const ConvKey& key, const ConvPlan& failed, cudnn::Handle& handle);

// Keeps a plan for good: a CUDA graph was recorded from it, which runs the plan's code for as long as it lives.
void keep_for_graph(std::shared_ptr<const ConvPlan> plan);

int64_t conv_plans_kept();  // by keep_for_graph

PlanCacheInfo conv_plan_cache_info();

}  // namespace jaxgrad

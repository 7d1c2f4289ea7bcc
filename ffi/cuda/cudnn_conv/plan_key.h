// The keys of convolution plans: in the cache of this process, and in the plan store that processes share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/conv_problem.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

// How a plan is chosen among the candidates that cuDNN lists.
enum class ConvSearch : int64_t {
  kHeuristic = 0,   // the first of the heuristic list, which is ranked by predicted speed, that can be built
  kExhaustive = 1,  // the fastest of the first candidates of that list, which are timed once
  kFallback = 2     // the first of the fallback list, which has generic engines, that can be built
};

// Everything that a plan depends on.
struct ConvKey : ConvProblem {
  FloatType type{};
  bool has_bias = false;   // forward: a bias [output features] is added to the result before it is written
  bool relu = false;       // forward: then negative elements become zero; NaN is propagated
  bool allow_tf32 = true;  // float32 operands may be rounded to TF32 for tensor cores
  bool deterministic = false;
  ConvSearch search{};
  int64_t workspace_limit = 0;  // bytes
  int device = 0;

  bool operator==(const ConvKey& other) const;
};

struct ConvKeyHash {
  size_t operator()(const ConvKey& key) const;
};

// The key of a timed result in the plan store: problem, math settings, cuDNN build and GPU.
//
// The workspace limit is not part of it, but `reserved_bytes`, the workspace of the candidates that were timed. A call
// runs with exactly this workspace, and so finds the result that was stored while the call was lowered.
std::string stored_plan_key(const ConvKey& key, int64_t reserved_bytes);

// The key of the verdicts on engines: problem, precision, cuDNN build and GPU.
std::string stored_check_key(const ConvKey& key);

}  // namespace jaxgrad

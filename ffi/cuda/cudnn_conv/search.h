// The order in which the candidates of a convolution are tried. The exhaustive search times the first ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cuda/cudnn_conv/engine_check.h"
#include "cuda/cudnn_conv/execution.h"
#include "cuda/cudnn_conv/graph.h"
#include "cuda/cudnn_conv/plan_key.h"
#include "cuda/runtime/cudnn.h"

namespace jaxgrad {

struct SearchOrder {
  std::vector<int> places;             // indices into the list of candidates, in the order in which they are tried
  size_t num_timed = 0;                // how many of the first places the exhaustive search times
  std::map<int, ExecutionPlan> built;  // plans by place; cuDNN does not always build a plan a second time
  int64_t reserved_bytes = 0;          // the largest workspace of the timed candidates
  std::string rejections;              // why the other candidates are not tried
  bool failed = false;                 // for a reason that may pass, some candidate could not be built
};

// Excludes candidates that exceed the workspace limit of the key, and those at `failed_places`.
SearchOrder search_order(const ConvKey& key, const std::vector<ConvCandidate>& candidates,
                         const std::set<int>& failed_places);

// Moves the fastest candidate to the front: the one in the plan store, otherwise, unless `capturing`, the one that is
// measured to be the fastest of those that are right. A measured result is stored. Holds the handle of the device only
// for short times: other threads launch their calls while this one waits for measurements.
void move_fastest_to_front(const ConvKey& key, const std::vector<ConvCandidate>& candidates, bool capturing,
                           EngineChecks& checks, SearchOrder& order);

}  // namespace jaxgrad

// Keeps wrong engines of cuDNN from being used: before the first use of an engine for a problem, its result is compared
// with a reference. The verdict is remembered, in this process and in the directory of the plan store: an engine that
// is wrong is so on every device of a kind, with the same build of cuDNN.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "cuda/cudnn_conv/graph.h"
#include "cuda/cudnn_conv/plan_key.h"
#include "cuda/cudnn_conv/trial.h"

namespace jaxgrad {

enum class Verdict { kUnchecked, kRight, kWrong };

// The verdicts on the engines of one problem.
class EngineChecks {
 public:
  // Nothing is run if `capturing`: only what is remembered counts.
  EngineChecks(const ConvKey& key, bool capturing);

  // The verdict on the plan of a candidate, from a run in `trial` if nothing is remembered. Without a trial, allocates
  // memory of its own. kUnchecked if memory or NVRTC is missing, or the plan fails to run; but kWrong then for an
  // engine that is known to be wrong in some release of cuDNN. Throws driver::DeviceFault and driver::Error.
  Verdict verdict(const ConvCandidate& candidate, const ExecutionPlan& plan, ConvTrial* trial);

 private:
  Verdict remembered_or_checked(const ConvCandidate& candidate, const ExecutionPlan& plan, ConvTrial* trial);
  Verdict check(const std::string& tag, const ConvCandidate& candidate, const ExecutionPlan& plan, ConvTrial& trial);

  const ConvKey key_;
  const bool capturing_;
  const std::string stored_key_;
  std::map<std::string, Verdict> verdicts_;  // by the tag of the candidate
};

// Counts of this process: engines that were run and compared, those of them that were wrong, and plans that were made
// with an engine that could not be checked.
struct EngineCheckInfo {
  int64_t checked, rejected, unchecked;
};
EngineCheckInfo engine_check_info();
void count_unchecked_plan();

}  // namespace jaxgrad

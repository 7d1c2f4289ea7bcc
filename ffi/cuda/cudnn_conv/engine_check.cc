#include "cuda/cudnn_conv/engine_check.h"

#include <atomic>
#include <optional>
#include <sstream>

#include "cuda/cudnn_conv/plan_store.h"
#include "cuda/runtime/text.h"

namespace jaxgrad {
namespace {

std::atomic<int64_t> checked{0}, rejected{0}, unchecked{0};

constexpr const char *kRightMark = ":right", *kWrongMark = ":wrong";  // after a tag in the stored text

std::map<std::string, Verdict> parse(const std::string& text) {
  std::map<std::string, Verdict> verdicts;
  std::istringstream words(text);
  for (std::string word; words >> word;)
    for (const char* mark : {kRightMark, kWrongMark})
      if (ends_with(word, mark))
        verdicts[word.substr(0, word.size() - std::string(mark).size())] =
            mark == kRightMark ? Verdict::kRight : Verdict::kWrong;
  return verdicts;
}

std::string print(const std::map<std::string, Verdict>& verdicts) {
  std::string text;
  for (const auto& [tag, verdict] : verdicts)
    text += (text.empty() ? "" : " ") + tag + (verdict == Verdict::kRight ? kRightMark : kWrongMark);
  return text;
}

}  // namespace

EngineChecks::EngineChecks(const ConvKey& key, bool capturing)
    : key_(key),
      capturing_(capturing),
      stored_key_(stored_check_key(key)),
      verdicts_(parse(check_store().find(stored_key_).value_or(""))) {}

Verdict EngineChecks::check(const std::string& tag, const ConvCandidate& candidate, const ExecutionPlan& plan,
                            ConvTrial& trial) {
  if (!trial.has_reference()) return Verdict::kUnchecked;
  const Verdict found = trial.error_of(plan.plan, candidate.has_transforms) > 1 ? Verdict::kWrong : Verdict::kRight;
  ++checked;
  rejected += found == Verdict::kWrong;
  verdicts_[tag] = found;
  check_store().put(stored_key_, print(verdicts_));
  return found;
}

Verdict EngineChecks::verdict(const ConvCandidate& candidate, const ExecutionPlan& plan, ConvTrial* trial) {
  const Verdict found = remembered_or_checked(candidate, plan, trial);
  return found == Verdict::kUnchecked && candidate.is_known_wrong ? Verdict::kWrong : found;
}

Verdict EngineChecks::remembered_or_checked(const ConvCandidate& candidate, const ExecutionPlan& plan,
                                            ConvTrial* trial) {
  try {
    const std::string tag = tag_of(candidate);
    const auto known = verdicts_.find(tag);
    if (known != verdicts_.end()) return known->second;
    if (capturing_) return Verdict::kUnchecked;
    if (trial != nullptr) return check(tag, candidate, plan, *trial);
    ConvTrial own(key_, plan.workspace_bytes);
    return check(tag, candidate, plan, own);
  } catch (const cudnn::Error&) {  // the call will replace a plan that fails to run
  } catch (const driver::OutOfMemory&) {
  } catch (const driver::Error& error) {
    if (error.status != CUDA_ERROR_OUT_OF_MEMORY) throw;
  }
  return Verdict::kUnchecked;
}

EngineCheckInfo engine_check_info() { return {checked, rejected, unchecked}; }

void count_unchecked_plan() { ++unchecked; }

}  // namespace jaxgrad

#include "cuda/runtime/retained.h"

#include <mutex>
#include <unordered_set>
#include <utility>

namespace jaxgrad {
namespace {

struct Retained {
  std::mutex mutex;
  std::unordered_set<std::shared_ptr<const void>> plans;
};

// Never destroyed: at exit, the driver may be unloaded before the plans.
Retained& retained() {
  static auto& plans = *new Retained;
  return plans;
}

}  // namespace

void retain_for_cuda_graph(std::shared_ptr<const void> plan) {
  const std::lock_guard<std::mutex> lock(retained().mutex);
  retained().plans.insert(std::move(plan));
}

int64_t num_retained_for_cuda_graphs() {
  const std::lock_guard<std::mutex> lock(retained().mutex);
  return static_cast<int64_t>(retained().plans.size());
}

}  // namespace jaxgrad

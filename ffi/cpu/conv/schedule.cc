#include "cpu/conv/schedule.h"

#include <algorithm>

#include "cpu/runtime/onednn_threads.h"

namespace jaxgrad {
namespace {

// With fewer multiplications, waking other threads costs more than it saves.
constexpr double kMinParallelWork = 1 << 22;
// Parts for each thread: a thread whose core is taken then computes fewer of them.
constexpr int64_t kPartsPerThread = 2;
// Each part reorders all weights, or writes their gradients, which are added. All parts together may do so for this
// many weights per element of x and y.
constexpr double kMaxWeights = 2, kMaxWeightGradients = 0.5;

double multiplications(const ConvKey& key) {
  return static_cast<double>(elements(key.y, key.spatial)) * static_cast<double>(elements(key.w, key.spatial)) /
         static_cast<double>(key.w.sizes[0]);
}

// Whether the images of an operand follow each other.
bool is_batch_first(const ConvOperand& operand, int spatial) {
  int64_t image = 1;
  for (int axis = 1; axis < spatial + 2; ++axis) image *= operand.sizes[axis];
  return operand.strides[0] == image;
}

// The number of equal parts of the batch: at least `least`, and the first from `wanted` on that divides it, but not far
// more; 1 if there is none.
int64_t parts_of_batch(const ConvKey& key, int64_t wanted, int64_t least) {
  const bool is_sum = key.pass == ConvPass::kWeightGradient;
  if (is_sum && key.type != ConvType::kFloat32) return 1;  // the sum of bfloat16 parts would be rounded twice
  if (!is_batch_first(key.x, key.spatial) || !is_batch_first(key.y, key.spatial)) return 1;
  const auto activations = static_cast<double>(elements(key.x, key.spatial) + elements(key.y, key.spatial));
  const double weights =
      (is_sum ? kMaxWeightGradients : kMaxWeights) * activations / static_cast<double>(elements(key.w, key.spatial));
  const int64_t images = key.y.sizes[0], most = std::min(images, 2 * wanted);
  int64_t found = 1;
  for (int64_t parts = least; parts <= most && static_cast<double>(parts) <= weights; ++parts) {
    if (images % parts != 0) continue;
    found = parts;
    if (parts >= wanted) break;
  }
  return found;
}

// Workers of one thread each share the problems or, if these are few, equal parts of their batches. The workers are
// threads of XLA. A team of OpenMP threads runs what cannot be divided so: its threads wait for each other several
// times in a call, and keep their cores busy for some milliseconds after it. If a core is taken, both delay the
// program.
void assign_threads(ConvSchedule& schedule) {
  ConvKey& key = schedule.key;
  const double work = multiplications(key);
  const int64_t team = onednn::team_size(), problems = schedule.num_problems;
  key.threads = 1;
  if (problems < team && work >= kMinParallelWork) {
    auto for_each = [problems](int64_t tasks) { return (tasks + problems - 1) / problems; };
    schedule.num_parts = parts_of_batch(key, for_each(kPartsPerThread * team), for_each(team));
    if (schedule.num_parts == 1) key.threads = static_cast<int>(team);
    key.x.sizes[0] /= schedule.num_parts;
    key.y.sizes[0] /= schedule.num_parts;
  }
  const int64_t tasks = problems * schedule.num_parts;
  const bool shared = key.threads == 1 && work * static_cast<double>(problems) >= kMinParallelWork;
  schedule.num_workers = shared ? std::min<int64_t>(tasks, team) : 1;
}

}  // namespace

ConvSchedule make_conv_schedule(ConvPass pass, ConvType type, bool has_bias, ConvArguments arguments,
                                std::string& error) {
  ConvSchedule schedule{};
  if (!remove_problem_axis(arguments, schedule.num_problems)) {
    error = "x, w and y must have the same number of independent problems, at least one";
    return schedule;
  }
  static_cast<ConvProblem&>(schedule.key) = make_conv_problem(pass, arguments, error);
  schedule.key.type = type;
  schedule.key.has_bias = has_bias;
  schedule.key.one_of_several = schedule.num_problems > 1;
  if (error.empty()) assign_threads(schedule);
  return schedule;
}

}  // namespace jaxgrad

#include "cpu/conv/schedule.h"

#include <algorithm>

#include "cpu/runtime/onednn_threads.h"

namespace jaxgrad {
namespace {

// With fewer multiplications, waking other threads costs more than it saves.
constexpr double kMinTeamWork = 1 << 22;

double multiplications(const ConvKey& key) {
  double found = static_cast<double>(key.y.sizes[0]);
  for (int axis = 1; axis < key.spatial + 2; ++axis)
    found *= static_cast<double>(key.w.sizes[axis]) * static_cast<double>(key.y.sizes[axis]);
  return found;
}

// Each problem runs on a team of threads if the problems are few and large. Otherwise workers of one thread each share
// the problems.
void assign_threads(ConvSchedule& schedule) {
  const double work = multiplications(schedule.key);
  const int team = onednn::team_size();
  schedule.key.threads = schedule.num_problems < team && work >= kMinTeamWork ? team : 1;
  const bool shared = schedule.key.threads == 1 && work * static_cast<double>(schedule.num_problems) >= kMinTeamWork;
  schedule.num_workers = shared ? std::min<int64_t>(schedule.num_problems, team) : 1;
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
  if (error.empty()) assign_threads(schedule);
  return schedule;
}

}  // namespace jaxgrad

// A call may compute several independent problems of the same geometry, for example under vmap. The schedule divides
// them and assigns threads.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/conv/plan_key.h"

namespace jaxgrad {

struct ConvSchedule {
  ConvKey key;  // of one part
  int64_t num_problems = 1;
  int64_t num_parts = 1;    // of each problem: equal parts of its batch
  int64_t num_workers = 1;  // tasks that share the parts of all problems, each with a workspace of its own
};

// Checks the arguments and assigns threads. With independent problems, the arrays are as remove_problem_axis() takes
// them, and the bias has an additional first axis. If a check fails, `error` is set and the result is meaningless.
ConvSchedule make_conv_schedule(ConvPass pass, ConvType type, bool has_bias, ConvArguments arguments,
                                std::string& error);

}  // namespace jaxgrad

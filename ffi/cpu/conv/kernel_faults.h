// Kernels of oneDNN that are wrong for some problems.
#pragma once

#include <string>

#include "cpu/conv/plan_key.h"

namespace jaxgrad {

// Whether a kernel, by its name in oneDNN, writes outside of its arrays or computes wrong values for the problem. Plans
// take the next kernel in oneDNN's list. `.ci/sanitize` searches for such kernels.
bool has_known_fault(const ConvKey& key, const std::string& kernel);

}  // namespace jaxgrad

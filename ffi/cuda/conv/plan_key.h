// What the exhaustive search's timing came to, kept on disk for other processes.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/conv/op.h"

namespace jaxgrad {

// What a choice is kept under: all that a plan bakes in or its time depends on. A choice is one of those that a search
// times, which `reserved_bytes`, and not the limit that was asked for, sets apart: a call as it runs, with just this
// workspace, finds the choice made for it while it was lowered.
std::string choice_key(const ConvKey& key, int64_t reserved_bytes);

}  // namespace jaxgrad

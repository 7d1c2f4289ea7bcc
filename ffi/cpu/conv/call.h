// Runs a call of a program, which may have been lowered on another machine: with fewer threads, or for a processor with
// other instruction sets. The workspace and the type that such a program asks for need not suit this machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/conv/op.h"

namespace jaxgrad {

struct ConvWorkspace {
  std::byte* data;
  int64_t bytes;
};

// Runs the plan of the schedule. If the workspace is too small for it, allocates one. If oneDNN has no bfloat16 kernel
// for this processor, computes in float32. Throws what conv_plan() and the plan throw.
void call_conv(const ConvSchedule& schedule, const ConvArrays& arrays, ConvWorkspace workspace, Parallel& parallel);

}  // namespace jaxgrad

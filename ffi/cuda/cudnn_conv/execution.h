// Builds and runs cuDNN execution plans.
#pragma once

#include <cstdint>

#include "cuda/cudnn_conv/graph.h"
#include "cuda/runtime/cudnn.h"

namespace jaxgrad {

// Device pointers of a convolution graph; bias is null if the graph has none.
struct ConvPointers {
  void *x, *w, *y, *bias;
};

struct ExecutionPlan {
  cudnn::Descriptor plan;
  int64_t workspace_bytes = 0;
};

// Builds the plan of a candidate. An error that may pass gets a second attempt: another candidate may need another
// workspace, and all processes of a program must choose the same one. Throws cudnn::Error if the candidate is at fault;
// driver::OutOfMemory and driver::DeviceFault, unless `capturing`, if it is not.
ExecutionPlan build_execution_plan(const ConvCandidate& candidate, int device, bool capturing);

// Launches a plan on the stream of the handle. Throws cudnn::Error.
void execute(const cudnn::Descriptor& plan, const cudnn::Handle& handle, const ConvPointers& pointers, void* workspace);

}  // namespace jaxgrad

// Builds and runs cuDNN execution plans.
#pragma once

#include "cuda/conv/graph.h"
#include "cuda/runtime/cudnn.h"

namespace jaxgrad {

// Device pointers of a convolution graph; bias is null if the graph has none.
struct ConvPointers {
  void *x, *w, *y, *bias;
};

// Throws cudnn::Error.
cudnn::Descriptor build_execution_plan(const ConvCandidate& candidate, const cudnn::Handle& handle);

// Launches a plan on the stream of the handle. Throws cudnn::Error.
void execute(const cudnn::Descriptor& plan, const cudnn::Handle& handle, const ConvPointers& pointers, void* workspace);

}  // namespace jaxgrad

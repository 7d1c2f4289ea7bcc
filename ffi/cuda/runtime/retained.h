// Plans that CUDA graphs were captured from.
#pragma once

#include <cstdint>
#include <memory>

namespace jaxgrad {

// Keeps a plan for the rest of the process: a CUDA graph runs its code, and nothing says when the graph is gone.
// Thread-safe.
void retain_for_cuda_graph(std::shared_ptr<const void> plan);

int64_t num_retained_for_cuda_graphs();

}  // namespace jaxgrad

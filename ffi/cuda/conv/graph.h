// What cuDNN is asked: a convolution, and what follows it in the same kernel, as an operation graph; and the engines
// that it offers for one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/conv/op.h"

namespace jaxgrad {

constexpr int64_t kXId = 1, kWId = 2, kYId = 3, kBiasId = 4;  // cuDNN's names of the operands

// The bias as it lies in memory, with the axes of y.
ConvOperand bias_of(const ConvKey& key);

struct ConvGraph {
  std::vector<cudnn::Descriptor> parts;  // the last is the graph, those before what it is made of

  const cudnn::Descriptor& graph() const { return parts.back(); }
};

ConvGraph conv_graph(const ConvKey& key, const cudnn::Handle& handle);

struct ConvCandidate {
  cudnn::Descriptor config;
  int64_t workspace_bytes;
  std::string name;
};

// The engines whose arithmetic is what the key asks for, in the order in which the key's search tries them.
std::vector<ConvCandidate> conv_candidates(const ConvKey& key, const ConvGraph& graph);

// The number of an engine and the values of its knobs, "eng52_k3=1_k5=2": all that sets it apart from others of a list.
std::string tag_of(const ConvCandidate& candidate);

}  // namespace jaxgrad

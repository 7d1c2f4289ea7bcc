// Describes a convolution, and the bias and relu that the same kernel applies, as a cuDNN operation graph, and lists
// the engines that cuDNN offers for it.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "cuda/cudnn_conv/plan_key.h"
#include "cuda/runtime/cudnn.h"

namespace jaxgrad {

constexpr int64_t kXId = 1, kWId = 2, kYId = 3, kBiasId = 4;  // ids of the tensors in the graph

// The geometry of the bias, with the axes of y.
ConvOperand bias_of(const ConvKey& key);

struct ConvGraph {
  // Each descriptor may refer to the ones before it. The last one is the graph. A deque does not move its elements when
  // it grows, so references to them stay valid.
  std::deque<cudnn::Descriptor> descriptors;

  const cudnn::Descriptor& graph() const { return descriptors.back(); }
};

ConvGraph conv_graph(const ConvKey& key, const cudnn::Handle& handle);

// An engine with the values of its knobs.
struct ConvCandidate {
  cudnn::Descriptor config;
  int64_t workspace_bytes;
  std::string name;     // "engine 52"
  bool has_transforms;  // sums products of transformed operands, as Winograd and FFT do
  bool is_known_wrong;  // the engine, in some release of cuDNN
};

// The candidates that respect the math settings of the key, in the order of the lists of cuDNN that the search uses.
// Leaves out engines that are known to be wrong in this release, unless they are asked for.
std::vector<ConvCandidate> conv_candidates(const ConvKey& key, const ConvGraph& graph, bool with_known_wrong = false);

// The number of an engine and the values of its knobs, such as "eng52_k3=1_k5=2". Unique within a list of candidates.
std::string tag_of(const ConvCandidate& candidate);

}  // namespace jaxgrad

// The key under which convolution plans are cached.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/conv_problem.h"

namespace jaxgrad {

enum class ConvType : int64_t { kFloat32 = 0, kBFloat16 = 1 };

// Everything that a plan depends on.
struct ConvKey : ConvProblem {
  ConvType type;
  bool has_bias;        // forward: a bias is added; weight gradient: the bias gradient is computed
  int threads;          // of the call; the blocking and the workspace depend on it
  bool one_of_several;  // whether the call computes several independent problems of this key

  bool operator==(const ConvKey& other) const;
};

struct ConvKeyHash {
  size_t operator()(const ConvKey& key) const;
};

}  // namespace jaxgrad

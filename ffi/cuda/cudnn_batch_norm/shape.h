// The shape of a batch normalization problem.
#pragma once

#include <cstdint>

namespace jaxgrad {

// x as [outer, C, inner], dense and row-major. C is the number of channels; inner is 1 if channels come last, outer is
// 1 if channels come first. The statistics of a channel are taken over n = outer * inner elements.
struct BatchNormShape {
  int64_t outer = 0, C = 0, inner = 0;

  int64_t elements() const { return outer * C * inner; }
};

}  // namespace jaxgrad

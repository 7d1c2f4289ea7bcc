// How the handlers of every platform see the array that is normalised.
#pragma once

#include <cstdint>

namespace jaxgrad {

// [outer, C, inner], dense and row-major: C channels, inner = 1 where they come last, outer = 1 where they come first.
// n = outer * inner elements of each channel are averaged over.
struct BatchNormShape {
  int64_t outer = 0, C = 0, inner = 0;

  int64_t elements() const { return outer * C * inner; }
};

}  // namespace jaxgrad

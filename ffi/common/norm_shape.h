// The shape of a normalization problem.
#pragma once

#include <cstdint>

namespace jaxgrad {

// x as [samples, outer, channels, inner], dense and row-major. Each sample has its own statistics, one for each group
// of neighboring channels, over outer, the channels of the group, and inner. `calls` divides `samples`: as many rows of
// scale and bias, [calls, channels], each for samples / calls samples.
struct NormShape {
  int64_t samples = 0, outer = 0, channels = 0, inner = 0;
  int64_t groups = 0, calls = 0;

  int64_t elements() const { return samples * outer * channels * inner; }
};

// As handlers get it in the attribute `activation`.
enum class NormActivation : int64_t { kNone = 0, kRelu = 1, kSilu = 2, kGelu = 3 };

}  // namespace jaxgrad

#include "cpu/conv/kernel_faults.h"

#include <algorithm>

namespace jaxgrad {
namespace {

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Whether the kernel writes past the end of the scratchpad. For a window of one element with strides, the 1x1 kernels
// copy the elements of x that the window meets. The weight gradient finds an element of this copy as if each had a
// whole vector of features, also where x has the features last and they fill no vector (all releases up to 3.14).
bool overruns_scratchpad(const ConvKey& key, const std::string& kernel) {
  if (key.pass != ConvPass::kWeightGradient || !contains(kernel, "_1x1")) return false;
  const int64_t vector = contains(kernel, "avx512") ? 16 : 8;
  const bool is_strided = std::any_of(key.window_strides.begin(), key.window_strides.begin() + key.spatial,
                                      [](int64_t stride) { return stride > 1; });
  return is_strided && key.x.sizes[1] / key.groups < vector;
}

// Whether the kernel loses a sum. If the sum of a result has an odd number of bfloat16 products, the kernel loads the
// last factor into a register that holds another sum, where its blocks of positions are so large that they need all
// registers.
bool overwrites_sum(const ConvKey& key, const std::string& kernel) {
  if (key.pass == ConvPass::kWeightGradient || !contains(kernel, "jit_bf16_1x1:avx512_core_bf16")) return false;
  const ConvOperand& summed = key.pass == ConvPass::kForward ? key.x : key.y;
  return summed.sizes[1] / key.groups % 2 != 0;
}

}  // namespace

bool has_known_fault(const ConvKey& key, const std::string& kernel) {
  return overruns_scratchpad(key, kernel) || overwrites_sum(key, kernel);
}

}  // namespace jaxgrad

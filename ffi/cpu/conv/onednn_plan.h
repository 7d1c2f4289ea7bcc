// Builds convolution plans: a oneDNN primitive with the reorders of its operands.
#pragma once

#include <memory>

#include "cpu/conv/op.h"

namespace jaxgrad {

// The layout of the activations that the primitive reads and writes. The plan reorders activations of another layout.
enum class ConvLayout { kCaller, kAny /* chosen by oneDNN */, kChannelsLast, kFeaturesFirst };

// Throws onednn::Error.
std::shared_ptr<const ConvPlan> make_onednn_plan(const ConvKey& key, ConvLayout layout);

}  // namespace jaxgrad

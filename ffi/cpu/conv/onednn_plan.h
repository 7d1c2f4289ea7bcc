// One convolution as a primitive of oneDNN with the reorders around it.
#pragma once

#include <memory>

#include "cpu/conv/op.h"

namespace jaxgrad {

// How the primitive sees the activations; where that is not how they lie, they are reordered around it.
enum class ConvLayout { kAsItLies, kAny /* the primitive's own choice */, kChannelsLast, kFeaturesFirst };

// Throws onednn::Error.
std::shared_ptr<const ConvPlan> make_onednn_conv(const ConvKey& key, ConvLayout layout);

}  // namespace jaxgrad

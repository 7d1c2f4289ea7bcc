// The layouts of weights that the depthwise kernels take.
#pragma once

#include "common/conv_problem.h"

namespace jaxgrad {

// Whether the axes of the weights are in the order spatial axes, channels; with taps_last, channels, spatial axes.
bool has_tap_order(const ConvOperand& w, int spatial, bool taps_last);

}  // namespace jaxgrad

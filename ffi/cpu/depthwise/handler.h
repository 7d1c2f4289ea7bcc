// The FFI handlers of the depthwise convolution passes on the CPU.
//
// With independent problems (see common/conv_problem.h), w and bias have an additional first axis.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_depthwise_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_depthwise_input_gradient);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_depthwise_weight_gradient);

}  // namespace jaxgrad

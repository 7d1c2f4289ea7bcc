// The FFI handlers of the convolution passes on the CPU.
//
// With independent problems (see schedule.h), w and bias have an additional first axis.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_onednn_conv_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_onednn_conv_input_gradient);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_onednn_conv_weight_gradient);

}  // namespace jaxgrad

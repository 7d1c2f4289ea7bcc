// The FFI handlers of the convolution passes on the GPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cudnn_conv_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cudnn_conv_input_gradient);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cudnn_conv_weight_gradient);

}  // namespace jaxgrad

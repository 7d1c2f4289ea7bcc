// The FFI handlers of the depthwise kernels on the GPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_depthwise_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_depthwise_input_gradient);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_depthwise_weight_gradient);

}  // namespace jaxgrad

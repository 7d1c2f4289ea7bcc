// The convolution triangle's handlers on the GPU, as XLA sees them.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_conv_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_conv_backward_input);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_conv_backward_filter);

}  // namespace jaxgrad

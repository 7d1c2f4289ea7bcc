// The convolution triangle's handlers on the GPU, as XLA sees them.
#pragma once

#include "../common/checks.h"
#include "conv.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

// The type of a call's operands; notes in `checks` where it is none.
ConvType conv_type(xla::ffi::DataType dtype, Checks& checks);

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_conv_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_conv_backward_input);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_conv_backward_filter);

}  // namespace jaxgrad

// The FFI handlers of batch normalization on the GPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cudnn_batch_norm_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cudnn_batch_norm_backward);

}  // namespace jaxgrad

// The FFI handlers of normalization on the GPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_norm_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_norm_statistics);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_norm_normalize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_norm_backward);

}  // namespace jaxgrad

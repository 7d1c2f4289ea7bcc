// The FFI handlers of the GRU's recurrence on the GPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_gru_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_gru_backward);

}  // namespace jaxgrad

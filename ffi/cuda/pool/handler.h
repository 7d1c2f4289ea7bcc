// The FFI handlers of pooling on the GPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_max_pool_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_max_pool_input_gradient);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_max_pool_tangent);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_sum_pool_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_sum_pool_input_gradient);

}  // namespace jaxgrad

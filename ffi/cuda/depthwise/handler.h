// The FFI handler of the depthwise weight gradient on the GPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_depthwise_weight_gradient);

}  // namespace jaxgrad

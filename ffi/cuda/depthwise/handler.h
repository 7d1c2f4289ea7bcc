// The handler of the depthwise weight gradient on the GPU, as XLA sees it.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_conv_depthwise_filter);

}  // namespace jaxgrad

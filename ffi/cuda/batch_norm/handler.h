// Batch normalisation's handlers on the GPU, as XLA sees them.
#pragma once

#include "cuda/batch_norm/op.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_batch_norm_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cuda_batch_norm_backward);

}  // namespace jaxgrad

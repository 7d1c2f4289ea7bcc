// Batch normalisation's handlers, as XLA sees them.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_batch_norm_statistics);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_batch_norm_normalise);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_batch_norm_backward);

}  // namespace jaxgrad

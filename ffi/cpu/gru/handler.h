// The GRU's handlers, as XLA sees them.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_gru_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_gru_backward);

}  // namespace jaxgrad

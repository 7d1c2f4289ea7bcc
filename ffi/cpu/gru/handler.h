// The FFI handlers of the GRU on the CPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_gru_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_gru_backward);

}  // namespace jaxgrad

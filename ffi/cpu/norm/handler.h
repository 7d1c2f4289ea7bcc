// The FFI handlers of the norm family on the CPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_norm_statistics);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_norm_normalize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_norm_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_cpu_norm_backward);

}  // namespace jaxgrad

// The convolution triangle's handlers, as XLA sees them.
#pragma once

#include <string>

#include "conv.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_backward_input);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_backward_filter);

// The key of a call's plan; `problem` says what does not fit, if anything.
ConvKey conv_key(ConvKind kind, ConvType type, bool has_bias, const ConvCall& call, std::string& problem);

}  // namespace jaxgrad

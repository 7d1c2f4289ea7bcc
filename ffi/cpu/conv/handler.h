// The convolution triangle's handlers, as XLA sees them. A call of several independent convolutions, the examples, has
// an axis of them before the others of w and bias; x and y have it too, or as the slower part of the batch, where that
// is their first axis.
#pragma once

#include <string>

#include "cpu/conv/op.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_backward_input);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_backward_filter);

// What a call comes to; `problem` says what does not fit, if anything.
ConvWork conv_work(ConvKind kind, ConvType type, bool has_bias, ConvCall call, std::string& problem);

}  // namespace jaxgrad

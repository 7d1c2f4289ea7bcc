// The convolution triangle's handlers, as XLA sees them.
#pragma once

#include <vector>

#include "conv.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_forward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_backward_input);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jaxgrad_conv_backward_filter);

// A call as Python describes it: the shapes of x, w and y, and where their axes lie.
struct ConvCall {
  ConvKind kind;
  ConvType type;
  bool has_bias;
  std::vector<int64_t> x, w, y;                       // shapes
  std::vector<int64_t> lhs_spec, rhs_spec, out_spec;  // as in jax.lax.ConvDimensionNumbers
  std::vector<int64_t> window_strides, padding, rhs_dilation;
  int64_t feature_group_count;
};

// The key of a call's plan; `problem` says what does not fit, if anything.
ConvKey conv_key(const ConvCall& call, std::string& problem);

}  // namespace jaxgrad

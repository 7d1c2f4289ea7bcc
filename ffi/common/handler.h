// Defines FFI handlers that no exception leaves.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

// Returns handler(frame). An exception becomes an FFI error whose message starts with `target`: neither XLA nor the C
// interface of the FFI can propagate exceptions.
XLA_FFI_Error* call_handler(const char* target, XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) noexcept;

// Defines the C function `target`. The arguments are those of XLA_FFI_DEFINE_HANDLER: the implementation, the binding
// and optional traits.
#define JAXGRAD_DEFINE_HANDLER(target, implementation, ...)       \
  extern "C" XLA_FFI_Error* target(XLA_FFI_CallFrame* frame) {    \
    XLA_FFI_DEFINE_HANDLER(handler, implementation, __VA_ARGS__); \
    return ::jaxgrad::call_handler(#target, handler, frame);      \
  }                                                               \
  static_assert(true, "the macro is followed by a semicolon")

}  // namespace jaxgrad

// What the CUDA handlers share: argument types, checks, and the conversion of exceptions into FFI errors.
#pragma once

#include <exception>
#include <string>

#include "common/checks.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/float_type.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

using Arg = xla::ffi::AnyBuffer;
using Ret = xla::ffi::Result<xla::ffi::AnyBuffer>;
using Bytes = xla::ffi::Result<xla::ffi::Buffer<xla::ffi::U8>>;

// The type of the operands of a call. Fails the check if it is no floating-point type.
FloatType float_type(xla::ffi::DataType dtype, Checks& checks);

// Fails the check if the workspace of a call has fewer than `needed` bytes.
void check_workspace(Bytes& workspace, int64_t needed, Checks& checks);

// Returns work(). An exception becomes an FFI error whose message starts with `target`.
template <class Work>
xla::ffi::Error catch_to_error(const char* target, Work work) {
  const auto message = [&](const std::exception& error) { return std::string(target) + ": " + error.what(); };
  try {
    return work();
  } catch (const driver::OutOfMemory& error) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, message(error));
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(message(error));
  }
}

}  // namespace jaxgrad

// What the handlers on the GPU share: the buffers that they take, and how they end.
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

// The type of a call's operands; notes in `checks` where it is none.
FloatType float_type(xla::ffi::DataType dtype, Checks& checks);

// Notes in `checks` where a call's workspace is too small.
void check_workspace(Bytes& workspace, int64_t needed, Checks& checks);

// work(), or the error that it threw.
template <class Work>
xla::ffi::Error guarded(const char* target, Work work) {
  const auto said = [&](const std::exception& error) { return std::string(target) + ": " + error.what(); };
  try {
    return work();
  } catch (const driver::OutOfMemory& error) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, said(error));
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(said(error));
  }
}

}  // namespace jaxgrad

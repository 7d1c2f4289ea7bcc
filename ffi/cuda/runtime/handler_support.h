// Argument types and checks that the CUDA handlers share.
#pragma once

#include "common/checks.h"
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

}  // namespace jaxgrad

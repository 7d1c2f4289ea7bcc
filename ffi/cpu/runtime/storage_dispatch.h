// Maps the element types of XLA to the C++ types of the kernels.
#pragma once

#include "common/checks.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {

// Calls run(S{}), where S is the C++ type of `dtype`.
template <class Run>
xla::ffi::Error with_storage(Checks& checks, xla::ffi::DataType dtype, Run run) {
  switch (dtype) {
    case xla::ffi::DataType::F32:
      return run(float{});
    case xla::ffi::DataType::F64:
      return run(double{});
    case xla::ffi::DataType::BF16:
      return run(BFloat16{});
    case xla::ffi::DataType::F16:
      return run(Float16{});
    default:
      checks.fail("x must have the element type f32, f64, bf16 or f16");
      return checks.error();
  }
}

}  // namespace jaxgrad

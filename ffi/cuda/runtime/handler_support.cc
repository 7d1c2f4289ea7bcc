#include "cuda/runtime/handler_support.h"

namespace jaxgrad {
namespace ffi = xla::ffi;

FloatType float_type(ffi::DataType dtype, Checks& checks) {
  switch (dtype) {
    case ffi::DataType::F32:
      return FloatType::kFloat32;
    case ffi::DataType::F64:
      return FloatType::kFloat64;
    case ffi::DataType::BF16:
      return FloatType::kBFloat16;
    case ffi::DataType::F16:
      return FloatType::kFloat16;
    default:
      checks.fail("operands must have the element type f32, f64, bf16 or f16");
      return FloatType::kFloat32;
  }
}

void check_workspace(Bytes& workspace, int64_t needed, Checks& checks) {
  const int64_t given = static_cast<int64_t>(workspace->element_count());
  checks.require(given >= needed, [&] {
    return "the workspace has " + std::to_string(given) + " bytes, " + std::to_string(needed) +
           " are needed: was the program compiled for another GPU?";
  });
}

}  // namespace jaxgrad

// The floating-point types of the CUDA calls.
#pragma once

#include <cstdint>

namespace jaxgrad {

enum class FloatType : int64_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

inline int64_t bytes_of(FloatType type) {
  return type == FloatType::kFloat64 ? 8 : type == FloatType::kFloat32 ? 4 : 2;
}

}  // namespace jaxgrad

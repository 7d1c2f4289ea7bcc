// Layout constants of the operands of gemm.h. They are the same for every instruction set.
#pragma once

#include <cstdint>

namespace jaxgrad {

// Padded rows have a multiple of this many elements: the lanes of the widest vector of floats.
constexpr int64_t kPad = 16;
// The left operand of a product is stored in blocks of this many columns.
constexpr int64_t kBlock = 8;

}  // namespace jaxgrad

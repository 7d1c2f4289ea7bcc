// What arrays are stored as, and the type that arithmetic on them is done in.
#pragma once

#include <cstdint>

namespace jaxgrad {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class Storage>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class Storage>
using Compute = typename ComputeOf<Storage>::type;

}  // namespace jaxgrad

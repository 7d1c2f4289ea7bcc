// The element types of arrays, and the type in which their arithmetic is done.
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

// Divisions of sizes into tiles.
#pragma once

#include <cstdint>

namespace jaxgrad {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rounds a size up to one of four sizes per power of two, so that calls of similar sizes have the same tiles.
inline int64_t rounded_up(int64_t size) {
  int64_t unit = 1;
  while (unit * 8 < size) unit *= 2;
  return ceil_div(size, unit) * unit;
}

}  // namespace jaxgrad

// Transposes squares of vectors in registers.
#pragma once

#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// Transposes a square of vectors: each round interleaves the first half of the rows with the second.
template <class T>
JAXGRAD_INLINE void transpose(Vector<T> (&rows)[kLanes<T>]) {
  constexpr int n = kLanes<T>;
  Bits<T> low, high;
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) low[i] = i / 2 + i % 2 * n, high[i] = low[i] + n / 2;
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
    Vector<T> next[n];
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + n / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + n / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) rows[i] = next[i];
  }
}

}  // namespace jaxgrad::JAXGRAD_ISA

// Copies between planes, [lanes, positions], and vectors of one element of each plane, [positions, kLanes].
#pragma once

#include "cpu/runtime/transpose.h"

namespace jaxgrad::JAXGRAD_ISA {

// Reads `lanes` planes, `step` elements apart; other lanes are zero.
template <class S>
void read_planes(const S* from, int64_t step, int64_t positions, int lanes, S* to) {
  using T = Compute<S>;
  constexpr int n = kLanes<T>;
  for_vectors<T>(positions, [&](int64_t p, auto present) {
    Vector<T> square[n];
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) square[i] = i < lanes ? load(from + i * step + p, present) : Vector<T>{};
    transpose<T>(square);
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i)
      if (i < present) store(to + (p + i) * n, square[i]);
  });
}

// The inverse of read_planes().
template <class S>
void write_planes(const S* from, int64_t step, int64_t positions, int lanes, S* to) {
  using T = Compute<S>;
  constexpr int n = kLanes<T>;
  for_vectors<T>(positions, [&](int64_t p, auto present) {
    Vector<T> square[n];
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) square[i] = i < present ? load(from + (p + i) * n) : Vector<T>{};
    transpose<T>(square);
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i)
      if (i < lanes) store(to + i * step + p, square[i], present);
  });
}

}  // namespace jaxgrad::JAXGRAD_ISA

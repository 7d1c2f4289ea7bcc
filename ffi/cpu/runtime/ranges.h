// Integer divisions and ranges of indices. Each instruction set has its own copy.
#pragma once

#include <cstdint>

#ifndef JAXGRAD_ISA
#error "compile with -DJAXGRAD_ISA=<a name for the instruction set>"
#endif

namespace jaxgrad::JAXGRAD_ISA {

constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
  bool has(int64_t i) const { return begin <= i && i < end; }
};

}  // namespace jaxgrad::JAXGRAD_ISA

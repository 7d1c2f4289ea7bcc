// Division by a number that a kernel gets as an argument. Both the host compiler and NVRTC compile this file.
#pragma once

namespace jaxgrad {

// Divides numbers below 2^31: n / value == (high 32 bits of n * magic + n) >> shift.
struct Divisor {
  unsigned value, magic, shift;
};

#ifdef __CUDACC_RTC__

__device__ inline unsigned quotient(unsigned n, const Divisor& by) { return (__umulhi(n, by.magic) + n) >> by.shift; }

#else

inline Divisor divisor(unsigned value) {  // not zero
  unsigned shift = 0;
  while (1ull << shift < value) ++shift;
  const unsigned long long rest = (1ull << shift) - value;
  return {value, static_cast<unsigned>((rest << 32) / value + 1), shift};
}

#endif

}  // namespace jaxgrad

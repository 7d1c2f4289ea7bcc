// The instruction set of the CPU kernels.
#pragma once

#include <string>

namespace jaxgrad {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The best set that the processor supports, at most the one that the environment variable JAXGRAD_CPU_ISA names:
// "avx512", "avx2" or "baseline". Decided at the first call.
Isa isa();
const char* isa_name();

// The error in JAXGRAD_CPU_ISA, or an empty string. isa() ignores a value that is in error.
std::string isa_error();

// kernels.cc of an op is compiled for each of these instruction sets, into a namespace of that name.
// JAXGRAD_FOR_EACH_ISA(X) expands X(isa) for each, JAXGRAD_RETURN_FOR_ISA(f(x)) returns <the set in use>::f(x).
#if defined(__x86_64__)
#define JAXGRAD_FOR_EACH_ISA(X) X(avx512) X(avx2) X(baseline)
#define JAXGRAD_RETURN_FOR_ISA(...) \
  switch (isa()) {                  \
    case Isa::kAvx512:              \
      return avx512::__VA_ARGS__;   \
    case Isa::kAvx2:                \
      return avx2::__VA_ARGS__;     \
    default:                        \
      return baseline::__VA_ARGS__; \
  }
#else
#define JAXGRAD_FOR_EACH_ISA(X) X(baseline)
#define JAXGRAD_RETURN_FOR_ISA(...) return baseline::__VA_ARGS__;
#endif

}  // namespace jaxgrad

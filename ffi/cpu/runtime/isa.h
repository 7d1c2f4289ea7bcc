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

}  // namespace jaxgrad

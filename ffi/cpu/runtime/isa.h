// Which instruction set the kernels use: the best that the processor has, or a lower one by environment variable.
#pragma once

namespace jaxgrad {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// Decided at the first call. JAXGRAD_CPU_ISA=baseline|avx2|avx512 sets an upper bound.
Isa isa();
const char* isa_name();

}  // namespace jaxgrad

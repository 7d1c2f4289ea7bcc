#include "cpu/runtime/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace jaxgrad {
namespace {

Isa supported() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return avx2 && avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kBaseline;
}

Isa decide() {
  const char* bound = std::getenv("JAXGRAD_CPU_ISA");
  if (bound == nullptr) return supported();
  const std::string_view name(bound);
  if (name == "baseline") return Isa::kBaseline;
  return name == "avx2" ? std::min(supported(), Isa::kAvx2) : supported();
}

}  // namespace

Isa isa() {
  static const Isa chosen = decide();
  return chosen;
}

const char* isa_name() {
  switch (isa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace jaxgrad

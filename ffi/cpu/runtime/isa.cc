#include "cpu/runtime/isa.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>

namespace jaxgrad {
namespace {

constexpr const char* kVariable = "JAXGRAD_CPU_ISA";

Isa supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return avx2 && avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kBaseline;
#else
  return Isa::kBaseline;
#endif
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

std::optional<Isa> parse(std::string_view name) {
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512})
    if (name == name_of(isa)) return isa;
  return std::nullopt;
}

// The variable's value; empty if it is not set or empty.
std::string_view bound() {
  const char* value = std::getenv(kVariable);
  return value == nullptr ? "" : value;
}

Isa decide() { return std::min(supported(), parse(bound()).value_or(Isa::kAvx512)); }

}  // namespace

Isa isa() {
  static const Isa decided = decide();
  return decided;
}

const char* isa_name() { return name_of(isa()); }

std::string isa_error() {
  if (bound().empty() || parse(bound())) return "";
  return std::string(kVariable) + " must be 'avx512', 'avx2' or 'baseline', got '" + std::string(bound()) + "'";
}

}  // namespace jaxgrad

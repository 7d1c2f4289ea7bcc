#include "cpu/gru/op.h"

#include "common/checked_int.h"
#include "cpu/gru/layout.h"
#include "cpu/runtime/isa.h"
#include "cpu/runtime/serial_parallel.h"

namespace jaxgrad {

// Defined in kernels.cc, once per instruction set.
#define JAXGRAD_DECLARE(isa)                           \
  namespace isa {                                      \
  template <class S>                                   \
  void gru_forward(const GruForward<S>&, Parallel&);   \
  template <class S>                                   \
  void gru_backward(const GruBackward<S>&, Parallel&); \
  }
JAXGRAD_DECLARE(avx512)
JAXGRAD_DECLARE(avx2)
JAXGRAD_DECLARE(baseline)

namespace {

// With fewer multiplications, waking another thread costs more than it saves.
constexpr double kMinParallelWork = 1e5;

bool runs_in_parallel(const GruShape& s) {
  return static_cast<double>(s.D) * s.T * s.B * 3 * s.H * (s.I + s.H) >= kMinParallelWork;
}

template <class T>
int64_t backward_bytes(const GruShape& shape, bool sums_in_scratch) {
  Arena arena(nullptr);
  GruBackwardScratch<T>(shape, sums_in_scratch, arena);
  return arena.bytes();
}

template <class T>
int64_t forward_bytes(const GruShape& shape) {
  Arena arena(nullptr);
  GruForwardScratch<T>(shape, arena);
  return arena.bytes();
}

}  // namespace

bool gru_sizes_fit(const GruShape& s) {
  // An upper bound of all products of sizes: more bytes than any array or part of the workspace has.
  const CheckedInt hidden = CheckedInt(s.H) + kPad, both = hidden + s.I + kPad;
  const CheckedInt rows = (CheckedInt(s.T) + 1) * (CheckedInt(s.B) + kPad);
  const bool valid = s.T >= 0 && s.B >= 0 && s.I > 0 && s.H > 0 && s.D > 0;
  return valid && !(rows * s.D * 6 * hidden * both * 8).overflowed();
}

int64_t gru_forward_workspace(const GruShape& shape, int64_t storage_bytes) {
  return storage_bytes == sizeof(double) ? forward_bytes<double>(shape) : forward_bytes<float>(shape);
}

int64_t gru_backward_workspace(const GruShape& shape, int64_t storage_bytes) {
  return storage_bytes == sizeof(double) ? backward_bytes<double>(shape, false)
                                         : backward_bytes<float>(shape, storage_bytes < 4);
}

template <class S>
void gru_forward(const GruForward<S>& call, Parallel& parallel) {
  SerialParallel serial;
  Parallel& threads = runs_in_parallel(call.shape) ? parallel : serial;
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::gru_forward(call, threads);
    case Isa::kAvx2:
      return avx2::gru_forward(call, threads);
    default:
      return baseline::gru_forward(call, threads);
  }
}

template <class S>
void gru_backward(const GruBackward<S>& call, Parallel& parallel) {
  SerialParallel serial;
  Parallel& threads = runs_in_parallel(call.shape) ? parallel : serial;
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::gru_backward(call, threads);
    case Isa::kAvx2:
      return avx2::gru_backward(call, threads);
    default:
      return baseline::gru_backward(call, threads);
  }
}

#define JAXGRAD_INSTANTIATE(S)                                   \
  template void gru_forward<S>(const GruForward<S>&, Parallel&); \
  template void gru_backward<S>(const GruBackward<S>&, Parallel&);
JAXGRAD_INSTANTIATE(float)
JAXGRAD_INSTANTIATE(double)
JAXGRAD_INSTANTIATE(BFloat16)
JAXGRAD_INSTANTIATE(Float16)

}  // namespace jaxgrad

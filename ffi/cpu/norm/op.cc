#include "cpu/norm/op.h"

#include "cpu/runtime/isa.h"
#include "cpu/runtime/serial_parallel.h"

namespace jaxgrad {

// Defined in kernels.cc, once per instruction set.
#define JAXGRAD_DECLARE(isa)                                                                                     \
  namespace isa {                                                                                                \
  int64_t norm_workspace(const NormShape&, int64_t storage_bytes);                                               \
  template <class Q>                                                                                             \
  void norm_forward(const NormShape&, const NormStatistics<Q>*, const NormNormalize<Q>*, std::byte*, Parallel&); \
  template <class Q>                                                                                             \
  void norm_backward(const NormShape&, const NormBackward<Q>&, std::byte*, Parallel&);                           \
  }
JAXGRAD_FOR_EACH_ISA(JAXGRAD_DECLARE)

namespace {

// With fewer elements, waking another thread costs more than it saves.
constexpr int64_t kMinParallelElements = 1 << 16;

}  // namespace

int64_t norm_workspace(const NormShape& shape, int64_t storage_bytes) {
  return baseline::norm_workspace(shape, storage_bytes);
}

template <class Q>
void norm_forward(const NormShape& shape, const NormStatistics<Q>* statistics, const NormNormalize<Q>* normalize,
                  std::byte* workspace, Parallel& parallel) {
  SerialParallel serial;
  Parallel& threads = shape.elements() >= kMinParallelElements ? parallel : serial;
  JAXGRAD_RETURN_FOR_ISA(norm_forward(shape, statistics, normalize, workspace, threads))
}

template <class Q>
void norm_backward(const NormShape& shape, const NormBackward<Q>& call, std::byte* workspace, Parallel& parallel) {
  SerialParallel serial;
  Parallel& threads = shape.elements() >= kMinParallelElements ? parallel : serial;
  JAXGRAD_RETURN_FOR_ISA(norm_backward(shape, call, workspace, threads))
}

#define JAXGRAD_INSTANTIATE(Q)                                                                                   \
  template void norm_forward<Q>(const NormShape&, const NormStatistics<Q>*, const NormNormalize<Q>*, std::byte*, \
                                Parallel&);                                                                      \
  template void norm_backward<Q>(const NormShape&, const NormBackward<Q>&, std::byte*, Parallel&);
JAXGRAD_INSTANTIATE(float)
JAXGRAD_INSTANTIATE(double)
JAXGRAD_INSTANTIATE(BFloat16)
JAXGRAD_INSTANTIATE(Float16)

}  // namespace jaxgrad

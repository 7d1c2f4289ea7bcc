#include "cpu/batch_norm/op.h"

#include "cpu/runtime/isa.h"
#include "cpu/runtime/serial_parallel.h"

namespace jaxgrad {

// Defined in kernels.cc, once per instruction set.
#define JAXGRAD_DECLARE(isa)                                                  \
  namespace isa {                                                             \
  int64_t batch_norm_workspace(const BatchNormShape&, int64_t storage_bytes); \
  template <class S>                                                          \
  void batch_norm_statistics(const BatchNormStatistics<S>&, Parallel&);       \
  template <class S>                                                          \
  void batch_norm_normalize(const BatchNormNormalize<S>&, Parallel&);         \
  template <class S>                                                          \
  void batch_norm_backward(const BatchNormBackward<S>&, Parallel&);           \
  }
JAXGRAD_FOR_EACH_ISA(JAXGRAD_DECLARE)

namespace {

// With fewer elements, waking another thread costs more than it saves.
constexpr int64_t kMinParallelElements = 1 << 16;

// Calls run() with `parallel` if the problem is large enough, otherwise with a serial loop.
template <class Run>
void with_threads(const BatchNormShape& shape, Parallel& parallel, Run run) {
  SerialParallel serial;
  run(shape.elements() >= kMinParallelElements ? parallel : serial);
}

}  // namespace

int64_t batch_norm_workspace(const BatchNormShape& shape, int64_t storage_bytes) {
  return baseline::batch_norm_workspace(shape, storage_bytes);
}

#define JAXGRAD_DISPATCH(function, Call)                                                                            \
  template <class S>                                                                                                \
  void function(const Call<S>& call, Parallel& parallel) {                                                          \
    with_threads(call.shape, parallel, [&](Parallel& threads) { JAXGRAD_RETURN_FOR_ISA(function(call, threads)) }); \
  }                                                                                                                 \
  template void function<float>(const Call<float>&, Parallel&);                                                     \
  template void function<double>(const Call<double>&, Parallel&);                                                   \
  template void function<BFloat16>(const Call<BFloat16>&, Parallel&);                                               \
  template void function<Float16>(const Call<Float16>&, Parallel&);

JAXGRAD_DISPATCH(batch_norm_statistics, BatchNormStatistics)
JAXGRAD_DISPATCH(batch_norm_normalize, BatchNormNormalize)
JAXGRAD_DISPATCH(batch_norm_backward, BatchNormBackward)

}  // namespace jaxgrad

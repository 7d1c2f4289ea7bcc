#include "cpu/pool/op.h"

#include "cpu/runtime/isa.h"
#include "cpu/runtime/serial_parallel.h"

namespace jaxgrad {

// Defined in kernels.cc, once per instruction set.
#define JAXGRAD_DECLARE(isa)                                            \
  namespace isa {                                                       \
  template <class S>                                                    \
  void pool(const PoolCall<S>&, Parallel&);                             \
  int64_t pool_workspace(PoolPass, const PoolShape&, int64_t, int64_t); \
  }
JAXGRAD_FOR_EACH_ISA(JAXGRAD_DECLARE)

namespace {

// With fewer elements in all windows, waking another thread costs more than it saves.
constexpr double kMinParallelWork = 1e5;

double elements_in_windows(const PoolShape& s) {
  double found = static_cast<double>(s.outer) * static_cast<double>(s.channels);
  for (int i = 0; i < kPoolAxes; ++i) found *= static_cast<double>(s.y[i]) * static_cast<double>(s.window[i]);
  return found;
}

}  // namespace

template <class S>
void pool(const PoolCall<S>& call, Parallel& parallel) {
  SerialParallel serial;
  Parallel& threads = elements_in_windows(call.shape) >= kMinParallelWork ? parallel : serial;
  JAXGRAD_RETURN_FOR_ISA(pool(call, threads))
}
template void pool<float>(const PoolCall<float>&, Parallel&);
template void pool<double>(const PoolCall<double>&, Parallel&);
template void pool<BFloat16>(const PoolCall<BFloat16>&, Parallel&);
template void pool<Float16>(const PoolCall<Float16>&, Parallel&);

int64_t pool_workspace(PoolPass pass, const PoolShape& shape, int64_t storage_bytes, int64_t threads) {
  JAXGRAD_RETURN_FOR_ISA(pool_workspace(pass, shape, storage_bytes, threads))
}

}  // namespace jaxgrad

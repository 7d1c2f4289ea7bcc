#include "cpu/pool/op.h"

#include "common/checked_int.h"
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

bool pool_sizes_fit(const PoolShape& s, int64_t threads) {
  constexpr int64_t kMaxTaps = int64_t{1} << 31;  // positions in a window are 32-bit ints
  CheckedInt positions = 1, taps = 1;
  for (int i = 0; i < kPoolAxes; ++i) {
    const bool positive = s.x[i] >= 0 && s.y[i] >= 0 && s.window[i] > 0 && s.strides[i] > 0 && s.dilation[i] > 0;
    if (!positive || s.padding[i] < 0) return false;
    const CheckedInt reach = CheckedInt(s.window[i]) * s.dilation[i];
    const CheckedInt last = (CheckedInt(s.y[i]) + 1) * s.strides[i] + reach + s.padding[i];
    if (last.overflowed()) return false;
    positions = positions * (CheckedInt(s.x[i]) + last + 2);
    taps = taps * s.window[i];
  }
  if (s.outer < 0 || s.channels < 0 || taps.overflowed() || taps.value() >= kMaxTaps) return false;
  const CheckedInt arrays = positions * (CheckedInt(s.channels) + 64) * (CheckedInt(s.outer) + 64) * 32;
  return !(arrays + (positions * 1024 + taps * 64 + 1024) * threads).overflowed();
}

}  // namespace jaxgrad

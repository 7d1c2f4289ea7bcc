#include "cpu/depthwise/op.h"

#include "common/checked_int.h"
#include "cpu/runtime/isa.h"
#include "cpu/runtime/serial_parallel.h"

namespace jaxgrad {

// Defined in kernels.cc, once per instruction set.
#define JAXGRAD_DECLARE(isa)                                                    \
  namespace isa {                                                               \
  template <class S>                                                            \
  void depthwise_forward(const DepthwiseForward<S>&, Parallel&);                \
  template <class S>                                                            \
  void depthwise_input_gradient(const DepthwiseInputGradient<S>&, Parallel&);   \
  template <class S>                                                            \
  void depthwise_weight_gradient(const DepthwiseWeightGradient<S>&, Parallel&); \
  int64_t depthwise_workspace(ConvPass, const DepthwiseShape&, bool, int64_t);  \
  }
JAXGRAD_FOR_EACH_ISA(JAXGRAD_DECLARE)

namespace {

// With fewer multiplications, waking another thread costs more than it saves.
constexpr double kMinParallelWork = 1e5;

double multiplications(const DepthwiseShape& s) {
  double found = static_cast<double>(s.problems) * static_cast<double>(s.batch) * static_cast<double>(s.channels);
  for (int i = 0; i < kDepthwiseAxes; ++i) found *= static_cast<double>(s.y[i]) * static_cast<double>(s.window[i]);
  return found;
}

// Calls run(Parallel&), on one thread for small calls.
template <class Run>
void run_on_threads(const DepthwiseShape& shape, Parallel& parallel, Run run) {
  SerialParallel serial;
  run(multiplications(shape) >= kMinParallelWork ? parallel : static_cast<Parallel&>(serial));
}

}  // namespace

template <class S>
void depthwise_forward(const DepthwiseForward<S>& call, Parallel& parallel) {
  run_on_threads(call.shape, parallel,
                 [&](Parallel& threads) { JAXGRAD_RETURN_FOR_ISA(depthwise_forward(call, threads)) });
}

template <class S>
void depthwise_input_gradient(const DepthwiseInputGradient<S>& call, Parallel& parallel) {
  run_on_threads(call.shape, parallel,
                 [&](Parallel& threads) { JAXGRAD_RETURN_FOR_ISA(depthwise_input_gradient(call, threads)) });
}

template <class S>
void depthwise_weight_gradient(const DepthwiseWeightGradient<S>& call, Parallel& parallel) {
  run_on_threads(call.shape, parallel,
                 [&](Parallel& threads) { JAXGRAD_RETURN_FOR_ISA(depthwise_weight_gradient(call, threads)) });
}

int64_t depthwise_workspace(ConvPass pass, const DepthwiseShape& shape, bool copies, int64_t threads) {
  JAXGRAD_RETURN_FOR_ISA(depthwise_workspace(pass, shape, copies, threads))
}

bool depthwise_sizes_fit(const DepthwiseShape& s, int64_t threads) {
  // More than all products of sizes, but for the sums of the weight gradient, which are few (ProductParts).
  constexpr int64_t kMargin = 1 << 6;
  CheckedInt positions = 1, taps = 1;
  for (int i = 0; i < kDepthwiseAxes; ++i) {
    positions = positions * (CheckedInt(s.x[i]) + s.y[i] + 2);
    taps = taps * (CheckedInt(s.window[i]) + 1);
  }
  const CheckedInt channels = CheckedInt(s.channels) + kMargin;
  const CheckedInt weights = taps * channels * s.problems * (4 * kMargin);
  const CheckedInt activations = positions * channels * s.batch * s.problems * 8;
  return !(weights + activations + positions * kMargin * 4 * threads).overflowed();
}

#define JAXGRAD_INSTANTIATE(S)                                                            \
  template void depthwise_forward<S>(const DepthwiseForward<S>&, Parallel&);              \
  template void depthwise_input_gradient<S>(const DepthwiseInputGradient<S>&, Parallel&); \
  template void depthwise_weight_gradient<S>(const DepthwiseWeightGradient<S>&, Parallel&);
JAXGRAD_INSTANTIATE(float)
JAXGRAD_INSTANTIATE(BFloat16)
JAXGRAD_INSTANTIATE(Float16)

}  // namespace jaxgrad

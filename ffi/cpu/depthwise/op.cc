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

#define JAXGRAD_DEFINE(function, Call)                                                                                \
  template <class S>                                                                                                  \
  void function(const Call<S>& call, Parallel& parallel) {                                                            \
    run_on_threads(call.shape, parallel, [&](Parallel& threads) { JAXGRAD_RETURN_FOR_ISA(function(call, threads)) }); \
  }                                                                                                                   \
  template void function<float>(const Call<float>&, Parallel&);                                                       \
  template void function<BFloat16>(const Call<BFloat16>&, Parallel&);                                                 \
  template void function<Float16>(const Call<Float16>&, Parallel&);

JAXGRAD_DEFINE(depthwise_forward, DepthwiseForward)
JAXGRAD_DEFINE(depthwise_input_gradient, DepthwiseInputGradient)
JAXGRAD_DEFINE(depthwise_weight_gradient, DepthwiseWeightGradient)

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

}  // namespace jaxgrad

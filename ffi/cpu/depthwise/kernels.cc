// The depthwise kernels. This file is compiled once per instruction set; JAXGRAD_ISA names the namespace.
#include "cpu/depthwise/weight_gradient_pass.h"
#include "cpu/depthwise/window_pass.h"

namespace jaxgrad::JAXGRAD_ISA {

template <class S>
void depthwise_forward(const DepthwiseForward<S>& c, Parallel& parallel) {
  const WindowCall<S> call{true, c.shape, c.x, c.w, c.bias, c.relu, c.y, c.workspace, c.workspace_bytes};
  WindowPass<S>(call, parallel.threads()).run(parallel);
}

template <class S>
void depthwise_input_gradient(const DepthwiseInputGradient<S>& c, Parallel& parallel) {
  const WindowCall<S> call{false, c.shape, c.dy, c.w, nullptr, false, c.dx, c.workspace, c.workspace_bytes};
  WindowPass<S>(call, parallel.threads()).run(parallel);
}

template <class S>
void depthwise_weight_gradient(const DepthwiseWeightGradient<S>& call, Parallel& parallel) {
  WeightGradientPass<S>(call, parallel.threads()).run(parallel);
}

#define JAXGRAD_INSTANTIATE(S)                                                            \
  template void depthwise_forward<S>(const DepthwiseForward<S>&, Parallel&);              \
  template void depthwise_input_gradient<S>(const DepthwiseInputGradient<S>&, Parallel&); \
  template void depthwise_weight_gradient<S>(const DepthwiseWeightGradient<S>&, Parallel&);
JAXGRAD_INSTANTIATE(float)
JAXGRAD_INSTANTIATE(BFloat16)
JAXGRAD_INSTANTIATE(Float16)

int64_t depthwise_workspace(ConvPass pass, const DepthwiseShape& shape, bool copies, int64_t threads) {
  if (pass == ConvPass::kWeightGradient) {
    const ProductParts split(shape, copies);
    return ProductWorkspace(shape, split, threads, nullptr).arena.bytes();
  }
  const WindowBoxes split(pass == ConvPass::kForward, shape, copies, 1);
  return WindowWorkspace(shape, split.scratch, threads, nullptr).arena.bytes();
}

}  // namespace jaxgrad::JAXGRAD_ISA

// The normalization kernels. This file is compiled once per instruction set; JAXGRAD_ISA names the namespace.
#include "cpu/norm/blocks.h"
#include "cpu/norm/rows.h"

namespace jaxgrad::JAXGRAD_ISA {
namespace {

// Calls run(Act{}).
template <class Run>
void with_activation(Activation activation, Run run) {
  switch (activation) {
    case Activation::kRelu:
      return run(Relu());
    case Activation::kSilu:
      return run(Silu());
    case Activation::kGelu:
      return run(Gelu());
    default:
      return run(Identity());
  }
}

template <class Kernels, class Q>
void run_forward(Kernels kernels, const NormStatistics<Q>* statistics, const NormNormalize<Q>* normalize) {
  const Activation activation = normalize == nullptr ? Activation::kNone : normalize->activation;
  with_activation(activation, [&](auto act) { kernels.forward(statistics, normalize, act); });
}

template <class Kernels, class Q>
void run_backward(Kernels kernels, const NormBackward<Q>& call) {
  if (call.frozen) return kernels.template backward<true>(call, Identity());
  with_activation(call.activation, [&](auto act) { kernels.template backward<false>(call, act); });
}

}  // namespace

int64_t norm_workspace(const NormShape& shape, int64_t storage_bytes) {
  if (RowLayout::suits(shape))
    return storage_bytes == sizeof(double) ? NormRows<double>::workspace(shape) : NormRows<float>::workspace(shape);
  return storage_bytes == sizeof(double) ? NormBlocks<double>::workspace(shape) : NormBlocks<float>::workspace(shape);
}

template <class Q>
void norm_forward(const NormShape& shape, const NormStatistics<Q>* statistics, const NormNormalize<Q>* normalize,
                  std::byte* workspace, Parallel& parallel) {
  if (RowLayout::suits(shape)) return run_forward(NormRows<Q>(shape, workspace, parallel), statistics, normalize);
  run_forward(NormBlocks<Q>(shape, workspace, parallel), statistics, normalize);
}

template <class Q>
void norm_backward(const NormShape& shape, const NormBackward<Q>& call, std::byte* workspace, Parallel& parallel) {
  if (RowLayout::suits(shape)) return run_backward(NormRows<Q>(shape, workspace, parallel), call);
  run_backward(NormBlocks<Q>(shape, workspace, parallel), call);
}

#define JAXGRAD_INSTANTIATE(Q)                                                                                   \
  template void norm_forward<Q>(const NormShape&, const NormStatistics<Q>*, const NormNormalize<Q>*, std::byte*, \
                                Parallel&);                                                                      \
  template void norm_backward<Q>(const NormShape&, const NormBackward<Q>&, std::byte*, Parallel&);
JAXGRAD_INSTANTIATE(float)
JAXGRAD_INSTANTIATE(double)
JAXGRAD_INSTANTIATE(BFloat16)
JAXGRAD_INSTANTIATE(Float16)

}  // namespace jaxgrad::JAXGRAD_ISA

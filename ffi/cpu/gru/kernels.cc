// The GRU kernels. This file is compiled once per instruction set; JAXGRAD_ISA names the namespace.
#include "cpu/gru/backward_kernel.h"
#include "cpu/gru/forward_kernel.h"

namespace jaxgrad::JAXGRAD_ISA {

template <class S>
void gru_forward(const GruForward<S>& call, Parallel& parallel) {
  ForwardPass<S>(call).run(parallel);
}

template <class S>
void gru_backward(const GruBackward<S>& call, Parallel& parallel) {
  BackwardPass<S>(call).run(parallel);
}

#define JAXGRAD_INSTANTIATE(S)                                   \
  template void gru_forward<S>(const GruForward<S>&, Parallel&); \
  template void gru_backward<S>(const GruBackward<S>&, Parallel&);
JAXGRAD_INSTANTIATE(float)
JAXGRAD_INSTANTIATE(double)
JAXGRAD_INSTANTIATE(BFloat16)
JAXGRAD_INSTANTIATE(Float16)

}  // namespace jaxgrad::JAXGRAD_ISA

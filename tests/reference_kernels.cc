/* The kernels of ffi/cuda/conv_reference for one type, emulated on the CPU: for the fake driver and the test of the
   kernels. The type's definitions precede this file; KERNELS names the file with their source. */
#include "kernel_emulation.h"
#include KERNELS

static void** arguments; /* as cuLaunchKernel takes them */

template <class Type>
static Type argument(int i) {
  return *static_cast<Type*>(arguments[i]);
}

#define PLAY(NAME, ...)                                                                       \
  extern "C" void KERNEL(play_##NAME)(unsigned blocks, unsigned threads, void** arguments_) { \
    arguments = arguments_;                                                                   \
    launch(blocks, 1, threads, 0, [] { KERNEL(NAME)(__VA_ARGS__); });                         \
  }

PLAY(reference_fill, argument<T*>(0), argument<long long>(1), argument<int>(2), argument<unsigned long long>(3))
PLAY(reference_sums, argument<T*>(0), argument<T*>(1), argument<T*>(2), argument<T*>(3), argument<long long*>(4),
     argument<double*>(5), argument<ReferenceProblem>(6))
PLAY(reference_gather, argument<T*>(0), argument<long long*>(1), argument<unsigned>(2), argument<double*>(3),
     argument<ReferenceProblem>(4))

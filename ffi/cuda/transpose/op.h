// Transposes arrays on the GPU, by kernels of our own: XLA's take several times as long for elements of 2 bytes, and
// where axes are reversed on the way.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/conv_problem.h"
#include "cuda/transpose/kernel_arguments.h"

namespace jaxgrad {

// Compiles the kernels and loads them on a device, once; throws nvrtc::Error or driver::Error where that fails.
// Thread-safe, and allowed during a capture. The device is the current one.
void load_transposition(int device);

// Copies an array of `axes` axes from one place to another, where these lie in another order or are reversed. An axis
// is reversed whose stride in `to` is negative, which the last axis of more than one element must not be if it is the
// same in both; `out` is where the array begins nevertheless. Throws as load_transposition() does; may be captured.
void transpose(CUstream stream, int device, int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
               const ConvOperand& to, void* out);

// The kernels, by name.
constexpr std::array<const char*, 11> kTranspositionKernels = {
    "transpose_2",     "transpose_4", "transpose_8", "transpose_few_2", "transpose_few_4", "transpose_few_8",
    "transpose_pairs", "move_rows_2", "move_rows_4", "move_rows_8",     "move_rows_16"};

// What transpose() launches.
struct TranspositionLaunch {
  size_t kernel;  // which of them
  Transposition description;
  unsigned blocks;
};
TranspositionLaunch transposition_launch(int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
                                         const ConvOperand& to, const void* out);

}  // namespace jaxgrad

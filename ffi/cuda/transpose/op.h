// Transposes arrays on the GPU, and reverses axes at the same time, by the kernels of transpose.cu. No XLA types.
//
// The transposes of XLA take several times as long for elements of 2 bytes, and if axes are reversed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/conv_problem.h"
#include "cuda/runtime/driver.h"
#include "cuda/transpose/kernel_arguments.h"

namespace jaxgrad {

// Whether a call should transpose an array by these kernels, rather than leave the transpose to XLA. Logical axis i has
// sizes[i] elements and is at position from_spec[i] of the input and to_spec[i] of the output; `reversed_axes` are
// reversed.
//
// False for arrays of 2^31 elements or more, and for rows of contiguous elements that stay contiguous, unless an axis
// is reversed: XLA moves rows well, and removes a transpose that does not change the memory layout. False if the
// elements of such rows are reversed, which the kernels do not support. transpose() accepts every array for which the
// result is true.
//
// Throws std::invalid_argument if the specs are no permutations of the axes.
bool transpose_supported(const std::vector<int64_t>& sizes, const std::vector<int64_t>& from_spec,
                         const std::vector<int64_t>& to_spec, const std::vector<int64_t>& reversed_axes);

// Compiles the kernels and loads them on the current device, once per device. Throws nvrtc::Error or driver::Error.
// Thread-safe; allowed while the stream is captured.
void load_transpose_kernels(int device);

// Transposes an array of `axes` axes. A negative stride in `to` reverses an axis; `out` is the start of the output
// anyway. Throws std::invalid_argument for arrays that the kernels do not support, and as load_transpose_kernels()
// does. Allowed while the stream is captured.
void transpose(CUstream stream, int device, int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
               const ConvOperand& to, void* out);

// The names of the kernels.
constexpr std::array<const char*, 11> kTransposeKernels = {
    "transpose_2",     "transpose_4", "transpose_8", "transpose_few_2", "transpose_few_4", "transpose_few_8",
    "transpose_pairs", "move_rows_2", "move_rows_4", "move_rows_8",     "move_rows_16"};

// The launch that transpose() makes.
struct TransposeLaunch {
  size_t kernel;  // index into kTransposeKernels
  TransposeArguments arguments;
  unsigned blocks;
};
TransposeLaunch transpose_launch(int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
                                 const ConvOperand& to, const void* out);

}  // namespace jaxgrad

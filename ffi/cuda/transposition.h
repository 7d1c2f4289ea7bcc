// Transposes arrays on the GPU, by kernels of our own: XLA's take several times as long for elements of 2 bytes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../common/conv_shape.h"

namespace jaxgrad {

// Compiles the kernels and loads them on a device, once; throws nvrtc::Error or driver::Error where that fails.
// Thread-safe, and allowed during a capture. The device is the current one.
void load_transposition(int device);

// Copies an array of `axes` axes from one place to another, where these lie in another order. The last axis of more
// than one element must not be the same in both. Throws as load_transposition() does; may be captured.
void transpose(CUstream stream, int device, int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
               const ConvOperand& to, void* out);

}  // namespace jaxgrad

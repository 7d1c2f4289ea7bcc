// Chooses how the kernel of weight_gradient.cu divides a depthwise weight gradient into tiles and threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/conv_problem.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

// The properties of a GPU that the tiling depends on.
struct Gpu {
  int architecture = 0;  // 10 * major + minor compute capability
  int multiprocessors = 0;
  int64_t shared_bytes = 0;         // of shared memory, largest per block
  int64_t shared_bytes_in_all = 0;  // of shared memory per multiprocessor
};

// A depthwise convolution of [N, H, W, C] with weights [KH, KW, C]. H is 1 if there is one spatial dimension.
struct DepthwiseShape {
  FloatType type{};
  int64_t N, H, W, C, HO, WO, KH, KW;
  int64_t SH, SW, PH, PW, DH, DW;  // strides, padding before the first element, dilation of the window
  bool taps_last;                  // the layout of the weights is [C, KH, KW], otherwise [KH, KW, C]

  int64_t element_bytes() const { return bytes_of(type); }
  int64_t taps() const { return KH * KW; }
};

// The constants in capitals are explained in weight_gradient.cu.
struct DepthwiseTiling {
  int64_t SUB_H, SUB_W, TN, TH, TW, CC, GROUPS, KG, STAGES, BLOCKS, VECTOR;
  int64_t threads, shared_bytes, tiles, chunks;
  int64_t shares;  // blocks that share the tiles; the grid is (chunks, shares)

  int64_t partial_bytes(const DepthwiseShape& shape) const { return shares * shape.taps() * shape.C * 4; }
};

// The shape of a weight gradient. If the kernel does not support the problem, the result is empty and `reason` is set.
std::optional<DepthwiseShape> depthwise_shape(const ConvProblem& problem, FloatType type, std::string& reason);

// The tiling with the smallest estimated time; empty if none fits the GPU.
std::optional<DepthwiseTiling> depthwise_tiling(const DepthwiseShape& shape, const Gpu& gpu);

// The macro definitions that precede the source of the kernel. They do not depend on the batch size but for the tiling.
std::string depthwise_definitions(const DepthwiseShape& shape, const DepthwiseTiling& tiling);

constexpr int64_t kDepthwiseSumSlices = 8;  // threads that add the partial sums of one element of dw

}  // namespace jaxgrad

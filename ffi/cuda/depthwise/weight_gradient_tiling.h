// Chooses how the kernel of weight_gradient.cu divides a depthwise weight gradient into tiles and threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/conv_problem.h"
#include "cuda/depthwise/gpu.h"
#include "cuda/depthwise/weight_gradient_arguments.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

// A depthwise convolution of [N, Z, H, W, C] with weights [KZ, KH, KW, C]. Z is 1 if there are fewer than three spatial
// dimensions, and H is 1 if there is one.
struct DepthwiseShape {
  FloatType type{};
  int64_t N, C, Z, H, W, ZO, HO, WO, KZ, KH, KW;
  int64_t SZ, SH, SW, PZ, PH, PW, DZ, DH, DW;  // strides, padding before the first element, dilation of the window
  bool taps_last;  // the layout of the weights is [C, KZ, KH, KW], otherwise [KZ, KH, KW, C]

  int64_t element_bytes() const { return bytes_of(type); }
  int64_t taps() const { return KZ * KH * KW; }
  int64_t planes() const { return N * ZO; }  // of dy
};

// The constants in capitals are explained in weight_gradient.cu.
struct DepthwiseTiling {
  int64_t SUB_H, SUB_W, TN, TH, TW, CC, GROUPS, KG, STAGES, BLOCKS, VECTOR;
  int64_t threads, shared_bytes, tiles, chunks;
  int64_t shares;  // blocks that share the tiles; the grid is (chunks KZ, shares)

  int64_t partial_bytes(const DepthwiseShape& shape) const { return shares * shape.taps() * shape.C * 4; }
};

// The shape of a weight gradient. If the kernel does not support the problem, the result is empty and `reason` is set.
std::optional<DepthwiseShape> depthwise_shape(const ConvProblem& problem, FloatType type, std::string& reason);

// The tiling with the smallest estimated time; empty if none fits the GPU. Sizes are rounded up first, so that calls of
// similar sizes have the same tiling.
std::optional<DepthwiseTiling> depthwise_tiling(const DepthwiseShape& shape, const Gpu& gpu);

DepthwiseGradientArguments depthwise_arguments(const DepthwiseShape& shape, const DepthwiseTiling& tiling);

// The macro definitions that precede the source of the kernel. They depend on no size but those of the window.
std::string depthwise_definitions(const DepthwiseShape& shape, const DepthwiseTiling& tiling);

constexpr int64_t kDepthwiseSumSlices = 8;  // threads that add the partial sums of one element of dw

}  // namespace jaxgrad

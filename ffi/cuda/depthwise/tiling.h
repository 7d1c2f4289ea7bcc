// How the weight gradient of a depthwise convolution is shared out among a GPU's threads: kernels/depthwise_filter.cu.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/conv/op.h"

namespace jaxgrad {

// What of a GPU the sharing out depends on.
struct Gpu {
  int architecture = 0;  // 10 * major + minor compute capability
  int multiprocessors = 0;
  int64_t shared_bytes = 0;         // of shared memory that one block may have
  int64_t shared_bytes_in_all = 0;  // that the blocks of one multiprocessor share
};

// A depthwise convolution of [N, H, W, C] with a window of [KH, KW, C]; one over a single axis has an H of 1.
struct DepthwiseShape {
  FloatType type{};
  int64_t N, H, W, C, HO, WO, KH, KW;
  int64_t SH, SW, PH, PW, DH, DW;  // strides, padding before the first element, dilation of the window
  bool taps_last;                  // the weights lie as [C, KH, KW], otherwise as [KH, KW, C]

  int64_t element_bytes() const { return bytes_of(type); }
  int64_t taps() const { return KH * KW; }
};

// What the kernel is compiled for, beside the shape; its own source says what each is.
struct DepthwiseTiling {
  int64_t SUB_H, SUB_W, TN, TH, TW, CC, GROUPS, KG, STAGES, BLOCKS, VECTOR;
  int64_t threads, shared_bytes, tiles, chunks;
  int64_t shares;  // of the tiles: the grid is (chunks, shares)

  int64_t partial_bytes(const DepthwiseShape& shape) const { return shares * shape.taps() * shape.C * 4; }
};

// The shape of a call of the unit backward_filter; empty where the kernel cannot take it, with the reason.
std::optional<DepthwiseShape> depthwise_shape(const ConvShape& call, FloatType type, std::string& reason);

// The tiling whose time is estimated to be the least; empty where none fits the GPU.
std::optional<DepthwiseTiling> depthwise_tiling(const DepthwiseShape& shape, const Gpu& gpu);

// What the kernels' source, kDepthwiseWeightGradientSource, is compiled with for a shape and a tiling.
std::string depthwise_definitions(const DepthwiseShape& shape, const DepthwiseTiling& tiling);

constexpr int64_t kDepthwiseSumSlices = 8;  // threads that add the partial sums of one element of dw

}  // namespace jaxgrad

// Weight gradients over many positions, computed in parts.
//
// In oneDNN, each thread adds the products of all of its positions to one float32 sum. Over a million positions, the
// rounding errors reach 2e-4 of the sum. Parts of at most 65536 positions for each thread, whose sums are added at the
// end, have an error of 3e-6, and take the same time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/conv/op.h"

namespace jaxgrad {

// Adds n elements of `from` to those of `to`.
void add(float* to, const float* from, int64_t n);

// Some images of a call, or a band of rows of one image.
struct ConvPart {
  ConvKey key;
  int64_t x_offset, y_offset;  // in elements
};

// The parts of a call. Calls that are not divided are one part: other passes and types, few positions.
std::vector<ConvPart> conv_parts(const ConvKey& key);

// A plan that runs plans of the parts of `key`, of which there are several, and adds their results.
std::shared_ptr<const ConvPlan> make_summed_plan(const ConvKey& key, const std::vector<ConvPart>& parts);

}  // namespace jaxgrad

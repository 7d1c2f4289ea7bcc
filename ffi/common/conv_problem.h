// A convolution's geometry, as every platform's kernels take it: y = conv(x, w), whichever of the three is computed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jaxgrad {

constexpr int kMaxSpatial = 3;

enum class ConvKind : int64_t { kForward = 0, kBackwardInput = 1, kBackwardFilter = 2 };

// An operand as it lies in memory: the sizes and strides (in elements) of its logical axes.
// Activations: batch, feature, spatial. Filters: output feature, input feature of a group, spatial.
using ConvAxes = std::array<int64_t, kMaxSpatial + 2>;
struct ConvOperand {
  ConvAxes sizes{}, strides{};

  bool operator==(const ConvOperand& other) const { return sizes == other.sizes && strides == other.strides; }
};

struct ConvShape {
  ConvKind kind{};
  int spatial = 0;  // 1 to kMaxSpatial
  int64_t groups = 1;
  ConvOperand x, w, y;  // of the forward convolution, whatever the kind
  std::array<int64_t, kMaxSpatial> window_strides{}, rhs_dilation{}, padding_low{}, padding_high{};

  bool operator==(const ConvShape& other) const;
};

// Builds a hash value by value.
class Hash {
 public:
  void mix(int64_t value) { hash_ = (hash_ ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u + (hash_ >> 29); }
  void mix(const ConvShape& shape);
  size_t value() const { return hash_; }

 private:
  size_t hash_ = 0;
};

// A call as Python describes it: the shapes of x, w and y, and where their axes lie.
struct ConvCall {
  std::vector<int64_t> x, w, y;                       // shapes
  std::vector<int64_t> lhs_spec, rhs_spec, out_spec;  // as in jax.lax.ConvDimensionNumbers
  std::vector<int64_t> window_strides, padding, rhs_dilation;
  int64_t feature_group_count;
};

// The shape of a call; `problem` says what does not fit, if anything.
ConvShape conv_shape(ConvKind kind, const ConvCall& call, std::string& problem);

}  // namespace jaxgrad

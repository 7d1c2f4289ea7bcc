// A convolution problem: the pass and the geometry of the forward convolution y = conv(x, w), which all three passes
// share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jaxgrad {

constexpr int kMaxSpatial = 3;

// Forward: y from (x, w). Input gradient: dx from (dy, w). Weight gradient: dw from (x, dy).
enum class ConvPass : int64_t { kForward = 0, kInputGradient = 1, kWeightGradient = 2 };

// Sizes and strides (in elements) of an operand's logical axes.
// Activations: batch, feature, spatial. Weights: output feature, input feature of a group, spatial.
using ConvAxes = std::array<int64_t, kMaxSpatial + 2>;
struct ConvOperand {
  ConvAxes sizes{}, strides{};

  bool operator==(const ConvOperand& other) const { return sizes == other.sizes && strides == other.strides; }
};

// The strides of a dense operand with the axes in the order batch, spatial axes, features (channels last) or batch,
// features, spatial axes.
ConvAxes dense_strides(const ConvOperand& operand, int spatial, bool channels_last);

bool is_channels_last(const ConvOperand& operand, int spatial);

int64_t elements(const ConvOperand& operand, int spatial);

struct ConvProblem {
  ConvPass pass{};
  int spatial = 0;  // number of spatial dimensions, 1 to kMaxSpatial
  int64_t groups = 1;
  ConvOperand x, w, y;  // dx, dw and dy have the geometry of x, w and y
  std::array<int64_t, kMaxSpatial> window_strides{}, rhs_dilation{}, padding_low{}, padding_high{};

  bool operator==(const ConvProblem& other) const;
};

// Hashes a sequence of values, field by field.
class Hash {
 public:
  void mix(int64_t value) { hash_ = (hash_ ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u + (hash_ >> 29); }
  void mix(const ConvProblem& problem);
  size_t value() const { return hash_; }

 private:
  size_t hash_ = 0;
};

// The arguments of a call as they arrive, before any check: shapes and attributes.
struct ConvArguments {
  std::vector<int64_t> x, w, y;                       // shapes
  std::vector<int64_t> lhs_spec, rhs_spec, out_spec;  // as in jax.lax.ConvDimensionNumbers
  std::vector<int64_t> window_strides, padding, rhs_dilation;
  int64_t feature_group_count;
};

// Whether the arrays have an axis of independent problems.
bool has_problem_axis(const ConvArguments& arguments);

// Removes the axis of independent problems, if there is one, from the shapes. Returns false if the shapes disagree. w
// has the problems as an additional first axis. x and y have this axis too, or their batch, if it is their first axis,
// is num_problems times as large.
bool remove_problem_axis(ConvArguments& arguments, int64_t& num_problems);

// Checks the arguments and returns the problem. If a check fails, `error` is set and the result is meaningless.
ConvProblem make_conv_problem(ConvPass pass, const ConvArguments& arguments, std::string& error);

}  // namespace jaxgrad

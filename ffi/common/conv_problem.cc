#include "common/conv_problem.h"

#include <algorithm>

namespace jaxgrad {
namespace {

bool is_permutation_of_axes(const std::vector<int64_t>& spec, size_t rank) {
  std::vector<int64_t> sorted = spec;
  std::sort(sorted.begin(), sorted.end());
  for (size_t axis = 0; axis < sorted.size(); ++axis)
    if (sorted[axis] != static_cast<int64_t>(axis)) return false;
  return sorted.size() == rank;
}

// The operand whose array of `shape` has its logical axes where `spec` says.
ConvOperand operand(const std::vector<int64_t>& shape, const std::vector<int64_t>& spec) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  ConvOperand found;
  for (size_t i = 0; i < spec.size(); ++i) {
    found.sizes[i] = shape[spec[i]];
    found.strides[i] = strides[spec[i]];
  }
  return found;
}

template <size_t N>
void assign(std::array<int64_t, N>& to, const std::vector<int64_t>& from, size_t first, size_t step) {
  for (size_t i = 0; first + i * step < from.size() && i < N; ++i) to[i] = from[first + i * step];
}

std::string check_sizes(const ConvShape& shape) {
  if (shape.x.sizes[0] != shape.y.sizes[0]) return "x and y must have the same batch";
  if (shape.groups < 1 || shape.x.sizes[1] != shape.w.sizes[1] * shape.groups)
    return "x must have as many features as w has for all groups";
  if (shape.y.sizes[1] != shape.w.sizes[0]) return "y must have as many features as w has output features";
  if (shape.w.sizes[0] % shape.groups != 0) return "the output features must divide into the groups";
  for (int i = 0; i < shape.spatial; ++i) {
    const int64_t extent = (shape.w.sizes[i + 2] - 1) * shape.rhs_dilation[i] + 1;
    const int64_t room = shape.x.sizes[i + 2] + shape.padding_low[i] + shape.padding_high[i] - extent;
    if (shape.window_strides[i] < 1 || shape.rhs_dilation[i] < 1 || shape.padding_low[i] < 0 ||
        shape.padding_high[i] < 0)
      return "strides and dilations must be positive and padding must not be negative";
    if (room < 0 || shape.y.sizes[i + 2] != room / shape.window_strides[i] + 1)
      return "y does not have the spatial sizes that x, w, strides, padding and dilation come to";
  }
  for (const ConvOperand* operand : {&shape.x, &shape.w, &shape.y})
    for (int axis = 0; axis < shape.spatial + 2; ++axis)
      if (operand->sizes[axis] < 1) return "no array may be empty";
  return "";
}

}  // namespace

bool ConvShape::operator==(const ConvShape& o) const {
  return kind == o.kind && spatial == o.spatial && groups == o.groups && x == o.x && w == o.w && y == o.y &&
         window_strides == o.window_strides && rhs_dilation == o.rhs_dilation && padding_low == o.padding_low &&
         padding_high == o.padding_high;
}

void Hash::mix(const ConvShape& shape) {
  auto mix_all = [&](const auto& values) {
    for (int64_t value : values) mix(value);
  };
  mix(static_cast<int64_t>(shape.kind));
  mix(shape.spatial);
  mix(shape.groups);
  for (const ConvOperand* operand : {&shape.x, &shape.w, &shape.y}) {
    mix_all(operand->sizes);
    mix_all(operand->strides);
  }
  mix_all(shape.window_strides);
  mix_all(shape.rhs_dilation);
  mix_all(shape.padding_low);
  mix_all(shape.padding_high);
}

ConvShape conv_shape(ConvKind kind, const ConvCall& call, std::string& problem) {
  ConvShape shape{};
  const size_t rank = call.x.size(), n = rank - 2;
  const bool ranks_fit = rank >= 3 && n <= kMaxSpatial && call.w.size() == rank && call.y.size() == rank &&
                         call.window_strides.size() == n && call.rhs_dilation.size() == n &&
                         call.padding.size() == 2 * n;
  if (!ranks_fit) {
    problem = "arrays must have rank 3 to 5, and a stride, a dilation and two paddings to each spatial axis";
    return shape;
  }
  for (const auto* spec : {&call.lhs_spec, &call.rhs_spec, &call.out_spec})
    if (!is_permutation_of_axes(*spec, rank)) {
      problem = "each spec must be a permutation of the axes";
      return shape;
    }
  shape.kind = kind;
  shape.spatial = static_cast<int>(n);
  shape.groups = call.feature_group_count;
  shape.x = operand(call.x, call.lhs_spec);
  shape.w = operand(call.w, call.rhs_spec);
  shape.y = operand(call.y, call.out_spec);
  assign(shape.window_strides, call.window_strides, 0, 1);
  assign(shape.rhs_dilation, call.rhs_dilation, 0, 1);
  assign(shape.padding_low, call.padding, 0, 2);
  assign(shape.padding_high, call.padding, 1, 2);
  problem = check_sizes(shape);
  return shape;
}

}  // namespace jaxgrad

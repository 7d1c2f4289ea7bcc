#include "common/conv_problem.h"

#include <algorithm>

#include "common/checked_int.h"

namespace jaxgrad {
namespace {

bool is_permutation_of_axes(const std::vector<int64_t>& spec, size_t rank) {
  std::vector<int64_t> sorted = spec;
  std::sort(sorted.begin(), sorted.end());
  for (size_t axis = 0; axis < sorted.size(); ++axis)
    if (sorted[axis] != static_cast<int64_t>(axis)) return false;
  return sorted.size() == rank;
}

// An operand of the given shape, dense and row-major. spec[i] is the position of logical axis i.
ConvOperand dense_operand(const std::vector<int64_t>& shape, const std::vector<int64_t>& spec) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  ConvOperand operand;
  for (size_t i = 0; i < spec.size(); ++i) {
    operand.sizes[i] = shape[spec[i]];
    operand.strides[i] = strides[spec[i]];
  }
  return operand;
}

// Whether the array has elements, but no more than can be addressed.
bool is_valid_shape(const std::vector<int64_t>& shape) {
  constexpr int64_t kMaxElementBytes = 8;
  CheckedInt bytes = kMaxElementBytes;
  for (const int64_t size : shape) {
    if (size < 1) return false;
    bytes = bytes * size;
  }
  return !bytes.overflowed();
}

// Copies from[first], from[first + step], ... to `to`.
template <size_t N>
void copy_strided(std::array<int64_t, N>& to, const std::vector<int64_t>& from, size_t first, size_t step) {
  for (size_t i = 0; first + i * step < from.size() && i < N; ++i) to[i] = from[first + i * step];
}

// Returns an error message, or an empty string.
std::string check_sizes(const ConvProblem& p) {
  if (p.x.sizes[0] != p.y.sizes[0]) return "x and y must have the same batch";
  if (p.groups < 1 || p.x.sizes[1] % p.groups != 0 || p.x.sizes[1] / p.groups != p.w.sizes[1])
    return "the features of x must be the input features of w times the groups";
  if (p.y.sizes[1] != p.w.sizes[0]) return "y must have as many features as w has output features";
  if (p.w.sizes[0] % p.groups != 0) return "the output features must be a multiple of the groups";
  for (int i = 0; i < p.spatial; ++i) {
    if (p.window_strides[i] < 1 || p.rhs_dilation[i] < 1 || p.padding_low[i] < 0 || p.padding_high[i] < 0)
      return "strides and dilations must be positive and padding must not be negative";
    const CheckedInt dilated_window = CheckedInt(p.w.sizes[i + 2] - 1) * p.rhs_dilation[i] + 1;
    const CheckedInt last_start = CheckedInt(p.x.sizes[i + 2]) + p.padding_low[i] + p.padding_high[i] - dilated_window;
    if (last_start.overflowed() || last_start.value() < 0 ||
        p.y.sizes[i + 2] != last_start.value() / p.window_strides[i] + 1)
      return "the spatial sizes of y must follow from x, w, strides, padding and dilation";
  }
  return "";
}

}  // namespace

ConvAxes dense_strides(const ConvOperand& operand, int spatial, bool channels_last) {
  ConvAxes strides{};
  int64_t stride = 1;
  auto next = [&](int axis) {
    strides[axis] = stride;
    stride *= operand.sizes[axis];
  };
  if (channels_last) next(1);
  for (int axis = spatial + 1; axis >= 2; --axis) next(axis);
  if (!channels_last) next(1);
  next(0);
  return strides;
}

bool is_channels_last(const ConvOperand& operand, int spatial) {
  return operand.strides == dense_strides(operand, spatial, true);
}

int64_t elements(const ConvOperand& operand, int spatial) {
  int64_t count = 1;
  for (int axis = 0; axis < spatial + 2; ++axis) count *= operand.sizes[axis];
  return count;
}

bool ConvProblem::operator==(const ConvProblem& o) const {
  return pass == o.pass && spatial == o.spatial && groups == o.groups && x == o.x && w == o.w && y == o.y &&
         window_strides == o.window_strides && rhs_dilation == o.rhs_dilation && padding_low == o.padding_low &&
         padding_high == o.padding_high;
}

void Hash::mix(const ConvProblem& problem) {
  auto mix_all = [&](const auto& values) {
    for (int64_t value : values) mix(value);
  };
  mix(static_cast<int64_t>(problem.pass));
  mix(problem.spatial);
  mix(problem.groups);
  for (const ConvOperand* operand : {&problem.x, &problem.w, &problem.y}) {
    mix_all(operand->sizes);
    mix_all(operand->strides);
  }
  mix_all(problem.window_strides);
  mix_all(problem.rhs_dilation);
  mix_all(problem.padding_low);
  mix_all(problem.padding_high);
}

bool has_problem_axis(const ConvArguments& arguments) { return arguments.w.size() == arguments.rhs_spec.size() + 1; }

bool remove_problem_axis(ConvArguments& arguments, int64_t& num_problems) {
  if (!has_problem_axis(arguments)) return true;
  num_problems = arguments.w.front();
  auto remove = [&](std::vector<int64_t>& shape, const std::vector<int64_t>& spec) {
    if (num_problems < 1 || shape.empty() || spec.empty() || shape.front() % num_problems != 0) return false;
    shape.front() /= num_problems;
    if (shape.size() != spec.size() + 1) return spec.front() == 0;  // the problems are part of the batch
    const bool has_own_axis = shape.front() == 1;
    shape.erase(shape.begin());
    return has_own_axis;
  };
  return remove(arguments.w, arguments.rhs_spec) && remove(arguments.x, arguments.lhs_spec) &&
         remove(arguments.y, arguments.out_spec);
}

ConvProblem make_conv_problem(ConvPass pass, const ConvArguments& arguments, std::string& error) {
  ConvProblem problem{};
  const size_t rank = arguments.x.size(), n = rank < 3 ? 0 : rank - 2;
  const bool ranks_match = n >= 1 && n <= kMaxSpatial && arguments.w.size() == rank && arguments.y.size() == rank &&
                           arguments.window_strides.size() == n && arguments.rhs_dilation.size() == n &&
                           arguments.padding.size() == 2 * n;
  if (!ranks_match) {
    error = "x, w and y must have the same rank, 3 to 5, and each spatial axis a stride, a dilation and two paddings";
    return problem;
  }
  for (const auto* spec : {&arguments.lhs_spec, &arguments.rhs_spec, &arguments.out_spec})
    if (!is_permutation_of_axes(*spec, rank)) {
      error = "each spec must be a permutation of the axes";
      return problem;
    }
  for (const auto* shape : {&arguments.x, &arguments.w, &arguments.y})
    if (!is_valid_shape(*shape)) {
      error = "no array may be empty or have 2^63 bytes";
      return problem;
    }
  problem.pass = pass;
  problem.spatial = static_cast<int>(n);
  problem.groups = arguments.feature_group_count;
  problem.x = dense_operand(arguments.x, arguments.lhs_spec);
  problem.w = dense_operand(arguments.w, arguments.rhs_spec);
  problem.y = dense_operand(arguments.y, arguments.out_spec);
  copy_strided(problem.window_strides, arguments.window_strides, 0, 1);
  copy_strided(problem.rhs_dilation, arguments.rhs_dilation, 0, 1);
  copy_strided(problem.padding_low, arguments.padding, 0, 2);
  copy_strided(problem.padding_high, arguments.padding, 1, 2);
  error = check_sizes(problem);
  return problem;
}

}  // namespace jaxgrad

#include "conv_ffi.h"

#include <algorithm>
#include <exception>
#include <string>

#include "../common/checks.h"
#include "onednn_threads.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;
using Bytes = ffi::Result<ffi::Buffer<ffi::U8>>;
using Axes = ffi::Span<const int64_t>;

std::vector<int64_t> copy(Axes axes) { return {axes.begin(), axes.end()}; }

std::vector<int64_t> copy(const Arg& buffer) { return {buffer.dimensions().begin(), buffer.dimensions().end()}; }

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

std::string check_sizes(const ConvKey& key) {
  if (key.x.sizes[0] != key.y.sizes[0]) return "x and y must have the same batch";
  if (key.groups < 1 || key.x.sizes[1] != key.w.sizes[1] * key.groups)
    return "x must have as many features as w has for all groups";
  if (key.y.sizes[1] != key.w.sizes[0]) return "y must have as many features as w has output features";
  if (key.w.sizes[0] % key.groups != 0) return "the output features must divide into the groups";
  for (int i = 0; i < key.spatial; ++i) {
    const int64_t extent = (key.w.sizes[i + 2] - 1) * key.rhs_dilation[i] + 1;
    const int64_t room = key.x.sizes[i + 2] + key.padding_low[i] + key.padding_high[i] - extent;
    if (key.window_strides[i] < 1 || key.rhs_dilation[i] < 1 || key.padding_low[i] < 0 || key.padding_high[i] < 0)
      return "strides and dilations must be positive and padding must not be negative";
    if (room < 0 || key.y.sizes[i + 2] != room / key.window_strides[i] + 1)
      return "y does not have the spatial sizes that x, w, strides, padding and dilation come to";
  }
  for (const ConvOperand* operand : {&key.x, &key.w, &key.y})
    for (int axis = 0; axis < key.spatial + 2; ++axis)
      if (operand->sizes[axis] < 1) return "no array may be empty";
  return "";
}

// Below this many multiplications, waking other threads costs more than it gains.
constexpr double kWorthATeam = 1 << 22;

int threads_for(const ConvKey& key) {
  double multiplications = static_cast<double>(key.y.sizes[0]);
  for (int axis = 1; axis < key.spatial + 2; ++axis)
    multiplications *= static_cast<double>(key.w.sizes[axis]) * static_cast<double>(key.y.sizes[axis]);
  return multiplications < kWorthATeam ? 1 : onednn::team_size();
}

ffi::Error run(ConvKind kind, const Arg& first, const Arg& second, const Arg* bias, const Arg& result, Bytes& workspace,
               ConvCall call) {
  Checks checks("jaxgrad_conv");
  const ffi::DataType dtype = first.element_type();
  checks.that(dtype == ffi::DataType::F32 || dtype == ffi::DataType::BF16, "operands must be of f32 or bf16");
  checks.that(second.element_type() == dtype && result.element_type() == dtype, "all arrays must have one dtype");
  call.kind = kind;
  call.type = dtype == ffi::DataType::BF16 ? ConvType::kBFloat16 : ConvType::kFloat32;
  call.has_bias = bias != nullptr && bias->element_count() > 0;
  std::string problem;
  const ConvKey key = conv_key(call, problem);
  checks.that(problem.empty(), problem);
  if (checks.failed()) return checks.error();
  if (call.has_bias) checks.array("bias", *bias, dtype, {key.w.sizes[0]});
  if (checks.failed()) return checks.error();
  try {
    const auto plan = conv_plan(key);
    checks.that(static_cast<int64_t>(workspace->element_count()) >= plan->workspace_bytes(),
                "the workspace is too small: was the program compiled for another processor?");
    if (checks.failed()) return checks.error();
    plan->run(first.untyped_data(), second.untyped_data(), call.has_bias ? bias->untyped_data() : nullptr,
              result.untyped_data(), reinterpret_cast<std::byte*>(workspace->typed_data()));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

ConvCall layout(Axes lhs_spec, Axes rhs_spec, Axes out_spec, Axes window_strides, Axes padding, Axes rhs_dilation,
                int64_t groups) {
  ConvCall call{};
  call.lhs_spec = copy(lhs_spec);
  call.rhs_spec = copy(rhs_spec);
  call.out_spec = copy(out_spec);
  call.window_strides = copy(window_strides);
  call.padding = copy(padding);
  call.rhs_dilation = copy(rhs_dilation);
  call.feature_group_count = groups;
  return call;
}

ffi::Error forward(Arg x, Arg w, Arg bias, Ret y, Bytes workspace, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                   Axes strides, Axes padding, Axes dilation, int64_t groups) {
  ConvCall call = layout(lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  call.x = copy(x);
  call.w = copy(w);
  call.y = copy(*y);
  return run(ConvKind::kForward, x, w, &bias, *y, workspace, std::move(call));
}

ffi::Error backward_input(Arg dy, Arg w, Ret dx, Bytes workspace, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                          Axes strides, Axes padding, Axes dilation, int64_t groups) {
  ConvCall call = layout(lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  call.x = copy(*dx);
  call.w = copy(w);
  call.y = copy(dy);
  return run(ConvKind::kBackwardInput, dy, w, nullptr, *dx, workspace, std::move(call));
}

ffi::Error backward_filter(Arg x, Arg dy, Ret dw, Ret db, Bytes workspace, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                           Axes strides, Axes padding, Axes dilation, int64_t groups) {
  ConvCall call = layout(lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  call.x = copy(x);
  call.w = copy(*dw);
  call.y = copy(dy);
  return run(ConvKind::kBackwardFilter, x, dy, &*db, *dw, workspace, std::move(call));
}

}  // namespace

ConvKey conv_key(const ConvCall& call, std::string& problem) {
  ConvKey key{};
  const size_t rank = call.x.size(), n = rank - 2;
  const bool ranks_fit = rank >= 3 && n <= kMaxSpatial && call.w.size() == rank && call.y.size() == rank &&
                         call.window_strides.size() == n && call.rhs_dilation.size() == n &&
                         call.padding.size() == 2 * n;
  if (!ranks_fit) {
    problem = "arrays must have rank 3 to 5, and a stride, a dilation and two paddings to each spatial axis";
    return key;
  }
  for (const auto* spec : {&call.lhs_spec, &call.rhs_spec, &call.out_spec})
    if (!is_permutation_of_axes(*spec, rank)) {
      problem = "each spec must be a permutation of the axes";
      return key;
    }
  key.kind = call.kind;
  key.type = call.type;
  key.has_bias = call.has_bias;
  key.spatial = static_cast<int>(n);
  key.groups = call.feature_group_count;
  key.x = operand(call.x, call.lhs_spec);
  key.w = operand(call.w, call.rhs_spec);
  key.y = operand(call.y, call.out_spec);
  assign(key.window_strides, call.window_strides, 0, 1);
  assign(key.rhs_dilation, call.rhs_dilation, 0, 1);
  assign(key.padding_low, call.padding, 0, 2);
  assign(key.padding_high, call.padding, 1, 2);
  problem = check_sizes(key);
  if (problem.empty()) key.threads = threads_for(key);
  return key;
}

#define JAXGRAD_CONV_LAYOUT         \
  .Attr<Axes>("lhs_spec")           \
      .Attr<Axes>("rhs_spec")       \
      .Attr<Axes>("out_spec")       \
      .Attr<Axes>("window_strides") \
      .Attr<Axes>("padding")        \
      .Attr<Axes>("rhs_dilation")   \
      .Attr<int64_t>("feature_group_count")

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_conv_forward, forward,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()        // x     as lhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // w     as rhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // bias  [output features] or none
                                  .Ret<ffi::AnyBuffer>()        // y     as out_spec says
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_conv_backward_input, backward_input,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()        // dy    as out_spec says
                                  .Arg<ffi::AnyBuffer>()        // w     as rhs_spec says
                                  .Ret<ffi::AnyBuffer>()        // dx    as lhs_spec says
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_conv_backward_filter, backward_filter,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()        // x     as lhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // dy    as out_spec says
                                  .Ret<ffi::AnyBuffer>()        // dw    as rhs_spec says
                                  .Ret<ffi::AnyBuffer>()        // db    [output features] or none
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT);

}  // namespace jaxgrad

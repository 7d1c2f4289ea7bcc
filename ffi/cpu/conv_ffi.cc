#include "conv_ffi.h"

#include <exception>
#include <string>

#include "../common/checks.h"
#include "../common/conv_attributes.h"
#include "onednn_threads.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;
using Bytes = ffi::Result<ffi::Buffer<ffi::U8>>;

// Below this many multiplications, waking other threads costs more than it gains.
constexpr double kWorthATeam = 1 << 22;

int threads_for(const ConvKey& key) {
  double multiplications = static_cast<double>(key.y.sizes[0]);
  for (int axis = 1; axis < key.spatial + 2; ++axis)
    multiplications *= static_cast<double>(key.w.sizes[axis]) * static_cast<double>(key.y.sizes[axis]);
  return multiplications < kWorthATeam ? 1 : onednn::team_size();
}

ffi::Error run(ConvKind kind, const Arg& first, const Arg& second, const Arg* bias, const Arg& result, Bytes& workspace,
               const ConvCall& call) {
  Checks checks("jaxgrad_conv");
  const ffi::DataType dtype = first.element_type();
  checks.that(dtype == ffi::DataType::F32 || dtype == ffi::DataType::BF16, "operands must be of f32 or bf16");
  checks.that(second.element_type() == dtype && result.element_type() == dtype, "all arrays must have one dtype");
  const ConvType type = dtype == ffi::DataType::BF16 ? ConvType::kBFloat16 : ConvType::kFloat32;
  const bool has_bias = bias != nullptr && bias->element_count() > 0;
  std::string problem;
  const ConvKey key = conv_key(kind, type, has_bias, call, problem);
  checks.that(problem.empty(), problem);
  if (checks.failed()) return checks.error();
  if (has_bias) checks.array("bias", *bias, dtype, {key.w.sizes[0]});
  if (checks.failed()) return checks.error();
  try {
    const auto plan = conv_plan(key);
    checks.that(static_cast<int64_t>(workspace->element_count()) >= plan->workspace_bytes(),
                "the workspace is too small: was the program compiled for another processor?");
    if (checks.failed()) return checks.error();
    plan->run(first.untyped_data(), second.untyped_data(), has_bias ? bias->untyped_data() : nullptr,
              result.untyped_data(), reinterpret_cast<std::byte*>(workspace->typed_data()));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

ffi::Error forward(Arg x, Arg w, Arg bias, Ret y, Bytes workspace, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                   Axes strides, Axes padding, Axes dilation, int64_t groups) {
  ConvCall call = conv_layout(lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  call.x = shape_of(x);
  call.w = shape_of(w);
  call.y = shape_of(*y);
  return run(ConvKind::kForward, x, w, &bias, *y, workspace, call);
}

ffi::Error backward_input(Arg dy, Arg w, Ret dx, Bytes workspace, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                          Axes strides, Axes padding, Axes dilation, int64_t groups) {
  ConvCall call = conv_layout(lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  call.x = shape_of(*dx);
  call.w = shape_of(w);
  call.y = shape_of(dy);
  return run(ConvKind::kBackwardInput, dy, w, nullptr, *dx, workspace, call);
}

ffi::Error backward_filter(Arg x, Arg dy, Ret dw, Ret db, Bytes workspace, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                           Axes strides, Axes padding, Axes dilation, int64_t groups) {
  ConvCall call = conv_layout(lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  call.x = shape_of(x);
  call.w = shape_of(*dw);
  call.y = shape_of(dy);
  return run(ConvKind::kBackwardFilter, x, dy, &*db, *dw, workspace, call);
}

}  // namespace

ConvKey conv_key(ConvKind kind, ConvType type, bool has_bias, const ConvCall& call, std::string& problem) {
  ConvKey key{};
  static_cast<ConvShape&>(key) = conv_shape(kind, call, problem);
  key.type = type;
  key.has_bias = has_bias;
  if (problem.empty()) key.threads = threads_for(key);
  return key;
}

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

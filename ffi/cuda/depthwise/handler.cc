#include "cuda/depthwise/handler.h"

#include <cstdint>
#include <string>

#include "common/conv_attributes.h"
#include "common/handler.h"
#include "cuda/depthwise/convolution_plan.h"
#include "cuda/depthwise/weight_gradient_plan.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/handler_support.h"
#include "cuda/runtime/retained.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

constexpr const char* kTarget = "jaxgrad_cuda_depthwise_weight_gradient";

const char* target_of(ConvPass pass) {
  return pass == ConvPass::kForward ? "jaxgrad_cuda_depthwise_forward" : "jaxgrad_cuda_depthwise_input_gradient";
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

ffi::Error weight_gradient(CUstream stream, Arg x, Arg dy, Ret dw, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                           Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  Checks checks(kTarget);
  const ffi::DataType dtype = x.element_type();
  checks.require(dy.element_type() == dtype && dw->element_type() == dtype,
                 "all arrays must have the same element type");
  std::string error;
  DepthwiseKey key;
  static_cast<ConvProblem&>(key) = make_conv_problem(
      ConvPass::kWeightGradient,
      conv_arguments(x, *dw, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups), error);
  key.type = float_type(dtype, checks);
  checks.require(error.empty(), [&] { return error; });
  checks.require(is_aligned(x.untyped_data()) && is_aligned(dy.untyped_data()), "x and dy must be aligned to 16 bytes");
  if (checks.failed()) return checks.error();
  return driver::on_device(stream, [&](int device) {
    key.device = device;
    const auto plan = depthwise_plan(key);
    check_workspace(workspace, plan->workspace_bytes(), checks);
    if (checks.failed()) return checks.error();
    plan->run(stream, x.untyped_data(), dy.untyped_data(), dw->untyped_data(), workspace->untyped_data());
    if (driver::is_capturing(stream)) retain_for_cuda_graph(plan);
    return ffi::Error::Success();
  });
}

// The forward pass or the input gradient: `in` is x or dy, `out` is y or dx. bias: null or without elements if there is
// none.
ffi::Error convolution(ConvPass pass, CUstream stream, const Arg& in, const Arg& w, const Arg* bias, const Arg& out,
                       const ConvArguments& arguments, bool relu) {
  Checks checks(target_of(pass));
  const ffi::DataType dtype = in.element_type();
  checks.require(w.element_type() == dtype && out.element_type() == dtype,
                 "all arrays must have the same element type");
  std::string error;
  DepthwiseConvolutionKey key;
  static_cast<ConvProblem&>(key) = make_conv_problem(pass, arguments, error);
  key.type = float_type(dtype, checks);
  key.relu = relu;
  checks.require(error.empty(), [&] { return error; });
  checks.require(is_aligned(in.untyped_data()) && is_aligned(out.untyped_data()),
                 "the arrays must be aligned to 16 bytes");
  if (checks.failed()) return checks.error();
  const bool has_bias = bias != nullptr && bias->element_count() > 0;
  if (has_bias) checks.array("bias", *bias, dtype, {key.w.sizes[0]});
  if (checks.failed()) return checks.error();
  const void* bias_data = has_bias ? bias->untyped_data() : nullptr;
  return driver::on_device(stream, [&](int device) {
    key.device = device;
    const auto plan = depthwise_convolution_plan(key);
    plan->run(stream, in.untyped_data(), w.untyped_data(), bias_data, out.untyped_data());
    if (driver::is_capturing(stream)) retain_for_cuda_graph(plan);
    return ffi::Error::Success();
  });
}

ffi::Error forward(CUstream stream, Arg x, Arg w, Arg bias, Ret y, Bytes, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                   Axes strides, Axes padding, Axes dilation, int64_t groups, bool relu) {
  return convolution(ConvPass::kForward, stream, x, w, &bias, *y,
                     conv_arguments(x, w, *y, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups), relu);
}

ffi::Error input_gradient(CUstream stream, Arg dy, Arg w, Ret dx, Bytes, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                          Axes strides, Axes padding, Axes dilation, int64_t groups) {
  return convolution(ConvPass::kInputGradient, stream, dy, w, nullptr, *dx,
                     conv_arguments(*dx, w, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups),
                     false);
}

}  // namespace

// The specs give the layout of each array, as in jax.lax.ConvDimensionNumbers. XLA may capture these calls into a CUDA
// graph: they use no memory but their buffers, and their attributes and shapes determine what they launch.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_depthwise_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x     laid out by lhs_spec
                           .Arg<ffi::AnyBuffer>()        // w     laid out by rhs_spec
                           .Arg<ffi::AnyBuffer>()        // bias  [features] or empty
                           .Ret<ffi::AnyBuffer>()        // y     laid out by out_spec
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace, not used
                       JAXGRAD_CONV_ATTRIBUTES.Attr<bool>("relu"),
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_depthwise_input_gradient, input_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // dy    laid out by out_spec
                           .Arg<ffi::AnyBuffer>()        // w     laid out by rhs_spec
                           .Ret<ffi::AnyBuffer>()        // dx    laid out by lhs_spec
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace, not used
                       JAXGRAD_CONV_ATTRIBUTES,
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_depthwise_weight_gradient, weight_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x     laid out by lhs_spec
                           .Arg<ffi::AnyBuffer>()        // dy    laid out by out_spec
                           .Ret<ffi::AnyBuffer>()        // dw    laid out by rhs_spec
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace: partial sums of dw in f32
                       JAXGRAD_CONV_ATTRIBUTES,
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

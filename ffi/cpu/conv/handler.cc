#include "cpu/conv/handler.h"

#include <string>

#include "common/checks.h"
#include "common/conv_attributes.h"
#include "common/handler.h"
#include "cpu/conv/foreign.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;
using Bytes = ffi::Result<ffi::Buffer<ffi::U8>>;

const char* target_of(ConvPass pass) {
  switch (pass) {
    case ConvPass::kForward:
      return "jaxgrad_onednn_conv_forward";
    case ConvPass::kInputGradient:
      return "jaxgrad_onednn_conv_input_gradient";
    default:
      return "jaxgrad_onednn_conv_weight_gradient";
  }
}

ConvArray<std::byte> array(const Arg& buffer, int64_t num_problems) {
  return {static_cast<std::byte*>(buffer.untyped_data()), static_cast<int64_t>(buffer.size_bytes()) / num_problems};
}

ConvArray<const std::byte> const_array(const Arg& buffer, int64_t num_problems) {
  const auto found = array(buffer, num_problems);
  return {found.data, found.bytes};
}

// first, second and result: the arrays of the pass. bias: null or without elements if there is no bias.
ffi::Error run(ffi::ThreadPool& pool, ConvPass pass, const Arg& first, const Arg& second, const Arg* bias,
               const Arg& result, Bytes& workspace, const ConvArguments& arguments) {
  Checks checks(target_of(pass));
  const ffi::DataType dtype = first.element_type();
  checks.require(dtype == ffi::DataType::F32 || dtype == ffi::DataType::BF16,
                 "operands must have the element type f32 or bf16");
  checks.require(second.element_type() == dtype && result.element_type() == dtype,
                 "all arrays must have the same element type");
  const ConvType type = dtype == ffi::DataType::BF16 ? ConvType::kBFloat16 : ConvType::kFloat32;
  const bool has_bias = bias != nullptr && bias->element_count() > 0;
  std::string error;
  const ConvSchedule schedule = make_conv_schedule(pass, type, has_bias, arguments, error);
  checks.require(error.empty(), [&] { return error; });
  if (checks.failed()) return checks.error();
  const int64_t features = schedule.key.w.sizes[0];
  if (has_bias && has_problem_axis(arguments))
    checks.array("bias", *bias, dtype, {schedule.num_problems, features});
  else if (has_bias)
    checks.array("bias", *bias, dtype, {features});
  if (checks.failed()) return checks.error();
  const int64_t n = schedule.num_problems;
  const ConvArrays arrays{const_array(first, n), const_array(second, n),
                          has_bias ? array(*bias, n) : ConvArray<std::byte>{nullptr, 0}, array(result, n)};
  XlaParallel parallel(pool);
  call_conv(schedule, arrays,
            {reinterpret_cast<std::byte*>(workspace->typed_data()), static_cast<int64_t>(workspace->element_count())},
            parallel);
  return ffi::Error::Success();
}

ffi::Error forward(ffi::ThreadPool pool, Arg x, Arg w, Arg bias, Ret y, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                   Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  return run(pool, ConvPass::kForward, x, w, &bias, *y, workspace,
             conv_arguments(x, w, *y, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups));
}

ffi::Error input_gradient(ffi::ThreadPool pool, Arg dy, Arg w, Ret dx, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                          Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  return run(pool, ConvPass::kInputGradient, dy, w, nullptr, *dx, workspace,
             conv_arguments(*dx, w, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups));
}

ffi::Error weight_gradient(ffi::ThreadPool pool, Arg x, Arg dy, Ret dw, Ret db, Bytes workspace, Axes lhs_spec,
                           Axes rhs_spec, Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  return run(pool, ConvPass::kWeightGradient, x, dy, &*db, *dw, workspace,
             conv_arguments(x, *dw, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups));
}

}  // namespace

// The specs give the layout of each array, as in jax.lax.ConvDimensionNumbers.
JAXGRAD_DEFINE_HANDLER(jaxgrad_onednn_conv_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x     laid out by lhs_spec
                           .Arg<ffi::AnyBuffer>()        // w     laid out by rhs_spec
                           .Arg<ffi::AnyBuffer>()        // bias  [output features] or empty
                           .Ret<ffi::AnyBuffer>()        // y     laid out by out_spec
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_CONV_ATTRIBUTES);

JAXGRAD_DEFINE_HANDLER(jaxgrad_onednn_conv_input_gradient, input_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // dy    laid out by out_spec
                           .Arg<ffi::AnyBuffer>()        // w     laid out by rhs_spec
                           .Ret<ffi::AnyBuffer>()        // dx    laid out by lhs_spec
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_CONV_ATTRIBUTES);

JAXGRAD_DEFINE_HANDLER(jaxgrad_onednn_conv_weight_gradient, weight_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x     laid out by lhs_spec
                           .Arg<ffi::AnyBuffer>()        // dy    laid out by out_spec
                           .Ret<ffi::AnyBuffer>()        // dw    laid out by rhs_spec
                           .Ret<ffi::AnyBuffer>()        // db    [output features] or empty
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_CONV_ATTRIBUTES);

}  // namespace jaxgrad

#include "cpu/conv/handler.h"

#include <string>

#include "common/checks.h"
#include "common/handler.h"
#include "cpu/conv/call.h"
#include "cpu/runtime/conv_handlers.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

ConvArray<std::byte> array(const Arg& buffer, int64_t num_problems) {
  return {static_cast<std::byte*>(buffer.untyped_data()), static_cast<int64_t>(buffer.size_bytes()) / num_problems};
}

ConvArray<const std::byte> const_array(const Arg& buffer, int64_t num_problems) {
  const auto found = array(buffer, num_problems);
  return {found.data, found.bytes};
}

// first, second and result: the arrays of the pass. bias: null or without elements if there is no bias.
ffi::Error run(const char* target, ffi::ThreadPool& pool, ConvPass pass, const Arg& first, const Arg& second,
               const Arg* bias, const Arg& result, Bytes& workspace, const ConvArguments& arguments) {
  Checks checks(target);
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
  call_conv(schedule, arrays, {data_of(workspace), bytes_of(workspace)}, parallel);
  return ffi::Error::Success();
}

ffi::Error forward(ffi::ThreadPool pool, Arg x, Arg w, Arg bias, Ret y, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                   Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  return run("jaxgrad_onednn_conv_forward", pool, ConvPass::kForward, x, w, &bias, *y, workspace,
             conv_arguments(x, w, *y, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups));
}

ffi::Error input_gradient(ffi::ThreadPool pool, Arg dy, Arg w, Ret dx, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                          Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  return run("jaxgrad_onednn_conv_input_gradient", pool, ConvPass::kInputGradient, dy, w, nullptr, *dx, workspace,
             conv_arguments(*dx, w, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups));
}

ffi::Error weight_gradient(ffi::ThreadPool pool, Arg x, Arg dy, Ret dw, Ret db, Bytes workspace, Axes lhs_spec,
                           Axes rhs_spec, Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  return run("jaxgrad_onednn_conv_weight_gradient", pool, ConvPass::kWeightGradient, x, dy, &*db, *dw, workspace,
             conv_arguments(x, *dw, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups));
}

}  // namespace

JAXGRAD_DEFINE_HANDLER(jaxgrad_onednn_conv_forward, forward, bind_conv_forward());
JAXGRAD_DEFINE_HANDLER(jaxgrad_onednn_conv_input_gradient, input_gradient, bind_conv_input_gradient());
JAXGRAD_DEFINE_HANDLER(jaxgrad_onednn_conv_weight_gradient, weight_gradient, bind_conv_weight_gradient());

}  // namespace jaxgrad

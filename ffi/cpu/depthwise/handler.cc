#include "cpu/depthwise/handler.h"

#include <string>
#include <type_traits>

#include "common/checks.h"
#include "common/handler.h"
#include "cpu/depthwise/op.h"
#include "cpu/depthwise/problem.h"
#include "cpu/runtime/conv_handlers.h"
#include "cpu/runtime/storage_dispatch.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

template <class S>
DepthwiseActivations<S> array(const DepthwiseActivations<void>& steps, const Arg& buffer) {
  const auto& [data, problem, batch, channel, spatial] = steps;
  return {static_cast<S*>(buffer.untyped_data()), problem, batch, channel, {spatial[0], spatial[1], spatial[2]}};
}
template <class S>
DepthwiseWeights<S> array(const DepthwiseWeights<void>& steps, const Arg& buffer) {
  const auto& [data, problem, channel, spatial] = steps;
  return {static_cast<S*>(buffer.untyped_data()), problem, channel, {spatial[0], spatial[1], spatial[2]}};
}

// Checks a call, and calls run(problem, S{}) with the C++ type S of its elements. first, second, result: the arrays of
// the pass. bias: null or without elements if there is no bias.
template <class Run>
ffi::Error check_and_run(const char* target, ConvPass pass, const Arg& first, const Arg& second, const Arg* bias,
                         const Arg& result, Bytes& workspace, const ConvArguments& arguments, Run run) {
  Checks checks(target);
  const ffi::DataType dtype = first.element_type();
  checks.require(dtype == ffi::DataType::F32 || dtype == ffi::DataType::BF16 || dtype == ffi::DataType::F16,
                 "operands must have the element type f32, bf16 or f16");
  checks.require(second.element_type() == dtype && result.element_type() == dtype,
                 "all arrays must have the same element type");
  std::string error;
  const DepthwiseProblem problem = make_depthwise_problem(pass, arguments, 1, error);
  checks.require(error.empty(), [&] { return error; });
  if (checks.failed()) return checks.error();
  const DepthwiseShape& s = problem.shape;
  if (bias != nullptr && has_problem_axis(arguments))
    checks.optional_array("bias", *bias, dtype, {s.problems, s.channels});
  else if (bias != nullptr)
    checks.optional_array("bias", *bias, dtype, {s.channels});
  const int64_t needed = depthwise_workspace(pass, s, problem.copies(), 1);
  checks.require(workspace->element_count() >= static_cast<size_t>(needed), "the workspace is too small");
  if (checks.failed()) return checks.error();
  return with_storage(checks, dtype, [&](auto element) {
    if constexpr (!std::is_same_v<decltype(element), double>) run(problem, element);
    return ffi::Error::Success();
  });
}

ffi::Error forward(ffi::ThreadPool pool, Arg x, Arg w, Arg bias, Ret y, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                   Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups, bool relu) {
  const auto arguments = conv_arguments(x, w, *y, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  return check_and_run("jaxgrad_cpu_depthwise_forward", ConvPass::kForward, x, w, &bias, *y, workspace, arguments,
                       [&](const DepthwiseProblem& p, auto element) {
                         using S = decltype(element);
                         XlaParallel parallel(pool);
                         depthwise_forward(DepthwiseForward<S>{p.shape, array<const S>(p.x, x), array<const S>(p.w, w),
                                                               data_or_null<const S>(bias), relu, array<S>(p.y, *y),
                                                               data_of(workspace), bytes_of(workspace)},
                                           parallel);
                       });
}

ffi::Error input_gradient(ffi::ThreadPool pool, Arg dy, Arg w, Ret dx, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                          Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  const auto arguments = conv_arguments(*dx, w, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  return check_and_run("jaxgrad_cpu_depthwise_input_gradient", ConvPass::kInputGradient, dy, w, nullptr, *dx, workspace,
                       arguments, [&](const DepthwiseProblem& p, auto element) {
                         using S = decltype(element);
                         XlaParallel parallel(pool);
                         depthwise_input_gradient(
                             DepthwiseInputGradient<S>{p.shape, array<const S>(p.y, dy), array<const S>(p.w, w),
                                                       array<S>(p.x, *dx), data_of(workspace), bytes_of(workspace)},
                             parallel);
                       });
}

ffi::Error weight_gradient(ffi::ThreadPool pool, Arg x, Arg dy, Ret dw, Ret db, Bytes workspace, Axes lhs_spec,
                           Axes rhs_spec, Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  const auto arguments = conv_arguments(x, *dw, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  return check_and_run(
      "jaxgrad_cpu_depthwise_weight_gradient", ConvPass::kWeightGradient, x, dy, &*db, *dw, workspace, arguments,
      [&](const DepthwiseProblem& p, auto element) {
        using S = decltype(element);
        XlaParallel parallel(pool);
        depthwise_weight_gradient(
            DepthwiseWeightGradient<S>{p.shape, array<const S>(p.x, x), array<const S>(p.y, dy), array<S>(p.w, *dw),
                                       data_or_null<S>(*db), data_of(workspace), bytes_of(workspace)},
            parallel);
      });
}

}  // namespace

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_depthwise_forward, forward, bind_conv_forward().Attr<bool>("relu"));
JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_depthwise_input_gradient, input_gradient, bind_conv_input_gradient());
JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_depthwise_weight_gradient, weight_gradient, bind_conv_weight_gradient());

}  // namespace jaxgrad

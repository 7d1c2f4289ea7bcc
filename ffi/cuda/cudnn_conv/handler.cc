#include "cuda/cudnn_conv/handler.h"

#include <optional>
#include <stdexcept>
#include <string>

#include "common/conv_attributes.h"
#include "common/handler.h"
#include "cuda/cudnn_conv/op.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/handler_support.h"
#include "cuda/runtime/retained.h"
#include "cuda/transpose/op.h"

namespace jaxgrad {
namespace ffi = xla::ffi;

namespace {

const char* target_of(ConvPass pass) {
  switch (pass) {
    case ConvPass::kForward:
      return "jaxgrad_cudnn_conv_forward";
    case ConvPass::kInputGradient:
      return "jaxgrad_cudnn_conv_input_gradient";
    default:
      return "jaxgrad_cudnn_conv_weight_gradient";
  }
}

// The math settings of a call.
struct MathSettings {
  bool allow_tf32, deterministic;
  int64_t search;  // ConvSearch
};

// How a plan failed to run.
struct RunFailure {
  std::string error;
  bool lacks_memory;
};

// Launches a plan. Returns the failure if another plan may run. Throws driver::DeviceFault, and, while the stream is
// captured, cudnn::Error: an error invalidates the capture.
std::optional<RunFailure> try_to_run(const ConvPlan& plan, const ConvKey& key, CUstream stream, bool capturing,
                                     const Arg& first, const Arg& second, const void* bias, const Arg& result,
                                     void* workspace) {
  cudnn::Handle handle(key.device);
  handle.set_stream(stream);
  try {
    plan.run(handle, first.untyped_data(), second.untyped_data(), bias, result.untyped_data(), workspace);
    return std::nullopt;
  } catch (const cudnn::Error& error) {
    if (capturing) throw;
    try {
      handle.check_device(error);
    } catch (const driver::OutOfMemory& full) {
      return RunFailure{full.what(), true};
    }
    return RunFailure{error.what(), false};
  }
}

// Runs the plan of the key. If a plan fails to run, tries the next candidate until one runs or none is left. A plan
// that runs replaces those that failed, unless they only lacked memory.
void run_plan(const ConvKey& key, CUstream stream, const Arg& first, const Arg& second, const void* bias,
              const Arg& result, void* workspace) {
  const bool capturing = driver::is_capturing(stream);
  auto plan = conv_plan(key, capturing);
  bool replace = true;
  while (const auto failure = try_to_run(*plan, key, stream, capturing, first, second, bias, result, workspace)) {
    replace = replace && !failure->lacks_memory;
    try {
      plan = conv_plan_after(key, *plan, replace);
    } catch (const driver::DeviceFault&) {
      throw;
    } catch (const std::runtime_error& next) {
      const std::string both = failure->error + "; then " + next.what();
      if (failure->lacks_memory) throw driver::OutOfMemory(both);
      throw std::runtime_error(both);
    }
  }
  if (capturing) retain_for_cuda_graph(plan);
}

// first, second and result: the arrays of the pass. bias: null or without elements if there is no bias.
ffi::Error run(ConvPass pass, CUstream stream, const Arg& first, const Arg& second, const Arg* bias, const Arg& result,
               Bytes& workspace, const ConvArguments& arguments, bool relu, const MathSettings& math) {
  Checks checks(target_of(pass));
  const ffi::DataType dtype = first.element_type();
  checks.require(second.element_type() == dtype && result.element_type() == dtype,
                 "all arrays must have the same element type");
  checks.require(math.search >= 0 && math.search <= 2, "search must be 0, 1 or 2");
  std::string error;
  ConvKey key;
  static_cast<ConvProblem&>(key) = make_conv_problem(pass, arguments, error);
  key.type = float_type(dtype, checks);
  key.has_bias = bias != nullptr && bias->element_count() > 0;
  key.relu = relu;
  key.allow_tf32 = math.allow_tf32;
  key.deterministic = math.deterministic;
  key.search = static_cast<ConvSearch>(math.search);
  key.workspace_limit = static_cast<int64_t>(workspace->element_count());
  checks.require(error.empty(), [&] { return error; });
  if (checks.failed()) return checks.error();
  if (key.has_bias) checks.array("bias", *bias, dtype, {key.w.sizes[0]});
  if (checks.failed()) return checks.error();
  const void* bias_data = key.has_bias ? bias->untyped_data() : nullptr;
  return driver::on_device(stream, [&](int device) {
    key.device = device;
    run_plan(key, stream, first, second, bias_data, result, workspace->typed_data());
    return ffi::Error::Success();
  });
}

ffi::Error forward(CUstream stream, Arg x, Arg w, Arg bias, Ret y, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                   Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups, bool relu, bool allow_tf32,
                   bool deterministic, int64_t search) {
  return run(ConvPass::kForward, stream, x, w, &bias, *y, workspace,
             conv_arguments(x, w, *y, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups), relu,
             {allow_tf32, deterministic, search});
}

ffi::Error input_gradient(CUstream stream, Arg dy, Arg w, Ret dx, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                          Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups, bool allow_tf32,
                          bool deterministic, int64_t search) {
  return run(ConvPass::kInputGradient, stream, dy, w, nullptr, *dx, workspace,
             conv_arguments(*dx, w, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups), false,
             {allow_tf32, deterministic, search});
}

// Transposes weights from the layout of one call to that of another. May reverse the axes of the window.
ffi::Error transpose_weights(CUstream stream, const ConvArguments& from, const Arg& in, const ConvArguments& to,
                             const Arg& out, bool reverse_window) {
  const char* const target = target_of(ConvPass::kWeightGradient);
  std::string error;
  const ConvProblem source = make_conv_problem(ConvPass::kWeightGradient, from, error);
  ConvProblem result = make_conv_problem(ConvPass::kWeightGradient, to, error);
  if (error.empty() && source.w.sizes != result.w.sizes) error = "dw must have the same sizes in both layouts";
  if (error.empty() && in.element_type() != out.element_type()) error = "all arrays must have the same element type";
  if (!error.empty()) return ffi::Error::InvalidArgument(std::string(target) + ": " + error);
  if (reverse_window)
    for (int axis = 2; axis < result.spatial + 2; ++axis) result.w.strides[axis] *= -1;
  return driver::on_device(stream, [&](int device) {
    transpose(stream, device, source.spatial + 2, static_cast<int64_t>(ffi::ByteWidth(in.element_type())), source.w,
              in.untyped_data(), result.w, out.untyped_data());
    return ffi::Error::Success();
  });
}

ffi::Error weight_gradient(CUstream stream, Arg x, Arg dy, Ret dw, Ret untransposed, Bytes workspace, Axes lhs_spec,
                           Axes rhs_spec, Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups,
                           Axes dw_spec, bool dw_reversed, bool allow_tf32, bool deterministic, int64_t search) {
  constexpr ConvPass pass = ConvPass::kWeightGradient;
  const bool transposes = to_vector(dw_spec) != to_vector(rhs_spec);
  if (dw_reversed && !transposes)
    return ffi::Error::InvalidArgument(std::string(target_of(pass)) + ": dw_reversed requires dw_spec != rhs_spec");
  const Arg& result = transposes ? *untransposed : *dw;
  const ConvArguments from =
      conv_arguments(x, result, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  ffi::Error status =
      run(pass, stream, x, dy, nullptr, result, workspace, from, false, {allow_tf32, deterministic, search});
  if (status.failure() || !transposes) return status;
  const ConvArguments to = conv_arguments(x, *dw, dy, lhs_spec, dw_spec, out_spec, strides, padding, dilation, groups);
  return transpose_weights(stream, from, result, to, *dw, dw_reversed);
}

}  // namespace

#define JAXGRAD_CONV_MATH_SETTINGS \
  .Attr<bool>("allow_tf32").Attr<bool>("deterministic").Attr<int64_t>("search") /* ConvSearch */

// The specs give the layout of each array, as in jax.lax.ConvDimensionNumbers. XLA may capture these calls into a CUDA
// graph: they use no memory but their buffers, and their attributes and shapes determine what they launch.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cudnn_conv_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x     laid out by lhs_spec
                           .Arg<ffi::AnyBuffer>()        // w     laid out by rhs_spec
                           .Arg<ffi::AnyBuffer>()        // bias  [output features] or empty
                           .Ret<ffi::AnyBuffer>()        // y     laid out by out_spec
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_CONV_ATTRIBUTES.Attr<bool>("relu") JAXGRAD_CONV_MATH_SETTINGS,
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cudnn_conv_input_gradient, input_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // dy    laid out by out_spec
                           .Arg<ffi::AnyBuffer>()        // w     laid out by rhs_spec
                           .Ret<ffi::AnyBuffer>()        // dx    laid out by lhs_spec
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_CONV_ATTRIBUTES JAXGRAD_CONV_MATH_SETTINGS,
                       {ffi::Traits::kCmdBufferCompatible});

// cuDNN writes dw in the layout rhs_spec. If dw_spec is another layout, the call transposes dw, and reverses its window
// if dw_reversed. Otherwise the second result is empty.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cudnn_conv_weight_gradient, weight_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x     laid out by lhs_spec
                           .Arg<ffi::AnyBuffer>()        // dy    laid out by out_spec
                           .Ret<ffi::AnyBuffer>()        // dw    laid out by dw_spec
                           .Ret<ffi::AnyBuffer>()        // dw before the transpose, or empty
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_CONV_ATTRIBUTES.Attr<Axes>("dw_spec")
                           .Attr<bool>("dw_reversed") JAXGRAD_CONV_MATH_SETTINGS,
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

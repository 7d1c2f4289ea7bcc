#include "cuda/depthwise/handler.h"

#include <cstdint>
#include <string>

#include "common/conv_attributes.h"
#include "common/handler.h"
#include "cuda/depthwise/op.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/handler_support.h"
#include "cuda/runtime/retained.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

constexpr const char* kTarget = "jaxgrad_cuda_depthwise_weight_gradient";

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
  const driver::CurrentDevice current(stream);
  key.device = current.device();
  const auto plan = depthwise_plan(key);
  check_workspace(workspace, plan->workspace_bytes(), checks);
  if (checks.failed()) return checks.error();
  plan->run(stream, x.untyped_data(), dy.untyped_data(), dw->untyped_data(), workspace->untyped_data());
  if (driver::is_capturing(stream)) retain_for_cuda_graph(plan);
  return ffi::Error::Success();
}

}  // namespace

// The specs give the layout of each array, as in jax.lax.ConvDimensionNumbers. XLA may capture this call into a CUDA
// graph: it uses no memory but its buffers, and its attributes and shapes determine what it launches.
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

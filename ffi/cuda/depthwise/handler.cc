#include "cuda/depthwise/handler.h"

#include <cstdint>
#include <string>

#include "common/conv_attributes.h"
#include "cuda/depthwise/op.h"
#include "cuda/runtime/handler_support.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

constexpr const char* kTarget = "jaxgrad_conv_depthwise_filter";

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

ffi::Error depthwise_filter(CUstream stream, Arg x, Arg dy, Ret dw, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                            Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  Checks checks(kTarget);
  const ConvCall call = conv_call(x, *dw, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  const ffi::DataType dtype = x.element_type();
  checks.that(dy.element_type() == dtype && dw->element_type() == dtype, "all arrays must have one dtype");
  std::string problem;
  DepthwiseFilterKey key;
  static_cast<ConvShape&>(key) = conv_shape(ConvKind::kBackwardFilter, call, problem);
  key.type = float_type(dtype, checks);
  checks.that(problem.empty(), problem);
  checks.that(is_aligned(x.untyped_data()) && is_aligned(dy.untyped_data()),
              "arrays must start at multiples of 16 bytes");
  if (checks.failed()) return checks.error();
  return guarded(kTarget, [&] {
    const driver::CurrentDevice current(stream);
    key.device = current.device();
    const auto plan = depthwise_filter_plan(key);
    check_workspace(workspace, plan->workspace_bytes(), checks);
    if (checks.failed()) return checks.error();
    plan->run(stream, x.untyped_data(), dy.untyped_data(), dw->untyped_data(), workspace->untyped_data());
    return ffi::Error::Success();
  });
}

}  // namespace

// XLA may record this call into a CUDA graph: all memory that it uses is in its buffers, and what it launches is fixed
// by its attributes and shapes.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_cuda_conv_depthwise_filter, depthwise_filter,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()        // x     as lhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // dy    as out_spec says
                                  .Ret<ffi::AnyBuffer>()        // dw    as rhs_spec says
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace: partial sums of dw in f32
                              JAXGRAD_CONV_LAYOUT,
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

#include "cuda/conv/handler.h"

#include <stdexcept>
#include <string>

#include "common/conv_attributes.h"
#include "cuda/conv/op.h"
#include "cuda/runtime/handler_support.h"
#include "cuda/transpose/op.h"

namespace jaxgrad {
namespace ffi = xla::ffi;

namespace {

constexpr const char* kTarget = "jaxgrad_conv";

// Runs the plan; where it fails, the next of cuDNN's list, until one runs or none is left.
void run_plan(const ConvKey& key, CUstream stream, const Arg& first, const Arg& second, const void* bias,
              const Arg& result, void* workspace) {
  cudnn::Handle handle(key.device);
  const bool capturing = driver::is_capturing(stream);
  auto plan = conv_plan(key, handle, /*may_time=*/!capturing);
  handle.set_stream(stream);
  for (;;) {
    try {
      plan->run(handle, first.untyped_data(), second.untyped_data(), bias, result.untyped_data(), workspace);
      break;
    } catch (const cudnn::Error& error) {
      if (capturing) throw;  // a recording that an error has spoilt cannot be gone on with
      try {
        plan = conv_plan_after(key, *plan, handle);
      } catch (const NoPlan& none) {
        const std::string both = std::string(error.what()) + "; then " + none.what();
        if (driver::is_full()) throw driver::OutOfMemory(both);
        throw std::runtime_error(both);
      }
      handle.set_stream(stream);
    }
  }
  if (capturing) keep_for_graph(plan);
}

// bias: what the result is to have added, of no elements or null for nothing.
ffi::Error run(ConvKind kind, CUstream stream, const Arg& first, const Arg& second, const Arg* bias, const Arg& result,
               Bytes& workspace, const ConvCall& call, bool relu, bool allow_tf32, bool deterministic, int64_t search) {
  Checks checks(kTarget);
  const ffi::DataType dtype = first.element_type();
  checks.that(second.element_type() == dtype && result.element_type() == dtype, "all arrays must have one dtype");
  checks.that(search >= 0 && search <= 2, "search must be 0, 1 or 2");
  std::string problem;
  ConvKey key;
  static_cast<ConvShape&>(key) = conv_shape(kind, call, problem);
  key.type = float_type(dtype, checks);
  key.has_bias = bias != nullptr && bias->element_count() > 0;
  key.relu = relu;
  key.allow_tf32 = allow_tf32;
  key.deterministic = deterministic;
  key.search = static_cast<ConvSearch>(search);
  key.workspace_limit = static_cast<int64_t>(workspace->element_count());
  checks.that(problem.empty(), problem);
  if (checks.failed()) return checks.error();
  if (key.has_bias) checks.array("bias", *bias, dtype, {key.w.sizes[0]});
  if (checks.failed()) return checks.error();
  return guarded(kTarget, [&] {
    const driver::CurrentDevice current(stream);
    key.device = current.device();
    const void* added = key.has_bias ? bias->untyped_data() : nullptr;
    run_plan(key, stream, first, second, added, result, workspace->typed_data());
    return ffi::Error::Success();
  });
}

ffi::Error forward(CUstream stream, Arg x, Arg w, Arg bias, Ret y, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                   Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups, bool relu, bool allow_tf32,
                   bool deterministic, int64_t search) {
  const ConvCall call = conv_call(x, w, *y, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  return run(ConvKind::kForward, stream, x, w, &bias, *y, workspace, call, relu, allow_tf32, deterministic, search);
}

ffi::Error backward_input(CUstream stream, Arg dy, Arg w, Ret dx, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                          Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups, bool allow_tf32,
                          bool deterministic, int64_t search) {
  const ConvCall call = conv_call(*dx, w, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  return run(ConvKind::kBackwardInput, stream, dy, w, nullptr, *dx, workspace, call, false, allow_tf32, deterministic,
             search);
}

// Brings weights that lie as one call says to where another says; on the way the window's axes may be reversed.
ffi::Error transpose_weights(CUstream stream, const ConvCall& from, const Arg& in, const ConvCall& to, const Arg& out,
                             bool reverses_window) {
  std::string problem;
  const ConvShape source = conv_shape(ConvKind::kBackwardFilter, from, problem);
  ConvShape result = conv_shape(ConvKind::kBackwardFilter, to, problem);
  if (problem.empty() && source.w.sizes != result.w.sizes) problem = "dw must have the same sizes in both layouts";
  if (!problem.empty()) return ffi::Error::InvalidArgument(std::string(kTarget) + ": " + problem);
  if (reverses_window)
    for (int axis = 2; axis < result.spatial + 2; ++axis) result.w.strides[axis] *= -1;
  return guarded(kTarget, [&] {
    const driver::CurrentDevice current(stream);
    transpose(stream, current.device(), source.spatial + 2, static_cast<int64_t>(ffi::ByteWidth(in.element_type())),
              source.w, in.untyped_data(), result.w, out.untyped_data());
    return ffi::Error::Success();
  });
}

ffi::Error backward_filter(CUstream stream, Arg x, Arg dy, Ret dw, Ret written, Bytes workspace, Axes lhs_spec,
                           Axes rhs_spec, Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups,
                           Axes dw_spec, bool dw_reversed, bool allow_tf32, bool deterministic, int64_t search) {
  const bool transposes = to_vector(dw_spec) != to_vector(rhs_spec);
  if (dw_reversed && !transposes)
    return ffi::Error::InvalidArgument(std::string(kTarget) + ": dw is reversed only where it is transposed");
  const Arg& result = transposes ? *written : *dw;
  const ConvCall call = conv_call(x, result, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  ffi::Error status = run(ConvKind::kBackwardFilter, stream, x, dy, nullptr, result, workspace, call, false, allow_tf32,
                          deterministic, search);
  if (status.failure() || !transposes) return status;
  const ConvCall given = conv_call(x, *dw, dy, lhs_spec, dw_spec, out_spec, strides, padding, dilation, groups);
  return transpose_weights(stream, call, result, given, *dw, dw_reversed);
}

}  // namespace

#define JAXGRAD_CONV_CHOICE \
  .Attr<bool>("allow_tf32").Attr<bool>("deterministic").Attr<int64_t>("search") /* ConvSearch */

// XLA may record these calls into a CUDA graph: all memory that they use is in their buffers, and what they launch is
// fixed by their attributes and shapes.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_cuda_conv_forward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()        // x     as lhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // w     as rhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // bias  [output features] or none
                                  .Ret<ffi::AnyBuffer>()        // y     as out_spec says
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT.Attr<bool>("relu") JAXGRAD_CONV_CHOICE,
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_cuda_conv_backward_input, backward_input,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()        // dy    as out_spec says
                                  .Arg<ffi::AnyBuffer>()        // w     as rhs_spec says
                                  .Ret<ffi::AnyBuffer>()        // dx    as lhs_spec says
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT JAXGRAD_CONV_CHOICE,
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_cuda_conv_backward_filter, backward_filter,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()        // x     as lhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // dy    as out_spec says
                                  .Ret<ffi::AnyBuffer>()        // dw    as dw_spec says, its window reversed or not
                                  .Ret<ffi::AnyBuffer>()        // dw    as rhs_spec says; where that is the same, none
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT.Attr<Axes>("dw_spec")
                                  .Attr<bool>("dw_reversed") JAXGRAD_CONV_CHOICE,
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

#include "cuda/batch_norm/handler.h"

#include "common/batch_norm_checks.h"
#include "cuda/batch_norm/op.h"
#include "cuda/runtime/handler_support.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

class CudaBatchNormChecks : public BatchNormChecks {
 public:
  using BatchNormChecks::BatchNormChecks;

  BatchNormCall call(bool relu, bool residual) {
    BatchNormCall found{shape, float_type(x_.element_type(), *this), relu, residual};
    that(found.is_persistent() || !relu, "relu is fused only where channels come last, in 32 bits or fewer");
    return found;
  }

  // run(handle) on the stream, or what is wrong; size(handle) is the workspace that it needs.
  template <class Size, class Run>
  ffi::Error run(CUstream stream, Bytes& workspace, Size size, Run run) {
    if (failed()) return error();
    return guarded("jaxgrad_batch_norm", [&] {
      const driver::CurrentDevice current(stream);
      cudnn::Handle handle(current.device());
      check_workspace(workspace, size(handle), *this);
      if (failed()) return error();
      handle.set_stream(stream);
      run(handle);
      return ffi::Error::Success();
    });
  }
};

ffi::Error forward(CUstream stream, Arg x, Arg scale, Arg bias, Arg residual, Ret y, Ret mean, Ret rstd, Ret running,
                   Bytes workspace, int64_t feature_axis, double epsilon, bool relu) {
  CudaBatchNormChecks checks("jaxgrad_batch_norm_cudnn_forward", x, feature_axis);
  checks.per_channel("scale", scale);
  checks.per_channel("bias", bias);
  checks.like_x_or_absent("residual", residual);
  checks.like_x("y", *y);
  checks.per_channel("mean", *mean);
  checks.per_channel("rstd", *rstd);
  checks.array("running", *running, checks.statistics_dtype, {2, checks.shape.C});
  checks.that(epsilon >= 0, "epsilon must not be negative");
  const bool has_residual = residual.element_count() > 0;
  checks.that(relu || !has_residual, "a residual is added only before relu");
  const BatchNormCall call = checks.call(relu, has_residual);
  return checks.run(
      stream, workspace, [&](cudnn::Handle& handle) { return batch_norm_forward_workspace(call, handle); },
      [&](cudnn::Handle& handle) {
        const BatchNormForward arrays{epsilon,
                                      x.untyped_data(),
                                      scale.untyped_data(),
                                      bias.untyped_data(),
                                      data_or_null<void>(residual),
                                      y->untyped_data(),
                                      mean->untyped_data(),
                                      rstd->untyped_data(),
                                      running->untyped_data()};
        batch_norm_forward(call, arrays, workspace->untyped_data(), handle, stream);
      });
}

ffi::Error backward(CUstream stream, Arg x, Arg dy, Arg scale, Arg bias, Arg mean, Arg rstd, Ret dx, Ret dscale,
                    Ret dbias, Bytes workspace, int64_t feature_axis, double epsilon, bool relu) {
  CudaBatchNormChecks checks("jaxgrad_batch_norm_cudnn_backward", x, feature_axis);
  checks.like_x("dy", dy);
  checks.per_channel("scale", scale);
  checks.per_channel_or_absent("bias", bias);
  checks.per_channel("mean", mean);
  checks.per_channel("rstd", rstd);
  checks.like_x("dx", *dx);
  checks.per_channel("dscale", *dscale);
  checks.per_channel("dbias", *dbias);
  checks.that(epsilon >= 0, "epsilon must not be negative");
  checks.that(!relu || bias.element_count() > 0, "relu needs bias");
  const BatchNormCall call = checks.call(relu, /*residual=*/false);
  return checks.run(
      stream, workspace, [&](cudnn::Handle& handle) { return batch_norm_backward_workspace(call, handle); },
      [&](cudnn::Handle& handle) {
        const BatchNormBackward arrays{epsilon,
                                       x.untyped_data(),
                                       dy.untyped_data(),
                                       scale.untyped_data(),
                                       data_or_null<void>(bias),
                                       mean.untyped_data(),
                                       rstd.untyped_data(),
                                       dx->untyped_data(),
                                       dscale->untyped_data(),
                                       dbias->untyped_data()};
        batch_norm_backward(call, arrays, workspace->untyped_data(), handle);
      });
}

}  // namespace

// T is f64 where x is f64, and otherwise f32. XLA may record these calls into a CUDA graph: all memory that they use is
// in their buffers, and what they launch is fixed by their attributes and shapes.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_cuda_batch_norm_forward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()          // x         [..., C, ...]
                                  .Arg<ffi::AnyBuffer>()          // scale     [C] of T
                                  .Arg<ffi::AnyBuffer>()          // bias      [C] of T
                                  .Arg<ffi::AnyBuffer>()          // residual  like x or none
                                  .Ret<ffi::AnyBuffer>()          // y         like x
                                  .Ret<ffi::AnyBuffer>()          // mean      [C] of T
                                  .Ret<ffi::AnyBuffer>()          // rstd      [C] of T
                                  .Ret<ffi::AnyBuffer>()          // running   [2, C] of T: mean, variance by n - 1
                                  .Ret<ffi::Buffer<ffi::U8>>()    // workspace
                                  .Attr<int64_t>("feature_axis")  // which axis of x is C
                                  .Attr<double>("epsilon")
                                  .Attr<bool>("relu"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_cuda_batch_norm_backward, backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()          // x       [..., C, ...]
                                  .Arg<ffi::AnyBuffer>()          // dy      like x
                                  .Arg<ffi::AnyBuffer>()          // scale   [C] of T
                                  .Arg<ffi::AnyBuffer>()          // bias    [C] of T, or none without relu
                                  .Arg<ffi::AnyBuffer>()          // mean    [C] of T
                                  .Arg<ffi::AnyBuffer>()          // rstd    [C] of T
                                  .Ret<ffi::AnyBuffer>()          // dx      like x
                                  .Ret<ffi::AnyBuffer>()          // dscale  [C] of T
                                  .Ret<ffi::AnyBuffer>()          // dbias   [C] of T
                                  .Ret<ffi::Buffer<ffi::U8>>()    // workspace
                                  .Attr<int64_t>("feature_axis")  // which axis of x is C
                                  .Attr<double>("epsilon")
                                  .Attr<bool>("relu"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

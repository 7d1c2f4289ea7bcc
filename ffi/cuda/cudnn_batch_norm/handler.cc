#include "cuda/cudnn_batch_norm/handler.h"

#include "common/handler.h"
#include "cuda/cudnn_batch_norm/checks.h"
#include "cuda/cudnn_batch_norm/op.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/handler_support.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

// Returns call(handle), with the cuDNN handle of the device. If cuDNN meets an error that an earlier operation on the
// device caused, throws driver::DeviceFault, and driver::OutOfMemory where cuDNN lacks memory: the error does not blame
// this call. `capturing`: the stream is captured into a CUDA graph, so the cause of an error cannot be queried.
template <class Call>
auto call_cudnn(int device, bool capturing, Call call) {
  cudnn::Handle handle(device);
  try {
    return call(handle);
  } catch (const cudnn::Error& error) {
    if (!capturing) handle.check_device(error);
    throw;
  }
}

class CudaBatchNormChecks : public BatchNormChecks {
 public:
  using BatchNormChecks::BatchNormChecks;

  BatchNormProblem problem(bool relu, bool residual) {
    const BatchNormProblem found{shape, float_type(x_.element_type(), *this), relu, residual};
    require(found.is_persistent() || !relu, "relu requires channels last and a type other than f64");
    return found;
  }

  // Calls run(handle, workspace) unless a check failed. size(handle) is the required workspace.
  template <class Size, class Run>
  ffi::Error run(CUstream stream, ffi::ScratchAllocator& scratch, Bytes& workspace, Size size, Run run) {
    if (failed()) return error();
    return driver::on_device(stream, [&](int device) {
      const bool capturing = driver::is_capturing(stream);
      const int64_t needed = call_cudnn(device, capturing, size);
      void* memory = workspace->untyped_data();
      if (static_cast<int64_t>(workspace->element_count()) < needed) {
        memory = allocate(capturing, scratch, workspace, needed);
        if (failed()) return error();
      }
      call_cudnn(device, capturing, [&](cudnn::Handle& handle) {
        handle.set_stream(stream);
        run(handle, memory);
      });
      return ffi::Error::Success();
    });
  }

 private:
  // The workspace of a program that was lowered without a GPU is an estimate. Where it is too small, XLA lends the
  // memory for this call, except to a CUDA graph, which uses the memory again when it is replayed.
  void* allocate(bool capturing, ffi::ScratchAllocator& scratch, Bytes& workspace, int64_t needed) {
    if (capturing) {
      check_workspace(workspace, needed, *this);
      return nullptr;
    }
    const auto memory = scratch.Allocate(static_cast<size_t>(needed), kAlignment);
    if (!memory) throw driver::OutOfMemory(std::to_string(needed) + " bytes of workspace");
    return *memory;
  }

  static constexpr size_t kAlignment = 256;  // bytes
};

ffi::Error forward(CUstream stream, ffi::ScratchAllocator scratch, Arg x, Arg scale, Arg bias, Arg residual, Ret y,
                   Ret mean, Ret rstd, Ret running, Bytes workspace, int64_t feature_axis, double epsilon, bool relu) {
  CudaBatchNormChecks checks("jaxgrad_cudnn_batch_norm_forward", x, feature_axis);
  checks.per_channel("scale", scale);
  checks.per_channel("bias", bias);
  checks.like_x_or_absent("residual", residual);
  checks.like_x("y", *y);
  checks.per_channel("mean", *mean);
  checks.per_channel("rstd", *rstd);
  checks.array("running", *running, checks.statistics_dtype, {2, checks.shape.C});
  checks.require(epsilon >= 0, "epsilon must not be negative");
  const bool has_residual = residual.element_count() > 0;
  checks.require(relu || !has_residual, "residual requires relu");
  const BatchNormProblem problem = checks.problem(relu, has_residual);
  return checks.run(
      stream, scratch, workspace,
      [&](const cudnn::Handle& handle) { return batch_norm_forward_workspace(problem, handle); },
      [&](cudnn::Handle& handle, void* memory) {
        const BatchNormForwardArrays arrays{epsilon,
                                            x.untyped_data(),
                                            scale.untyped_data(),
                                            bias.untyped_data(),
                                            data_or_null<void>(residual),
                                            y->untyped_data(),
                                            mean->untyped_data(),
                                            rstd->untyped_data(),
                                            running->untyped_data()};
        batch_norm_forward(problem, arrays, memory, handle, stream);
      });
}

ffi::Error backward(CUstream stream, ffi::ScratchAllocator scratch, Arg x, Arg dy, Arg scale, Arg bias, Arg mean,
                    Arg rstd, Ret dx, Ret dscale, Ret dbias, Bytes workspace, int64_t feature_axis, double epsilon,
                    bool relu) {
  CudaBatchNormChecks checks("jaxgrad_cudnn_batch_norm_backward", x, feature_axis);
  checks.like_x("dy", dy);
  checks.per_channel("scale", scale);
  checks.per_channel_or_absent("bias", bias);
  checks.per_channel("mean", mean);
  checks.per_channel("rstd", rstd);
  checks.like_x("dx", *dx);
  checks.per_channel("dscale", *dscale);
  checks.per_channel("dbias", *dbias);
  checks.require(epsilon >= 0, "epsilon must not be negative");
  checks.require(!relu || bias.element_count() > 0, "relu requires bias");
  const BatchNormProblem problem = checks.problem(relu, /*residual=*/false);
  return checks.run(
      stream, scratch, workspace,
      [&](const cudnn::Handle& handle) { return batch_norm_backward_workspace(problem, handle); },
      [&](cudnn::Handle& handle, void* memory) {
        const BatchNormBackwardArrays arrays{epsilon,
                                             x.untyped_data(),
                                             dy.untyped_data(),
                                             scale.untyped_data(),
                                             data_or_null<void>(bias),
                                             mean.untyped_data(),
                                             rstd.untyped_data(),
                                             dx->untyped_data(),
                                             dscale->untyped_data(),
                                             dbias->untyped_data()};
        batch_norm_backward(problem, arrays, memory, handle);
      });
}

}  // namespace

// T is f64 if x is f64, otherwise f32. feature_axis is the axis of x that has size C. XLA may capture these calls into
// a CUDA graph: while it does, they use no memory but their buffers, and their attributes and shapes determine what
// they launch.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cudnn_batch_norm_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Ctx<ffi::ScratchAllocator>()
                           .Arg<ffi::AnyBuffer>()        // x         [..., C, ...]
                           .Arg<ffi::AnyBuffer>()        // scale     [C] of T
                           .Arg<ffi::AnyBuffer>()        // bias      [C] of T
                           .Arg<ffi::AnyBuffer>()        // residual  like x or empty
                           .Ret<ffi::AnyBuffer>()        // y         like x
                           .Ret<ffi::AnyBuffer>()        // mean      [C] of T
                           .Ret<ffi::AnyBuffer>()        // rstd      [C] of T
                           .Ret<ffi::AnyBuffer>()        // running   [2, C] of T: mean and unbiased variance
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("feature_axis")
                           .Attr<double>("epsilon")
                           .Attr<bool>("relu"),
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cudnn_batch_norm_backward, backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Ctx<ffi::ScratchAllocator>()
                           .Arg<ffi::AnyBuffer>()        // x       [..., C, ...]
                           .Arg<ffi::AnyBuffer>()        // dy      like x
                           .Arg<ffi::AnyBuffer>()        // scale   [C] of T
                           .Arg<ffi::AnyBuffer>()        // bias    [C] of T, or empty without relu
                           .Arg<ffi::AnyBuffer>()        // mean    [C] of T
                           .Arg<ffi::AnyBuffer>()        // rstd    [C] of T
                           .Ret<ffi::AnyBuffer>()        // dx      like x
                           .Ret<ffi::AnyBuffer>()        // dscale  [C] of T
                           .Ret<ffi::AnyBuffer>()        // dbias   [C] of T
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("feature_axis")
                           .Attr<double>("epsilon")
                           .Attr<bool>("relu"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

#include "cpu/batch_norm/handler.h"

#include "common/batch_norm_checks.h"
#include "common/handler.h"
#include "cpu/batch_norm/op.h"
#include "cpu/runtime/storage_dispatch.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Bytes = ffi::Result<ffi::Buffer<ffi::U8>>;
using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;

class CpuBatchNormChecks : public BatchNormChecks {
 public:
  using BatchNormChecks::BatchNormChecks;

  // Calls run(S{}, parallel) unless a check failed.
  template <class Run>
  ffi::Error run(ffi::ThreadPool& pool, Bytes& workspace, Run run) {
    const int64_t bytes = ffi::ByteWidth(x_.element_type());
    require(failed() || static_cast<int64_t>(workspace->element_count()) >= batch_norm_workspace(shape, bytes),
            "the workspace is too small");
    if (failed()) return error();
    return with_storage(*this, x_.element_type(), [&](auto element) {
      XlaParallel parallel(pool);
      run(element, parallel);
      return ffi::Error::Success();
    });
  }
};

template <class T>
T* data(const ffi::AnyBuffer& buffer) {
  return data_or_null<T>(buffer);
}

std::byte* scratch(Bytes& workspace) { return reinterpret_cast<std::byte*>(workspace->typed_data()); }

ffi::Error statistics(ffi::ThreadPool pool, Arg x, Ret mean, Ret mean_low, Ret var, Ret rstd, Bytes workspace,
                      int64_t feature_axis, double epsilon) {
  CpuBatchNormChecks checks("jaxgrad_cpu_batch_norm_statistics", x, feature_axis);
  checks.per_channel("mean", *mean);
  checks.per_channel("mean_low", *mean_low);
  checks.per_channel("var", *var);
  checks.per_channel("rstd", *rstd);
  checks.require(epsilon >= 0, "epsilon must not be negative");
  return checks.run(pool, workspace, [&](auto element, Parallel& parallel) {
    using S = decltype(element);
    using T = Compute<S>;
    batch_norm_statistics(BatchNormStatistics<S>{checks.shape, epsilon, data<S>(x), data<T>(*mean), data<T>(*mean_low),
                                                 data<T>(*var), data<T>(*rstd), scratch(workspace)},
                          parallel);
  });
}

ffi::Error normalize(ffi::ThreadPool pool, Arg x, Arg scale, Arg bias, Arg mean, Arg mean_low, Arg rstd, Arg residual,
                     Ret y, Bytes workspace, int64_t feature_axis, bool relu) {
  CpuBatchNormChecks checks("jaxgrad_cpu_batch_norm_normalize", x, feature_axis);
  checks.per_channel("scale", scale);
  checks.per_channel("bias", bias);
  checks.per_channel("mean", mean);
  checks.per_channel_or_absent("mean_low", mean_low);
  checks.per_channel("rstd", rstd);
  checks.like_x_or_absent("residual", residual);
  checks.like_x("y", *y);
  return checks.run(pool, workspace, [&](auto element, Parallel& parallel) {
    using S = decltype(element);
    using T = Compute<S>;
    batch_norm_normalize(
        BatchNormNormalize<S>{checks.shape, relu, data<S>(x), data<T>(scale), data<T>(bias), data<T>(mean),
                              data<T>(mean_low), data<T>(rstd), data<S>(residual), data<S>(*y), scratch(workspace)},
        parallel);
  });
}

ffi::Error backward(ffi::ThreadPool pool, Arg x, Arg scale, Arg bias, Arg mean, Arg mean_low, Arg rstd, Arg y, Arg dy,
                    Arg dmean, Arg dvar, Ret dx, Ret dscale, Ret dbias, Ret dresidual, Bytes workspace,
                    int64_t feature_axis, bool frozen, bool relu) {
  CpuBatchNormChecks checks("jaxgrad_cpu_batch_norm_backward", x, feature_axis);
  checks.per_channel("scale", scale);
  checks.per_channel_or_absent("bias", bias);
  checks.per_channel("mean", mean);
  checks.per_channel_or_absent("mean_low", mean_low);
  checks.per_channel("rstd", rstd);
  checks.like_x_or_absent("y", y);
  checks.like_x("dy", dy);
  checks.per_channel_or_absent("dmean", dmean);
  checks.per_channel_or_absent("dvar", dvar);
  checks.like_x_or_absent("dx", *dx);
  checks.per_channel_or_absent("dscale", *dscale);
  checks.per_channel_or_absent("dbias", *dbias);
  checks.like_x_or_absent("dresidual", *dresidual);
  checks.require(!relu || y.element_count() > 0 || bias.element_count() > 0, "relu requires y or bias");
  checks.require(!frozen || (!relu && dmean.element_count() + dvar.element_count() + dresidual->element_count() == 0),
                 "frozen statistics exclude relu, dmean, dvar and dresidual");
  return checks.run(pool, workspace, [&](auto element, Parallel& parallel) {
    using S = decltype(element);
    using T = Compute<S>;
    batch_norm_backward(
        BatchNormBackward<S>{checks.shape, frozen, relu, data<S>(x), data<T>(scale), data<T>(bias), data<T>(mean),
                             data<T>(mean_low), data<T>(rstd), data<S>(y), data<S>(dy), data<T>(dmean), data<T>(dvar),
                             data<S>(*dx), data<T>(*dscale), data<T>(*dbias), data<S>(*dresidual), scratch(workspace)},
        parallel);
  });
}

}  // namespace

// T is f64 if x is f64, otherwise f32. feature_axis is the axis of x that has size C.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_batch_norm_statistics, statistics,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x         [..., C, ...]
                           .Ret<ffi::AnyBuffer>()        // mean      [C] of T
                           .Ret<ffi::AnyBuffer>()        // mean_low  [C] of T
                           .Ret<ffi::AnyBuffer>()        // var       [C] of T
                           .Ret<ffi::AnyBuffer>()        // rstd      [C] of T
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("feature_axis")
                           .Attr<double>("epsilon"));

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_batch_norm_normalize, normalize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x         [..., C, ...]
                           .Arg<ffi::AnyBuffer>()        // scale     [C] of T
                           .Arg<ffi::AnyBuffer>()        // bias      [C] of T
                           .Arg<ffi::AnyBuffer>()        // mean      [C] of T
                           .Arg<ffi::AnyBuffer>()        // mean_low  [C] of T or empty
                           .Arg<ffi::AnyBuffer>()        // rstd      [C] of T
                           .Arg<ffi::AnyBuffer>()        // residual  like x or empty
                           .Ret<ffi::AnyBuffer>()        // y         like x
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("feature_axis")
                           .Attr<bool>("relu"));

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_batch_norm_backward, backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x          [..., C, ...]
                           .Arg<ffi::AnyBuffer>()        // scale      [C] of T
                           .Arg<ffi::AnyBuffer>()        // bias       [C] of T or empty
                           .Arg<ffi::AnyBuffer>()        // mean       [C] of T
                           .Arg<ffi::AnyBuffer>()        // mean_low   [C] of T or empty
                           .Arg<ffi::AnyBuffer>()        // rstd       [C] of T
                           .Arg<ffi::AnyBuffer>()        // y          like x or empty
                           .Arg<ffi::AnyBuffer>()        // dy         like x
                           .Arg<ffi::AnyBuffer>()        // dmean      [C] of T or empty
                           .Arg<ffi::AnyBuffer>()        // dvar       [C] of T or empty
                           .Ret<ffi::AnyBuffer>()        // dx         like x or empty
                           .Ret<ffi::AnyBuffer>()        // dscale     [C] of T or empty
                           .Ret<ffi::AnyBuffer>()        // dbias      [C] of T or empty
                           .Ret<ffi::AnyBuffer>()        // dresidual  like x or empty
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("feature_axis")
                           .Attr<bool>("frozen")
                           .Attr<bool>("relu"));

}  // namespace jaxgrad

#include "cpu/norm/handler.h"

#include "common/handler.h"
#include "common/norm_checks.h"
#include "cpu/norm/op.h"
#include "cpu/runtime/storage_dispatch.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Bytes = ffi::Result<ffi::Buffer<ffi::U8>>;
using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;

class CpuNormChecks : public NormChecks {
 public:
  using NormChecks::NormChecks;

  // The statistics that a call writes.
  void results(const Arg& mean, const Arg& mean_low, const Arg& var, double epsilon, bool centered) {
    if (centered) {
      statistics("mean", mean);
      statistics("mean_low", mean_low);
    }
    require(centered || mean.element_count() + mean_low.element_count() == 0,
            "mean and mean_low must be empty if centered is false");
    statistics("var", var);
    require(epsilon >= 0, "epsilon must not be negative");
  }
  // The operands of a normalization other than the statistics.
  void operands(const Arg& scale, const Arg& bias, const Arg& residual, const Arg& y) {
    per_channel("scale", scale);
    per_channel("bias", bias);
    like_x_or_absent("residual", residual);
    like_x("y", y);
  }
  // The statistics that a call reads.
  void given(const Arg& mean, const Arg& mean_low, const Arg& rstd) {
    statistics_or_absent("mean", mean);
    statistics_or_absent("mean_low", mean_low);
    require(mean.element_count() > 0 || mean_low.element_count() == 0, "mean_low requires mean");
    statistics("rstd", rstd);
  }

  // Calls run(Q{}, workspace, parallel) unless a check failed.
  template <class Run>
  ffi::Error run(ffi::ThreadPool& pool, Bytes& workspace, Run run) {
    const int64_t bytes = ffi::ByteWidth(x_.element_type());
    require(failed() || static_cast<int64_t>(workspace->element_count()) >= norm_workspace(shape, bytes),
            "the workspace is too small");
    if (failed()) return error();
    return with_storage(*this, x_.element_type(), [&](auto element) {
      XlaParallel parallel(pool);
      run(element, reinterpret_cast<std::byte*>(workspace->typed_data()), parallel);
      return ffi::Error::Success();
    });
  }
};

template <class T>
T* data(const ffi::AnyBuffer& buffer) {
  return data_or_null<T>(buffer);
}

ffi::Error statistics(ffi::ThreadPool pool, Arg x, Ret mean, Ret mean_low, Ret var, Ret rstd, Bytes workspace,
                      double epsilon, bool centered) {
  CpuNormChecks checks("jaxgrad_cpu_norm_statistics", x, *rstd, nullptr);
  checks.results(*mean, *mean_low, *var, epsilon, centered);
  checks.statistics("rstd", *rstd);
  return checks.run(pool, workspace, [&](auto element, std::byte* scratch, Parallel& parallel) {
    using Q = decltype(element);
    using T = Compute<Q>;
    const NormStatistics<Q> call{epsilon,       data<Q>(x),    data<T>(*mean), data<T>(*mean_low),
                                 data<T>(*var), data<T>(*rstd)};
    norm_forward<Q>(checks.shape, &call, nullptr, scratch, parallel);
  });
}

ffi::Error normalize(ffi::ThreadPool pool, Arg x, Arg scale, Arg bias, Arg mean, Arg mean_low, Arg rstd, Arg residual,
                     Ret y, Bytes workspace, int64_t activation) {
  CpuNormChecks checks("jaxgrad_cpu_norm_normalize", x, rstd, &scale);
  checks.given(mean, mean_low, rstd);
  checks.operands(scale, bias, residual, *y);
  const Activation act = checks.activation(activation);
  return checks.run(pool, workspace, [&](auto element, std::byte* scratch, Parallel& parallel) {
    using Q = decltype(element);
    using T = Compute<Q>;
    const NormNormalize<Q> call{act,           data<Q>(x),        data<T>(scale),
                                data<T>(bias), data<T>(mean),     data<T>(mean_low),
                                data<T>(rstd), data<Q>(residual), data<Q>(*y)};
    norm_forward<Q>(checks.shape, nullptr, &call, scratch, parallel);
  });
}

ffi::Error forward(ffi::ThreadPool pool, Arg x, Arg scale, Arg bias, Arg residual, Ret y, Ret mean, Ret mean_low,
                   Ret var, Ret rstd, Bytes workspace, double epsilon, int64_t activation, bool centered) {
  CpuNormChecks checks("jaxgrad_cpu_norm_forward", x, *rstd, &scale);
  checks.results(*mean, *mean_low, *var, epsilon, centered);
  checks.statistics("rstd", *rstd);
  checks.operands(scale, bias, residual, *y);
  const Activation act = checks.activation(activation);
  return checks.run(pool, workspace, [&](auto element, std::byte* scratch, Parallel& parallel) {
    using Q = decltype(element);
    using T = Compute<Q>;
    const NormStatistics<Q> statistics{epsilon,       data<Q>(x),    data<T>(*mean), data<T>(*mean_low),
                                       data<T>(*var), data<T>(*rstd)};
    const NormNormalize<Q> normalize{act,
                                     statistics.x,
                                     data<T>(scale),
                                     data<T>(bias),
                                     statistics.mean,
                                     statistics.mean_low,
                                     statistics.rstd,
                                     data<Q>(residual),
                                     data<Q>(*y)};
    norm_forward<Q>(checks.shape, &statistics, &normalize, scratch, parallel);
  });
}

ffi::Error backward(ffi::ThreadPool pool, Arg x, Arg scale, Arg bias, Arg mean, Arg mean_low, Arg rstd, Arg y,
                    Arg residual, Arg dy, Arg dmean, Arg dvar, Ret dx, Ret dscale, Ret dbias, Ret dresidual,
                    Bytes workspace, bool frozen, bool centered, int64_t activation) {
  CpuNormChecks checks("jaxgrad_cpu_norm_backward", x, rstd, &scale);
  checks.per_channel("scale", scale);
  checks.per_channel_or_absent("bias", bias);
  checks.given(mean, mean_low, rstd);
  checks.require(centered == (mean.element_count() > 0), "mean must be given if and only if centered is true");
  checks.like_x_or_absent("y", y);
  checks.like_x_or_absent("residual", residual);
  checks.like_x("dy", dy);
  checks.statistics_or_absent("dmean", dmean);
  checks.statistics_or_absent("dvar", dvar);
  checks.like_x_or_absent("dx", *dx);
  checks.per_channel_or_absent("dscale", *dscale);
  checks.per_channel_or_absent("dbias", *dbias);
  checks.like_x_or_absent("dresidual", *dresidual);
  const Activation act = checks.activation(activation);
  checks.require(
      act == Activation::kNone || bias.element_count() > 0 || (act == Activation::kRelu && y.element_count() > 0),
      "activation requires bias, or relu y");
  checks.require(!frozen || (act == Activation::kNone &&
                             dmean.element_count() + dvar.element_count() + dresidual->element_count() == 0),
                 "frozen statistics exclude an activation, dmean, dvar and dresidual");
  return checks.run(pool, workspace, [&](auto element, std::byte* scratch, Parallel& parallel) {
    using Q = decltype(element);
    using T = Compute<Q>;
    const NormBackward<Q> call{act,
                               frozen,
                               data<Q>(x),
                               data<T>(scale),
                               data<T>(bias),
                               data<T>(mean),
                               data<T>(mean_low),
                               data<T>(rstd),
                               act == Activation::kRelu ? data<Q>(y) : nullptr,
                               data<Q>(residual),
                               data<Q>(dy),
                               data<T>(dmean),
                               data<T>(dvar),
                               data<Q>(*dx),
                               data<T>(*dscale),
                               data<T>(*dbias),
                               data<Q>(*dresidual)};
    norm_backward<Q>(checks.shape, call, scratch, parallel);
  });
}

}  // namespace

// T is f64 if x is f64, otherwise f32. common/norm_shape.h describes the sizes. Without `centered`, mean and mean_low
// are empty.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_norm_statistics, statistics,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x         [S, O, C, I]
                           .Ret<ffi::AnyBuffer>()        // mean      [S, G] of T or empty
                           .Ret<ffi::AnyBuffer>()        // mean_low  [S, G] of T or empty
                           .Ret<ffi::AnyBuffer>()        // var       [S, G] of T
                           .Ret<ffi::AnyBuffer>()        // rstd      [S, G] of T
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<double>("epsilon")
                           .Attr<bool>("centered"));

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_norm_normalize, normalize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x         [S, O, C, I]
                           .Arg<ffi::AnyBuffer>()        // scale     [K, C] of T
                           .Arg<ffi::AnyBuffer>()        // bias      [K, C] of T
                           .Arg<ffi::AnyBuffer>()        // mean      [S, G] of T or empty
                           .Arg<ffi::AnyBuffer>()        // mean_low  [S, G] of T or empty
                           .Arg<ffi::AnyBuffer>()        // rstd      [S, G] of T
                           .Arg<ffi::AnyBuffer>()        // residual  like x or empty
                           .Ret<ffi::AnyBuffer>()        // y         like x
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("activation"));

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_norm_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x         [S, O, C, I]
                           .Arg<ffi::AnyBuffer>()        // scale     [K, C] of T
                           .Arg<ffi::AnyBuffer>()        // bias      [K, C] of T
                           .Arg<ffi::AnyBuffer>()        // residual  like x or empty
                           .Ret<ffi::AnyBuffer>()        // y         like x
                           .Ret<ffi::AnyBuffer>()        // mean      [S, G] of T or empty
                           .Ret<ffi::AnyBuffer>()        // mean_low  [S, G] of T or empty
                           .Ret<ffi::AnyBuffer>()        // var       [S, G] of T
                           .Ret<ffi::AnyBuffer>()        // rstd      [S, G] of T
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<double>("epsilon")
                           .Attr<int64_t>("activation")
                           .Attr<bool>("centered"));

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_norm_backward, backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x          [S, O, C, I]
                           .Arg<ffi::AnyBuffer>()        // scale      [K, C] of T
                           .Arg<ffi::AnyBuffer>()        // bias       [K, C] of T or empty
                           .Arg<ffi::AnyBuffer>()        // mean       [S, G] of T or empty
                           .Arg<ffi::AnyBuffer>()        // mean_low   [S, G] of T or empty
                           .Arg<ffi::AnyBuffer>()        // rstd       [S, G] of T
                           .Arg<ffi::AnyBuffer>()        // y          like x or empty
                           .Arg<ffi::AnyBuffer>()        // residual   like x or empty
                           .Arg<ffi::AnyBuffer>()        // dy         like x
                           .Arg<ffi::AnyBuffer>()        // dmean      [S, G] of T or empty
                           .Arg<ffi::AnyBuffer>()        // dvar       [S, G] of T or empty
                           .Ret<ffi::AnyBuffer>()        // dx         like x or empty
                           .Ret<ffi::AnyBuffer>()        // dscale     [K, C] of T or empty
                           .Ret<ffi::AnyBuffer>()        // dbias      [K, C] of T or empty
                           .Ret<ffi::AnyBuffer>()        // dresidual  like x or empty
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<bool>("frozen")
                           .Attr<bool>("centered")
                           .Attr<int64_t>("activation"));

}  // namespace jaxgrad

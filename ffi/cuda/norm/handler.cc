#include "cuda/norm/handler.h"

#include <cstdint>

#include "common/handler.h"
#include "common/norm_checks.h"
#include "cuda/norm/op.h"
#include "cuda/runtime/handler_support.h"
#include "cuda/runtime/retained.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

class CudaNormChecks : public NormChecks {
 public:
  CudaNormChecks(const char* target, NormPass pass, const Arg& x, const Arg& rstd, const Arg* scale)
      : NormChecks(target, x, rstd, scale) {
    key.pass = pass;
    key.shape = shape;
    key.type = float_type(x.element_type(), *this);
    statistics("rstd", rstd);
  }

  // The data of optional arrays; null where they are absent.
  void* like_x_or_null(const char* name, const Arg& buffer) {
    like_x_or_absent(name, buffer);
    return aligned(data_or_null<void>(buffer));
  }
  float* statistics_or_null(const char* name, const Arg& buffer) {
    statistics_or_absent(name, buffer);
    return data_or_null<float>(buffer);
  }
  float* per_channel_or_null(const char* name, const Arg& buffer) {
    per_channel_or_absent(name, buffer);
    return static_cast<float*>(aligned(data_or_null<void>(buffer)));
  }

  // The statistics that a pass writes.
  void results(NormArrays& arrays, const Arg& mean, const Arg& mean_low, const Arg& var, const Arg& rstd,
               bool centered) {
    statistics("var", var);
    arrays.mean = statistics_or_null("mean", mean);
    arrays.mean_low = statistics_or_null("mean_low", mean_low);
    arrays.var = data_or_null<float>(var);
    arrays.rstd = data_or_null<float>(rstd);
    require(!centered || (arrays.mean != nullptr && arrays.mean_low != nullptr),
            "mean and mean_low must be given if centered is true");
    key.centered = centered;
  }
  // The statistics that a pass reads.
  void given(NormArrays& arrays, const Arg& mean, const Arg& mean_low, const Arg& rstd) {
    arrays.given_mean = statistics_or_null("mean", mean);
    arrays.given_mean_low = statistics_or_null("mean_low", mean_low);
    arrays.given_rstd = data_or_null<float>(rstd);
    require(arrays.given_mean != nullptr || arrays.given_mean_low == nullptr, "mean_low requires mean");
    key.centered = arrays.given_mean != nullptr;
  }
  // The operands of a normalization, other than the statistics, and its result.
  void operands(NormArrays& arrays, const Arg& scale, const Arg& bias, const Arg& residual, const Arg& y,
                int64_t activation) {
    per_channel("scale", scale);
    per_channel("bias", bias);
    like_x("y", y);
    arrays.scale = per_channel_or_null("scale", scale);
    arrays.bias = per_channel_or_null("bias", bias);
    arrays.residual = like_x_or_null("residual", residual);
    arrays.result = aligned(y.untyped_data());
    key.residual = arrays.residual != nullptr;
    key.activation = this->activation(activation);
  }

  ffi::Error run(CUstream stream, NormArrays& arrays, double epsilon, Bytes& workspace) {
    require(epsilon >= 0, "epsilon must not be negative");
    arrays.x = aligned(x_.untyped_data());
    if (failed()) return error();
    return driver::on_device(stream, [&](int device) {
      const auto plan = norm_plan(key, device);
      check_workspace(workspace, plan->program.workspace_bytes, *this);
      if (failed()) return error();
      norm(stream, *plan, arrays, epsilon, workspace->untyped_data());
      if (driver::is_capturing(stream)) retain_for_cuda_graph(plan);
      return ffi::Error::Success();
    });
  }

  void* aligned(void* data) {
    require(reinterpret_cast<uintptr_t>(data) % 16 == 0, "the arrays must be aligned to 16 bytes");
    return data;
  }

  NormKey key{};
};

ffi::Error forward(CUstream stream, Arg x, Arg scale, Arg bias, Arg residual, Ret y, Ret mean, Ret mean_low, Ret var,
                   Ret rstd, Bytes workspace, double epsilon, int64_t activation, bool centered) {
  CudaNormChecks checks("jaxgrad_cuda_norm_forward", NormPass::kForward, x, *rstd, &scale);
  NormArrays arrays{};
  checks.operands(arrays, scale, bias, residual, *y, activation);
  checks.results(arrays, *mean, *mean_low, *var, *rstd, centered);
  return checks.run(stream, arrays, epsilon, workspace);
}

ffi::Error statistics(CUstream stream, Arg x, Ret mean, Ret mean_low, Ret var, Ret rstd, Bytes workspace,
                      double epsilon, bool centered) {
  CudaNormChecks checks("jaxgrad_cuda_norm_statistics", NormPass::kStatistics, x, *rstd, nullptr);
  NormArrays arrays{};
  checks.results(arrays, *mean, *mean_low, *var, *rstd, centered);
  return checks.run(stream, arrays, epsilon, workspace);
}

ffi::Error normalize(CUstream stream, Arg x, Arg scale, Arg bias, Arg mean, Arg mean_low, Arg rstd, Arg residual, Ret y,
                     Bytes workspace, int64_t activation) {
  CudaNormChecks checks("jaxgrad_cuda_norm_normalize", NormPass::kNormalize, x, rstd, &scale);
  NormArrays arrays{};
  checks.given(arrays, mean, mean_low, rstd);
  checks.operands(arrays, scale, bias, residual, *y, activation);
  return checks.run(stream, arrays, 0, workspace);
}

ffi::Error backward(CUstream stream, Arg x, Arg scale, Arg bias, Arg mean, Arg mean_low, Arg rstd, Arg y, Arg residual,
                    Arg dy, Arg dmean, Arg dvar, Ret dx, Ret dscale, Ret dbias, Ret dresidual, Bytes workspace,
                    bool frozen, bool centered, int64_t activation) {
  CudaNormChecks checks("jaxgrad_cuda_norm_backward", NormPass::kBackward, x, rstd, &scale);
  NormArrays arrays{};
  checks.given(arrays, mean, mean_low, rstd);
  checks.require(centered == checks.key.centered, "mean must be given if and only if centered is true");
  checks.per_channel("scale", scale);
  checks.like_x("dy", dy);
  arrays.scale = checks.per_channel_or_null("scale", scale);
  arrays.dy = checks.aligned(dy.untyped_data());
  arrays.bias = checks.per_channel_or_null("bias", bias);
  arrays.y = checks.like_x_or_null("y", y);
  arrays.residual = checks.like_x_or_null("residual", residual);
  arrays.dmean = checks.statistics_or_null("dmean", dmean);
  arrays.dvar = checks.statistics_or_null("dvar", dvar);
  arrays.result = checks.like_x_or_null("dx", *dx);
  arrays.dresidual = checks.like_x_or_null("dresidual", *dresidual);
  arrays.dscale = checks.per_channel_or_null("dscale", *dscale);
  arrays.dbias = checks.per_channel_or_null("dbias", *dbias);
  NormKey& key = checks.key;
  key.frozen = frozen;
  key.residual = arrays.dresidual != nullptr;
  key.needs_dx = arrays.result != nullptr;
  key.needs_sums = arrays.dscale != nullptr || arrays.dbias != nullptr;
  key.activation = checks.activation(activation);
  if (key.activation != Activation::kNone) {
    if (arrays.residual != nullptr) key.third = NormThird::kResidual;
    if (arrays.y != nullptr) key.third = NormThird::kY;
    checks.require(arrays.bias != nullptr || (arrays.y != nullptr && key.activation == Activation::kRelu),
                   "activation requires bias, or relu y");
  }
  return checks.run(stream, arrays, 0, workspace);
}

}  // namespace

// XLA may capture these calls into a CUDA graph: they use no memory but their buffers, and their attributes and shapes
// determine what they launch, but for the nonce, which may be used again.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_norm_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x         [S, O, C, I]
                           .Arg<ffi::AnyBuffer>()        // scale     [K, C]
                           .Arg<ffi::AnyBuffer>()        // bias      [K, C]
                           .Arg<ffi::AnyBuffer>()        // residual  like x, or absent
                           .Ret<ffi::AnyBuffer>()        // y         like x
                           .Ret<ffi::AnyBuffer>()        // mean      [S, G], absent if not centered
                           .Ret<ffi::AnyBuffer>()        // mean_low  likewise
                           .Ret<ffi::AnyBuffer>()        // var       [S, G]
                           .Ret<ffi::AnyBuffer>()        // rstd      [S, G]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<double>("epsilon")
                           .Attr<int64_t>("activation")
                           .Attr<bool>("centered"),
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_norm_statistics, statistics,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x         [S, O, C, I]
                           .Ret<ffi::AnyBuffer>()        // mean      [S, G], absent if not centered
                           .Ret<ffi::AnyBuffer>()        // mean_low  likewise
                           .Ret<ffi::AnyBuffer>()        // var       [S, G]
                           .Ret<ffi::AnyBuffer>()        // rstd      [S, G]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<double>("epsilon")
                           .Attr<bool>("centered"),
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_norm_normalize, normalize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x         [S, O, C, I]
                           .Arg<ffi::AnyBuffer>()        // scale     [K, C]
                           .Arg<ffi::AnyBuffer>()        // bias      [K, C]
                           .Arg<ffi::AnyBuffer>()        // mean      [S, G], absent if not centered
                           .Arg<ffi::AnyBuffer>()        // mean_low  [S, G], or absent
                           .Arg<ffi::AnyBuffer>()        // rstd      [S, G]
                           .Arg<ffi::AnyBuffer>()        // residual  like x, or absent
                           .Ret<ffi::AnyBuffer>()        // y         like x
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_norm_backward, backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x         [S, O, C, I]
                           .Arg<ffi::AnyBuffer>()        // scale     [K, C]
                           .Arg<ffi::AnyBuffer>()        // bias      [K, C], where z is computed again
                           .Arg<ffi::AnyBuffer>()        // mean      [S, G], absent if not centered
                           .Arg<ffi::AnyBuffer>()        // mean_low  [S, G], or absent
                           .Arg<ffi::AnyBuffer>()        // rstd      [S, G]
                           .Arg<ffi::AnyBuffer>()        // y         like x, or absent
                           .Arg<ffi::AnyBuffer>()        // residual  like x, or absent
                           .Arg<ffi::AnyBuffer>()        // dy        like x
                           .Arg<ffi::AnyBuffer>()        // dmean     [S, G], or absent
                           .Arg<ffi::AnyBuffer>()        // dvar      [S, G], or absent
                           .Ret<ffi::AnyBuffer>()        // dx        like x, or absent
                           .Ret<ffi::AnyBuffer>()        // dscale    [K, C], or absent
                           .Ret<ffi::AnyBuffer>()        // dbias     [K, C], or absent
                           .Ret<ffi::AnyBuffer>()        // dresidual like x, or absent
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<bool>("frozen")
                           .Attr<bool>("centered")
                           .Attr<int64_t>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

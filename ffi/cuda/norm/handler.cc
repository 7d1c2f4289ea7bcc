#include "cuda/norm/handler.h"

#include <cstdint>

#include "common/handler.h"
#include "cuda/norm/op.h"
#include "cuda/runtime/handler_support.h"
#include "cuda/runtime/retained.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

// One call: its checks, its problem and its launch. x is [S, O, C, I], statistics [S, G], and scale [K, C].
class NormCall : public Checks {
 public:
  NormCall(const char* target, NormPass pass, const Arg& x, const Arg& rstd, int64_t calls) : Checks(target), x_(x) {
    const auto sizes = x.dimensions(), groups = rstd.dimensions();
    require(sizes.size() == 4, "x must have 4 dimensions");
    require(groups.size() == 2, "rstd must have 2 dimensions");
    if (failed()) return;
    key.pass = pass;
    key.shape = {sizes[0], sizes[1], sizes[2], sizes[3], groups[1], calls};
    key.type = float_type(x.element_type(), *this);
    require(x.element_count() > 0, "x must have elements");
    require(calls > 0 && sizes[0] % calls == 0, "scale must have a row for equally many samples");
    require(groups[1] > 0 && sizes[2] % groups[1] == 0, "the groups must have equally many channels");
    statistics("rstd", rstd);
  }

  void like_x(const char* name, const Arg& array) {
    if (failed()) return;
    const NormShape& s = key.shape;
    this->array(name, array, x_.element_type(), {s.samples, s.outer, s.channels, s.inner});
    aligned(array);
  }
  const void* like_x_or_null(const char* name, const Arg& array) {
    if (array.element_count() == 0) return nullptr;
    like_x(name, array);
    return array.untyped_data();
  }
  void statistics(const char* name, const Arg& array) {
    if (!failed()) this->array(name, array, ffi::F32, {key.shape.samples, key.shape.groups});
  }
  float* statistics_or_null(const char* name, const Arg& array) {
    if (array.element_count() == 0) return nullptr;
    statistics(name, array);
    return static_cast<float*>(array.untyped_data());
  }
  void per_channel(const char* name, const Arg& array) {
    if (!failed()) this->array(name, array, ffi::F32, {key.shape.calls, key.shape.channels});
  }
  float* per_channel_or_null(const char* name, const Arg& array) {
    if (array.element_count() == 0) return nullptr;
    per_channel(name, array);
    return static_cast<float*>(array.untyped_data());
  }
  void activation(int64_t value) {
    require(value >= 0 && value <= static_cast<int64_t>(NormActivation::kGelu), "activation is unknown");
    key.activation = static_cast<NormActivation>(value);
  }

  ffi::Error run(CUstream stream, const NormArrays& arrays, double epsilon, Bytes& workspace) {
    require(epsilon >= 0, "epsilon must not be negative");
    if (!failed()) aligned(x_);
    if (failed()) return error();
    return driver::on_device(stream, [&](int device) {
      const NormProgram program = norm_program(key, norm_gpu(device));
      check_workspace(workspace, program.workspace_bytes, *this);
      if (failed()) return error();
      const auto kernel = load_norm_kernel(program, device);
      norm(stream, program, *kernel, arrays, epsilon, workspace->untyped_data());
      if (driver::is_capturing(stream)) retain_for_cuda_graph(kernel);
      return ffi::Error::Success();
    });
  }

  NormKey key{};

 private:
  void aligned(const Arg& array) {
    require(reinterpret_cast<uintptr_t>(array.untyped_data()) % 16 == 0, "the arrays must be aligned to 16 bytes");
  }

  const Arg& x_;
};

const float* floats(const Arg& array) { return static_cast<const float*>(array.untyped_data()); }
float* floats(Ret& array) { return static_cast<float*>(array->untyped_data()); }

int64_t rows_of(const Arg& array) { return array.dimensions().size() == 0 ? 0 : array.dimensions()[0]; }

ffi::Error forward(CUstream stream, Arg x, Arg scale, Arg bias, Arg residual, Ret y, Ret mean, Ret mean_low, Ret var,
                   Ret rstd, Bytes workspace, double epsilon, int64_t activation, bool centered) {
  NormCall call("jaxgrad_cuda_norm_forward", NormPass::kForward, x, *rstd, rows_of(scale));
  call.per_channel("scale", scale);
  call.per_channel("bias", bias);
  call.like_x("y", *y);
  call.statistics("var", *var);
  call.activation(activation);
  NormArrays arrays{};
  arrays.x = x.untyped_data();
  arrays.residual = call.like_x_or_null("residual", residual);
  arrays.result = y->untyped_data();
  arrays.scale = floats(scale);
  arrays.bias = floats(bias);
  arrays.mean = call.statistics_or_null("mean", *mean);
  arrays.mean_low = call.statistics_or_null("mean_low", *mean_low);
  arrays.var = floats(var);
  arrays.rstd = floats(rstd);
  call.require(!centered || (arrays.mean != nullptr && arrays.mean_low != nullptr), "mean and mean_low must be given");
  call.key.centered = centered;
  call.key.residual = arrays.residual != nullptr;
  return call.run(stream, arrays, epsilon, workspace);
}

ffi::Error statistics(CUstream stream, Arg x, Ret mean, Ret mean_low, Ret var, Ret rstd, Bytes workspace,
                      double epsilon, bool centered) {
  NormCall call("jaxgrad_cuda_norm_statistics", NormPass::kStatistics, x, *rstd, 1);
  call.statistics("var", *var);
  NormArrays arrays{};
  arrays.x = x.untyped_data();
  arrays.mean = call.statistics_or_null("mean", *mean);
  arrays.mean_low = call.statistics_or_null("mean_low", *mean_low);
  arrays.var = floats(var);
  arrays.rstd = floats(rstd);
  call.require(!centered || (arrays.mean != nullptr && arrays.mean_low != nullptr), "mean and mean_low must be given");
  call.key.centered = centered;
  return call.run(stream, arrays, epsilon, workspace);
}

ffi::Error normalize(CUstream stream, Arg x, Arg scale, Arg bias, Arg mean, Arg mean_low, Arg rstd, Arg residual, Ret y,
                     Bytes workspace, int64_t activation) {
  NormCall call("jaxgrad_cuda_norm_normalize", NormPass::kNormalize, x, rstd, rows_of(scale));
  call.per_channel("scale", scale);
  call.per_channel("bias", bias);
  call.like_x("y", *y);
  call.activation(activation);
  NormArrays arrays{};
  arrays.x = x.untyped_data();
  arrays.residual = call.like_x_or_null("residual", residual);
  arrays.result = y->untyped_data();
  arrays.scale = floats(scale);
  arrays.bias = floats(bias);
  arrays.given_mean = call.statistics_or_null("mean", mean);
  arrays.given_mean_low = call.statistics_or_null("mean_low", mean_low);
  arrays.given_rstd = floats(rstd);
  call.key.centered = arrays.given_mean != nullptr;
  call.key.residual = arrays.residual != nullptr;
  return call.run(stream, arrays, 0, workspace);
}

ffi::Error backward(CUstream stream, Arg x, Arg scale, Arg bias, Arg mean, Arg mean_low, Arg rstd, Arg y, Arg residual,
                    Arg dy, Arg dmean, Arg dvar, Ret dx, Ret dscale, Ret dbias, Ret dresidual, Bytes workspace,
                    int64_t activation, bool frozen) {
  NormCall call("jaxgrad_cuda_norm_backward", NormPass::kBackward, x, rstd, rows_of(scale));
  call.per_channel("scale", scale);
  call.like_x("dy", dy);
  call.activation(activation);
  NormArrays arrays{};
  arrays.x = x.untyped_data();
  arrays.residual = call.like_x_or_null("residual", residual);
  arrays.y = call.like_x_or_null("y", y);
  arrays.dy = dy.untyped_data();
  arrays.result = const_cast<void*>(call.like_x_or_null("dx", *dx));
  arrays.dresidual = const_cast<void*>(call.like_x_or_null("dresidual", *dresidual));
  arrays.scale = floats(scale);
  arrays.bias = call.per_channel_or_null("bias", bias);
  arrays.given_mean = call.statistics_or_null("mean", mean);
  arrays.given_mean_low = call.statistics_or_null("mean_low", mean_low);
  arrays.given_rstd = floats(rstd);
  arrays.dmean = call.statistics_or_null("dmean", dmean);
  arrays.dvar = call.statistics_or_null("dvar", dvar);
  arrays.dscale = call.per_channel_or_null("dscale", *dscale);
  arrays.dbias = call.per_channel_or_null("dbias", *dbias);
  NormKey& key = call.key;
  key.centered = arrays.given_mean != nullptr;
  key.frozen = frozen;
  key.residual = arrays.dresidual != nullptr;
  key.needs_dx = arrays.result != nullptr;
  key.needs_sums = arrays.dscale != nullptr || arrays.dbias != nullptr;
  if (key.activation != NormActivation::kNone) {
    call.require(arrays.y == nullptr || key.activation == NormActivation::kRelu, "y is for relu alone");
    if (arrays.residual != nullptr) key.third = NormThird::kResidual;
    if (arrays.y != nullptr) key.third = NormThird::kY;
    call.require(arrays.y != nullptr || arrays.bias != nullptr, "bias or y must be given, with an activation");
  }
  return call.run(stream, arrays, 0, workspace);
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
                           .Attr<int64_t>("activation")
                           .Attr<bool>("frozen"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

#include "cpu/pool/handler.h"

#include "common/checks.h"
#include "common/handler.h"
#include "common/pool_problem.h"
#include "cpu/pool/op.h"
#include "cpu/runtime/storage_dispatch.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;
using Bytes = ffi::Result<ffi::Buffer<ffi::U8>>;
using Axes = ffi::Span<const int64_t>;

// Checks a call and runs it. x, y, like_x: the arrays of these sizes, operands or the result; like_x may be null.
ffi::Error run(const char* target, PoolPass pass, ffi::ThreadPool& pool_of_threads, const Arg& x, const Arg& y,
               const Arg* like_x, const Arg* second, const Arg& result, Bytes& workspace, Axes window, Axes strides,
               Axes padding, Axes dilation, int64_t divisor = 1) {
  Checks checks(target);
  const PoolShape shape = pool_shape(checks, x.dimensions(), y.dimensions(), window, strides, padding, dilation);
  check_like_x(checks, x, y, like_x);
  checks.require(divisor > 0, "divisor must be positive");
  const int64_t bytes = static_cast<int64_t>(workspace->element_count());
  if (checks.failed()) return checks.error();
  return with_storage(checks, x.element_type(), [&](auto element) {
    using S = decltype(element);
    checks.require(bytes >= pool_workspace(pass, shape, sizeof(S), 1), "the workspace is too small");
    if (checks.failed()) return checks.error();
    XlaParallel parallel(pool_of_threads);
    pool(PoolCall<S>{pass, shape, reads_x(pass) ? static_cast<const S*>(x.untyped_data()) : nullptr,
                     second == nullptr ? nullptr : static_cast<const S*>(second->untyped_data()),
                     static_cast<S*>(result.untyped_data()), reinterpret_cast<std::byte*>(workspace->typed_data()),
                     bytes, divisor},
         parallel);
    return ffi::Error::Success();
  });
}

ffi::Error forward(ffi::ThreadPool threads, Arg x, Ret y, Bytes workspace, Axes window, Axes strides, Axes padding,
                   Axes dilation) {
  return run("jaxgrad_cpu_max_pool_forward", PoolPass::kMax, threads, x, *y, nullptr, nullptr, *y, workspace, window,
             strides, padding, dilation);
}

ffi::Error input_gradient(ffi::ThreadPool threads, Arg x, Arg dy, Ret dx, Bytes workspace, Axes window, Axes strides,
                          Axes padding, Axes dilation) {
  return run("jaxgrad_cpu_max_pool_input_gradient", PoolPass::kMaxInputGradient, threads, x, dy, &*dx, &dy, *dx,
             workspace, window, strides, padding, dilation);
}

ffi::Error tangent(ffi::ThreadPool threads, Arg x, Arg dx, Ret dy, Bytes workspace, Axes window, Axes strides,
                   Axes padding, Axes dilation) {
  return run("jaxgrad_cpu_max_pool_tangent", PoolPass::kMaxTangent, threads, x, *dy, &dx, &dx, *dy, workspace, window,
             strides, padding, dilation);
}

ffi::Error sum_forward(ffi::ThreadPool threads, Arg x, Ret y, Bytes workspace, Axes window, Axes strides, Axes padding,
                       Axes dilation, int64_t divisor) {
  return run("jaxgrad_cpu_sum_pool_forward", PoolPass::kSum, threads, x, *y, nullptr, nullptr, *y, workspace, window,
             strides, padding, dilation, divisor);
}

ffi::Error sum_input_gradient(ffi::ThreadPool threads, Arg dy, Ret dx, Bytes workspace, Axes window, Axes strides,
                              Axes padding, Axes dilation, int64_t divisor) {
  return run("jaxgrad_cpu_sum_pool_input_gradient", PoolPass::kSumInputGradient, threads, *dx, dy, nullptr, &dy, *dx,
             workspace, window, strides, padding, dilation, divisor);
}

}  // namespace

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_max_pool_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x  [outer, spatial..., C]
                           .Ret<ffi::AnyBuffer>()        // y  [outer, spatial..., C]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES);

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_max_pool_input_gradient, input_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x   [outer, spatial..., C]
                           .Arg<ffi::AnyBuffer>()        // dy  [outer, spatial..., C]
                           .Ret<ffi::AnyBuffer>()        // dx  like x
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES);

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_max_pool_tangent, tangent,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x   [outer, spatial..., C]
                           .Arg<ffi::AnyBuffer>()        // dx  like x
                           .Ret<ffi::AnyBuffer>()        // dy  [outer, spatial..., C]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES);

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_sum_pool_forward, sum_forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x  [outer, spatial..., C]
                           .Ret<ffi::AnyBuffer>()        // y  [outer, spatial..., C]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES.Attr<int64_t>("divisor"));

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_sum_pool_input_gradient, sum_input_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // dy  [outer, spatial..., C]
                           .Ret<ffi::AnyBuffer>()        // dx  [outer, spatial..., C]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES.Attr<int64_t>("divisor"));

}  // namespace jaxgrad

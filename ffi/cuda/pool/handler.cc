#include "cuda/pool/handler.h"

#include <cstdint>

#include "common/handler.h"
#include "common/pool_problem.h"
#include "cuda/pool/op.h"
#include "cuda/runtime/handler_support.h"
#include "cuda/runtime/retained.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Axes = ffi::Span<const int64_t>;

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Checks a call and launches it. x, y, like_x: the arrays of these sizes, operands or the result; like_x may be null.
ffi::Error run(const char* target, PoolPass pass, CUstream stream, const Arg& x, const Arg& y, const Arg* like_x,
               const Arg* second, const Arg& result, Bytes& workspace, Axes window, Axes strides, Axes padding,
               Axes dilation, int64_t divisor = 1) {
  Checks checks(target);
  const PoolShape shape = pool_shape(checks, x.dimensions(), y.dimensions(), window, strides, padding, dilation);
  check_like_x(checks, x, y, like_x);
  checks.require(divisor > 0, "divisor must be positive");
  const FloatType type = float_type(x.element_type(), checks);
  for (const Arg* array : {&x, &y, like_x})
    checks.require(array == nullptr || is_aligned(array->untyped_data()), "the arrays must be aligned to 16 bytes");
  if (checks.failed()) return checks.error();
  return driver::on_device(stream, [&](int device) {
    const PoolProgram program = pool_program({pass, shape, type, divisor});
    check_workspace(workspace, program.workspace_bytes, checks);
    if (checks.failed()) return checks.error();
    const auto kernels = load_pool_kernels(program, device);
    pool(stream, program, *kernels, pass, reads_x(pass) ? x.untyped_data() : nullptr,
         second == nullptr ? nullptr : second->untyped_data(), result.untyped_data(), workspace->untyped_data());
    if (driver::is_capturing(stream)) retain_for_cuda_graph(kernels);
    return ffi::Error::Success();
  });
}

ffi::Error forward(CUstream stream, Arg x, Ret y, Bytes workspace, Axes window, Axes strides, Axes padding,
                   Axes dilation) {
  return run("jaxgrad_cuda_max_pool_forward", PoolPass::kMax, stream, x, *y, nullptr, nullptr, *y, workspace, window,
             strides, padding, dilation);
}

ffi::Error input_gradient(CUstream stream, Arg x, Arg dy, Ret dx, Bytes workspace, Axes window, Axes strides,
                          Axes padding, Axes dilation) {
  return run("jaxgrad_cuda_max_pool_input_gradient", PoolPass::kMaxInputGradient, stream, x, dy, &*dx, &dy, *dx,
             workspace, window, strides, padding, dilation);
}

ffi::Error tangent(CUstream stream, Arg x, Arg dx, Ret dy, Bytes workspace, Axes window, Axes strides, Axes padding,
                   Axes dilation) {
  return run("jaxgrad_cuda_max_pool_tangent", PoolPass::kMaxTangent, stream, x, *dy, &dx, &dx, *dy, workspace, window,
             strides, padding, dilation);
}

ffi::Error sum_forward(CUstream stream, Arg x, Ret y, Bytes workspace, Axes window, Axes strides, Axes padding,
                       Axes dilation, int64_t divisor) {
  return run("jaxgrad_cuda_sum_pool_forward", PoolPass::kSum, stream, x, *y, nullptr, nullptr, *y, workspace, window,
             strides, padding, dilation, divisor);
}

ffi::Error sum_input_gradient(CUstream stream, Arg dy, Ret dx, Bytes workspace, Axes window, Axes strides, Axes padding,
                              Axes dilation, int64_t divisor) {
  return run("jaxgrad_cuda_sum_pool_input_gradient", PoolPass::kSumInputGradient, stream, *dx, dy, nullptr, &dy, *dx,
             workspace, window, strides, padding, dilation, divisor);
}

}  // namespace

// XLA may capture these calls into a CUDA graph: they use no memory but their buffers, and their attributes and shapes
// determine what they launch.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_max_pool_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x  [outer, spatial..., C]
                           .Ret<ffi::AnyBuffer>()        // y  [outer, spatial..., C]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES,
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_max_pool_input_gradient, input_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x   [outer, spatial..., C]
                           .Arg<ffi::AnyBuffer>()        // dy  [outer, spatial..., C]
                           .Ret<ffi::AnyBuffer>()        // dx  like x
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES,
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_max_pool_tangent, tangent,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x   [outer, spatial..., C]
                           .Arg<ffi::AnyBuffer>()        // dx  like x
                           .Ret<ffi::AnyBuffer>()        // dy  [outer, spatial..., C]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES,
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_sum_pool_forward, sum_forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // x  [outer, spatial..., C]
                           .Ret<ffi::AnyBuffer>()        // y  [outer, spatial..., C]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES.Attr<int64_t>("divisor"),
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_sum_pool_input_gradient, sum_input_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // dy  [outer, spatial..., C]
                           .Ret<ffi::AnyBuffer>()        // dx  [outer, spatial..., C]
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                       JAXGRAD_POOL_ATTRIBUTES.Attr<int64_t>("divisor"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

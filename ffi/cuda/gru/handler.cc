#include "cuda/gru/handler.h"

#include <cmath>
#include <limits>

#include "common/handler.h"
#include "cuda/gru/op.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/handler_support.h"
#include "cuda/runtime/retained.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

struct Sizes {
  int64_t groups, T, D, B, H;
};

// The sizes of a call, from y [G, T, D, B, H].
Sizes sizes_of(Checks& checks, const Arg& y) {
  checks.require(y.dimensions().size() == 5, "y must have rank 5, [groups, T, D, B, H]");
  if (checks.failed()) return {};
  const auto of_y = y.dimensions();
  const Sizes s{of_y[0], of_y[1], of_y[2], of_y[3], of_y[4]};
  checks.require(s.groups > 0 && s.T > 0 && s.B > 0 && s.D > 0 && s.H > 0, "all sizes must be positive");
  if (checks.failed()) return {};
  checks.require(s.D <= 2, "there must be 1 or 2 directions");
  checks.require(gru_padded_hidden(s.H) > 0, "there are too many hidden units");
  checks.require(s.T <= kMax && s.B <= kMax && s.groups <= kMax / (2 * s.B), "the sizes are too large");
  return s;
}

// What both passes have: sizes, options, and the operands that every step may need.
GruArguments arguments_of(Checks& checks, const Sizes& s, ffi::DataType dtype, const Arg& r, const Arg& lens,
                          const Arg& initial_h, const Arg& reset, const Arg& reset_h, int64_t reversed, double clip) {
  checks.require(clip > 0, "clip must be positive");
  checks.require(reversed >= 0 && reversed < 1 << s.D, "reversed must have a bit for each direction");
  checks.array("r", r, dtype, {s.groups, s.D, 3 * s.H, s.H});
  checks.optional_array("sequence_lens", lens, ffi::DataType::S32, {s.groups, s.B});
  checks.optional_array("initial_h", initial_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.optional_array("reset", reset, ffi::DataType::PRED, {s.groups, s.T, s.B});
  checks.optional_array("reset_h", reset_h, dtype, {s.groups, s.D, s.B, s.H});
  GruArguments a{};
  a.steps = static_cast<int>(s.T);
  a.rows = static_cast<int>(s.B);
  a.hidden = static_cast<int>(s.H);
  a.directions = static_cast<int>(s.D);
  a.reversed = static_cast<int>(reversed);
  a.clip = static_cast<float>(clip);
  a.r = r.untyped_data();
  a.lengths = data_or_null<const int>(lens);
  a.initial_h = data_or_null<const void>(initial_h);
  a.reset = data_or_null<const unsigned char>(reset);
  a.reset_h = data_or_null<const void>(reset_h);
  return a;
}

ffi::Error run(Checks& checks, CUstream stream, const Sizes& s, ffi::DataType dtype, bool is_backward,
               bool linear_before_reset, bool allow_tf32, const GruArguments& arguments, Bytes& workspace) {
  GruKey key;
  key.is_backward = is_backward;
  key.type = float_type(dtype, checks);
  key.allow_tf32 = allow_tf32;
  key.linear_before_reset = linear_before_reset;
  key.problems = s.groups * s.D;
  key.rows = s.B;
  key.hidden = s.H;
  key.has_lengths = arguments.lengths != nullptr;
  key.has_resets = arguments.reset != nullptr;
  key.has_reset_h = arguments.reset_h != nullptr;
  key.has_clip = std::isfinite(arguments.clip);
  if (checks.failed()) return checks.error();
  return driver::on_device(stream, [&](int device) {
    key.device = device;
    const GruPlan plan = gru_plan(key);
    check_workspace(workspace, plan.workspace_bytes(), checks);
    if (checks.failed()) return checks.error();
    plan.run(stream, arguments, workspace->untyped_data());
    if (driver::is_capturing(stream)) retain_for_cuda_graph(plan.kernel());
    return ffi::Error::Success();
  });
}

ffi::Error forward(CUstream stream, Arg inputs, Arg r, Arg b, Arg lens, Arg initial_h, Arg reset, Arg reset_h, Ret y,
                   Ret y_h, Ret gates, Bytes workspace, int64_t reversed, bool linear_before_reset, double clip,
                   bool allow_tf32) {
  Checks checks("jaxgrad_cuda_gru_forward");
  const Sizes s = sizes_of(checks, *y);
  if (checks.failed()) return checks.error();
  const ffi::DataType dtype = r.element_type();
  GruArguments a = arguments_of(checks, s, dtype, r, lens, initial_h, reset, reset_h, reversed, clip);
  checks.array("inputs", inputs, ffi::DataType::F32, {s.groups, s.T, s.B, s.D, 3, s.H});
  checks.optional_array("b", b, dtype, {s.groups, s.D, 6 * s.H});
  checks.array("y", *y, dtype, {s.groups, s.T, s.D, s.B, s.H});
  checks.array("y_h", *y_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.optional_array("gates", *gates, dtype, {s.groups, s.T, s.D, s.B, (3 + linear_before_reset) * s.H});
  a.inputs = static_cast<const float*>(inputs.untyped_data());
  a.bias = data_or_null<const void>(b);
  a.y = y->untyped_data();
  a.y_h = y_h->untyped_data();
  a.gates = data_or_null<void>(*gates);
  return run(checks, stream, s, dtype, /*is_backward=*/false, linear_before_reset, allow_tf32, a, workspace);
}

ffi::Error backward(CUstream stream, Arg r, Arg lens, Arg initial_h, Arg reset, Arg reset_h, Arg y, Arg gates, Arg dy,
                    Arg dy_h, Ret dgates, Ret recurrent_dgates, Ret dh0, Ret dreset_h, Bytes workspace,
                    int64_t reversed, bool linear_before_reset, double clip, bool allow_tf32) {
  Checks checks("jaxgrad_cuda_gru_backward");
  const Sizes s = sizes_of(checks, y);
  if (checks.failed()) return checks.error();
  const ffi::DataType dtype = r.element_type();
  GruArguments a = arguments_of(checks, s, dtype, r, lens, initial_h, reset, reset_h, reversed, clip);
  checks.array("y", y, dtype, {s.groups, s.T, s.D, s.B, s.H});
  checks.array("gates", gates, dtype, {s.groups, s.T, s.D, s.B, (3 + linear_before_reset) * s.H});
  checks.optional_array("dy", dy, dtype, {s.groups, s.T, s.D, s.B, s.H});
  checks.optional_array("dy_h", dy_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.array("dgates", *dgates, dtype, {s.groups, s.T, s.B, s.D, 3, s.H});
  const bool has_recurrent_dgates = recurrent_dgates->element_count() > 0;
  checks.require(!has_recurrent_dgates || linear_before_reset, "recurrent_dgates need linear_before_reset");
  checks.optional_array("recurrent_dgates", *recurrent_dgates, dtype, {s.groups, s.T, s.B, s.D, 3, s.H});
  checks.optional_array("dh0", *dh0, ffi::DataType::F32, {s.groups, s.D, s.B, s.H});
  checks.optional_array("dreset_h", *dreset_h, ffi::DataType::F32, {s.groups, s.D, s.B, s.H});
  const bool has_dreset_h = dreset_h->element_count() > 0;
  checks.require(!has_dreset_h || reset_h.element_count() > 0, "dreset_h needs reset_h");
  a.y = y.untyped_data();
  a.gates = gates.untyped_data();
  a.dy = data_or_null<const void>(dy);
  a.dy_h = data_or_null<const void>(dy_h);
  a.dgates = dgates->untyped_data();
  a.recurrent_dgates = data_or_null<void>(*recurrent_dgates);
  a.dh0 = data_or_null<float>(*dh0);
  a.dreset_h = data_or_null<float>(*dreset_h);
  return run(checks, stream, s, dtype, /*is_backward=*/true, linear_before_reset, allow_tf32, a, workspace);
}

}  // namespace

// XLA may capture these calls into a CUDA graph: they use no memory but their buffers, and their attributes and shapes
// determine what they launch.
JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_gru_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // inputs          [G, T, B, D, 3, H] of float32
                           .Arg<ffi::AnyBuffer>()        // r               [G, D, 3H, H]
                           .Arg<ffi::AnyBuffer>()        // b               [G, D, 6H] or empty
                           .Arg<ffi::AnyBuffer>()        // lens            [G, B] of int32, or empty
                           .Arg<ffi::AnyBuffer>()        // initial_h       [G, D, B, H] or empty
                           .Arg<ffi::AnyBuffer>()        // reset           [G, T, B] of bool, or empty
                           .Arg<ffi::AnyBuffer>()        // reset_h         [G, D, B, H] or empty
                           .Ret<ffi::AnyBuffer>()        // y               [G, T, D, B, H]
                           .Ret<ffi::AnyBuffer>()        // y_h             [G, D, B, H]
                           .Ret<ffi::AnyBuffer>()        // gates           [G, T, D, B, 3H or 4H] or empty
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace       of gru_variant()
                           .Attr<int64_t>("reversed")    // bit d: direction d runs from the last step
                           .Attr<bool>("linear_before_reset")
                           .Attr<double>("clip")  // infinity: no clipping
                           .Attr<bool>("allow_tf32"),
                       {ffi::Traits::kCmdBufferCompatible});

JAXGRAD_DEFINE_HANDLER(jaxgrad_cuda_gru_backward, backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Arg<ffi::AnyBuffer>()        // r               [G, D, 3H, H]
                           .Arg<ffi::AnyBuffer>()        // lens            [G, B] of int32, or empty
                           .Arg<ffi::AnyBuffer>()        // initial_h       [G, D, B, H] or empty
                           .Arg<ffi::AnyBuffer>()        // reset           [G, T, B] of bool, or empty
                           .Arg<ffi::AnyBuffer>()        // reset_h         [G, D, B, H] or empty
                           .Arg<ffi::AnyBuffer>()        // y               [G, T, D, B, H]
                           .Arg<ffi::AnyBuffer>()        // gates           [G, T, D, B, 3H or 4H]
                           .Arg<ffi::AnyBuffer>()        // dy              [G, T, D, B, H] or empty
                           .Arg<ffi::AnyBuffer>()        // dy_h            [G, D, B, H] or empty
                           .Ret<ffi::AnyBuffer>()        // dgates          [G, T, B, D, 3, H]
                           .Ret<ffi::AnyBuffer>()        // recurrent_dgates  as dgates, or empty
                           .Ret<ffi::AnyBuffer>()        // dh0             [G, D, B, H] of float32, or empty
                           .Ret<ffi::AnyBuffer>()        // dreset_h        [G, D, B, H] of float32, or empty
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace       of gru_variant()
                           .Attr<int64_t>("reversed")
                           .Attr<bool>("linear_before_reset")
                           .Attr<double>("clip")
                           .Attr<bool>("allow_tf32"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxgrad

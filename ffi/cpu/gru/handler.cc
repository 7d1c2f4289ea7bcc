#include "cpu/gru/handler.h"

#include <string>
#include <utility>

#include "common/checks.h"
#include "common/handler.h"
#include "cpu/gru/op.h"
#include "cpu/runtime/storage_dispatch.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Bytes = ffi::Result<ffi::Buffer<ffi::U8>>;
using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;

// The sizes of a call, from x and r.
GruShape shape_of(Checks& checks, const Arg& x, const Arg& r, bool linear_before_reset, bool batch_major) {
  checks.require(x.dimensions().size() == 4, "x must have rank 4, [G, T, B, I] or [G, B, T, I]");
  checks.require(r.dimensions().size() == 4, "r must have rank 4, [G, D, 3H, H]");
  if (checks.failed()) return {};
  const auto in = x.dimensions(), weights = r.dimensions();
  GruShape shape{in[1], in[2], in[3], weights[3], weights[1], linear_before_reset, in[0]};
  shape.batch_major = batch_major;
  if (batch_major) std::swap(shape.T, shape.B);
  checks.require(gru_sizes_fit(shape), "G, I and H must be positive, and the arrays must have fewer than 2^63 bytes");
  return shape;
}

// The dimensions of x and dx before I, and of y and dy before H, without that of the groups.
struct Order {
  int64_t inputs[2], states[3];
};
Order order_of(const GruShape& s) {
  if (s.batch_major) return {{s.B, s.T}, {s.B, s.T, s.D}};
  return {{s.T, s.B}, {s.T, s.D, s.B}};
}

GruOptions options_of(Checks& checks, const GruShape& shape, int64_t direction, double clip) {
  checks.require(direction >= 0 && direction <= 2, "direction must be 0, 1 or 2");
  const int64_t directions = direction == static_cast<int64_t>(GruDirection::kBidirectional) ? 2 : 1;
  checks.require(shape.D == directions, [&] { return "r must have " + std::to_string(directions) + " direction(s)"; });
  checks.require(clip > 0, "clip must be positive");
  return {static_cast<GruDirection>(direction), clip};
}

// The sequence lengths, or null if every row has all T steps.
const int32_t* lengths_of(Checks& checks, const GruShape& shape, const Arg& lens) {
  checks.optional_array("sequence_lens", lens, ffi::DataType::S32, {shape.groups, shape.B});
  if (checks.failed() || lens.element_count() == 0) return nullptr;
  const int32_t* values = static_cast<const int32_t*>(lens.untyped_data());
  bool all_full = true;
  for (int64_t i = 0; i < shape.groups * shape.B; ++i) {
    checks.require(values[i] >= 0 && values[i] <= shape.T, [&] {
      return "sequence_lens must lie in [0, T] = [0, " + std::to_string(shape.T) + "], got " +
             std::to_string(values[i]) + " for row " + std::to_string(i % shape.B);
    });
    all_full = all_full && values[i] == shape.T;
  }
  return all_full ? nullptr : values;
}

ffi::Error forward(ffi::ThreadPool pool, Arg x, Arg w, Arg r, Arg b, Arg lens, Arg initial_h, Arg reset, Arg reset_h,
                   Ret y, Ret y_h, Ret gates, Bytes workspace, int64_t direction, bool linear_before_reset,
                   bool batch_major, double clip) {
  Checks checks("jaxgrad_cpu_gru_forward");
  const GruShape s = shape_of(checks, x, r, linear_before_reset, batch_major);
  const GruOptions options = options_of(checks, s, direction, clip);
  if (checks.failed()) return checks.error();
  const ffi::DataType dtype = x.element_type();
  const auto& [inputs, states] = order_of(s);
  checks.array("w", w, dtype, {s.groups, s.D, 3 * s.H, s.I});
  checks.array("r", r, dtype, {s.groups, s.D, 3 * s.H, s.H});
  checks.optional_array("b", b, dtype, {s.groups, s.D, 6 * s.H});
  checks.optional_array("initial_h", initial_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.optional_array("reset", reset, ffi::DataType::PRED, {s.groups, s.T, s.B});
  checks.optional_array("reset_h", reset_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.array("y", *y, dtype, {s.groups, states[0], states[1], states[2], s.H});
  checks.array("y_h", *y_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.optional_array("gates", *gates, dtype, {s.groups, s.T, s.D, s.B, s.saved_gates() * s.H});
  const int32_t* lengths = lengths_of(checks, s, lens);
  if (checks.failed()) return checks.error();
  return with_storage(checks, dtype, [&](auto element) {
    using S = decltype(element);
    checks.require(workspace->element_count() >= static_cast<size_t>(gru_forward_workspace(s, sizeof(S))),
                   "the workspace is too small");
    if (checks.failed()) return checks.error();
    XlaParallel parallel(pool);
    gru_forward(
        GruForward<S>{s, options, static_cast<const S*>(x.untyped_data()), static_cast<const S*>(w.untyped_data()),
                      static_cast<const S*>(r.untyped_data()), data_or_null<S>(b), lengths, data_or_null<S>(initial_h),
                      data_or_null<const uint8_t>(reset), data_or_null<S>(reset_h), static_cast<S*>(y->untyped_data()),
                      static_cast<S*>(y_h->untyped_data()), data_or_null<S>(*gates),
                      reinterpret_cast<std::byte*>(workspace->typed_data())},
        parallel);
    return ffi::Error::Success();
  });
}

ffi::Error backward(ffi::ThreadPool pool, Arg x, Arg w, Arg r, Arg lens, Arg initial_h, Arg reset, Arg reset_h, Arg y,
                    Arg gates, Arg dy, Arg dy_h, Ret dx, Ret dw, Ret dr, Ret db, Ret dh0, Ret dreset_h, Bytes workspace,
                    int64_t direction, bool linear_before_reset, bool batch_major, double clip) {
  Checks checks("jaxgrad_cpu_gru_backward");
  GruShape s = shape_of(checks, x, r, linear_before_reset, batch_major);
  s.shares_weights = !checks.failed() && r.dimensions()[0] == 1;
  const GruOptions options = options_of(checks, s, direction, clip);
  if (checks.failed()) return checks.error();
  const ffi::DataType dtype = x.element_type();
  const auto& [inputs, states] = order_of(s);
  const int64_t weight_groups = s.shares_weights ? 1 : s.groups;
  checks.array("w", w, dtype, {weight_groups, s.D, 3 * s.H, s.I});
  checks.array("r", r, dtype, {weight_groups, s.D, 3 * s.H, s.H});
  checks.optional_array("initial_h", initial_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.optional_array("reset", reset, ffi::DataType::PRED, {s.groups, s.T, s.B});
  checks.optional_array("reset_h", reset_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.array("y", y, dtype, {s.groups, states[0], states[1], states[2], s.H});
  checks.array("gates", gates, dtype, {s.groups, s.T, s.D, s.B, s.saved_gates() * s.H});
  checks.optional_array("dy", dy, dtype, {s.groups, states[0], states[1], states[2], s.H});
  checks.optional_array("dy_h", dy_h, dtype, {s.groups, s.D, s.B, s.H});
  checks.optional_array("dx", *dx, dtype, {s.groups, inputs[0], inputs[1], s.I});
  checks.optional_array("dw", *dw, dtype, {s.groups, s.D, 3 * s.H, s.I});
  checks.optional_array("dr", *dr, dtype, {s.groups, s.D, 3 * s.H, s.H});
  checks.optional_array("db", *db, dtype, {s.groups, s.D, 6 * s.H});
  checks.optional_array("dh0", *dh0, dtype, {s.groups, s.D, s.B, s.H});
  checks.optional_array("dreset_h", *dreset_h, dtype, {s.groups, s.D, s.B, s.H});
  const int32_t* lengths = lengths_of(checks, s, lens);
  if (checks.failed()) return checks.error();
  return with_storage(checks, dtype, [&](auto element) {
    using S = decltype(element);
    checks.require(workspace->element_count() >= static_cast<size_t>(gru_backward_workspace(s, sizeof(S))),
                   "the workspace is too small");
    if (checks.failed()) return checks.error();
    XlaParallel parallel(pool);
    gru_backward(GruBackward<S>{s,
                                options,
                                static_cast<const S*>(x.untyped_data()),
                                static_cast<const S*>(w.untyped_data()),
                                static_cast<const S*>(r.untyped_data()),
                                lengths,
                                data_or_null<S>(initial_h),
                                data_or_null<const uint8_t>(reset),
                                data_or_null<S>(reset_h),
                                static_cast<const S*>(y.untyped_data()),
                                static_cast<const S*>(gates.untyped_data()),
                                data_or_null<S>(dy),
                                data_or_null<S>(dy_h),
                                data_or_null<S>(*dx),
                                data_or_null<S>(*dw),
                                data_or_null<S>(*dr),
                                data_or_null<S>(*db),
                                data_or_null<S>(*dh0),
                                data_or_null<S>(*dreset_h),
                                reinterpret_cast<std::byte*>(workspace->typed_data())},
                 parallel);
    return ffi::Error::Success();
  });
}

}  // namespace

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_gru_forward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x          [G, T, B, I], batch-major [G, B, T, I]
                           .Arg<ffi::AnyBuffer>()        // w          [G, D, 3H, I]
                           .Arg<ffi::AnyBuffer>()        // r          [G, D, 3H, H]
                           .Arg<ffi::AnyBuffer>()        // b          [G, D, 6H] or empty
                           .Arg<ffi::AnyBuffer>()        // lens       [G, B] of int32, or empty
                           .Arg<ffi::AnyBuffer>()        // initial_h  [G, D, B, H] or empty
                           .Arg<ffi::AnyBuffer>()        // reset      [G, T, B] of bool, or empty
                           .Arg<ffi::AnyBuffer>()        // reset_h    [G, D, B, H] or empty
                           .Ret<ffi::AnyBuffer>()        // y          [G, T, D, B, H], batch-major [G, B, T, D, H]
                           .Ret<ffi::AnyBuffer>()        // y_h        [G, D, B, H]
                           .Ret<ffi::AnyBuffer>()        // gates      [G, T, D, B, 3H or 4H] or empty
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("direction")   // GruDirection
                           .Attr<bool>("linear_before_reset")
                           .Attr<bool>("batch_major")
                           .Attr<double>("clip"));  // infinity: no clipping

JAXGRAD_DEFINE_HANDLER(jaxgrad_cpu_gru_backward, backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()        // x          [G, T, B, I], batch-major [G, B, T, I]
                           .Arg<ffi::AnyBuffer>()        // w          [G or 1, D, 3H, I]
                           .Arg<ffi::AnyBuffer>()        // r          [G or 1, D, 3H, H]
                           .Arg<ffi::AnyBuffer>()        // lens       [G, B] of int32, or empty
                           .Arg<ffi::AnyBuffer>()        // initial_h  [G, D, B, H] or empty
                           .Arg<ffi::AnyBuffer>()        // reset      [G, T, B] of bool, or empty
                           .Arg<ffi::AnyBuffer>()        // reset_h    [G, D, B, H] or empty
                           .Arg<ffi::AnyBuffer>()        // y          [G, T, D, B, H], batch-major [G, B, T, D, H]
                           .Arg<ffi::AnyBuffer>()        // gates      [G, T, D, B, 3H or 4H]
                           .Arg<ffi::AnyBuffer>()        // dy         as y, or empty
                           .Arg<ffi::AnyBuffer>()        // dy_h       [G, D, B, H] or empty
                           .Ret<ffi::AnyBuffer>()        // dx         as x, or empty
                           .Ret<ffi::AnyBuffer>()        // dw         [G, D, 3H, I] or empty
                           .Ret<ffi::AnyBuffer>()        // dr         [G, D, 3H, H] or empty
                           .Ret<ffi::AnyBuffer>()        // db         [G, D, 6H] or empty
                           .Ret<ffi::AnyBuffer>()        // dh0        [G, D, B, H] or empty
                           .Ret<ffi::AnyBuffer>()        // dreset_h   [G, D, B, H] or empty
                           .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                           .Attr<int64_t>("direction")   // GruDirection
                           .Attr<bool>("linear_before_reset")
                           .Attr<bool>("batch_major")
                           .Attr<double>("clip"));  // infinity: no clipping

}  // namespace jaxgrad

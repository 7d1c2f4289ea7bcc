#include "cpu/conv/handler.h"

#include <algorithm>
#include <exception>
#include <string>

#include "common/checks.h"
#include "common/conv_attributes.h"
#include "cpu/runtime/onednn_threads.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;
using Bytes = ffi::Result<ffi::Buffer<ffi::U8>>;

// Below this many multiplications, waking other threads costs more than it gains.
constexpr double kWorthATeam = 1 << 22;

double multiplications(const ConvKey& key) {
  double found = static_cast<double>(key.y.sizes[0]);
  for (int axis = 1; axis < key.spatial + 2; ++axis)
    found *= static_cast<double>(key.w.sizes[axis]) * static_cast<double>(key.y.sizes[axis]);
  return found;
}

// Examples are shared out among threads that work alone, unless they are few and each is worth a team.
void share_out(ConvWork& work) {
  const double one = multiplications(work.key);
  const int team = onednn::team_size();
  work.key.threads = work.examples < team && one >= kWorthATeam ? team : 1;
  const bool shared = work.key.threads == 1 && one * static_cast<double>(work.examples) >= kWorthATeam;
  work.workers = shared ? std::min<int64_t>(work.examples, team) : 1;
}

bool has_examples(const ConvCall& call) { return call.w.size() == call.rhs_spec.size() + 1; }

// Takes the examples off the shapes, where there are any; says whether there are as many of x, w and y.
bool take_examples(ConvCall& call, int64_t& examples) {
  if (!has_examples(call)) return true;
  examples = call.w.front();
  auto take = [&](std::vector<int64_t>& shape, const std::vector<int64_t>& spec) {
    if (examples < 1 || shape.empty() || shape.front() % examples != 0) return false;
    shape.front() /= examples;
    if (shape.size() != spec.size() + 1) return spec.front() == 0;  // they are the slower part of the batch
    const bool axis_of_its_own = shape.front() == 1;
    shape.erase(shape.begin());
    return axis_of_its_own;
  };
  return take(call.w, call.rhs_spec) && take(call.x, call.lhs_spec) && take(call.y, call.out_spec);
}

ConvArray<std::byte> array(const Arg& buffer, const ConvWork& work) {
  return {static_cast<std::byte*>(buffer.untyped_data()), static_cast<int64_t>(buffer.size_bytes()) / work.examples};
}

ConvArray<const std::byte> operand(const Arg& buffer, const ConvWork& work) {
  const auto found = array(buffer, work);
  return {found.data, found.bytes};
}

ffi::Error run(ffi::ThreadPool& pool, ConvKind kind, const Arg& first, const Arg& second, const Arg* bias,
               const Arg& result, Bytes& workspace, const ConvCall& call) {
  Checks checks("jaxgrad_conv");
  const ffi::DataType dtype = first.element_type();
  checks.that(dtype == ffi::DataType::F32 || dtype == ffi::DataType::BF16, "operands must be of f32 or bf16");
  checks.that(second.element_type() == dtype && result.element_type() == dtype, "all arrays must have one dtype");
  const ConvType type = dtype == ffi::DataType::BF16 ? ConvType::kBFloat16 : ConvType::kFloat32;
  const bool has_bias = bias != nullptr && bias->element_count() > 0;
  std::string problem;
  const ConvWork work = conv_work(kind, type, has_bias, call, problem);
  checks.that(problem.empty(), problem);
  if (checks.failed()) return checks.error();
  const int64_t features = work.key.w.sizes[0];
  if (has_bias && has_examples(call))
    checks.array("bias", *bias, dtype, {work.examples, features});
  else if (has_bias)
    checks.array("bias", *bias, dtype, {features});
  if (checks.failed()) return checks.error();
  try {
    const auto plan = conv_plan(work.key);
    checks.that(static_cast<int64_t>(workspace->element_count()) >= work.workers * plan->workspace_bytes(),
                "the workspace is too small: was the program compiled for another processor?");
    if (checks.failed()) return checks.error();
    const ConvArrays arrays{operand(first, work), operand(second, work),
                            has_bias ? array(*bias, work) : ConvArray<std::byte>{nullptr, 0}, array(result, work)};
    XlaParallel parallel(pool);
    run_conv(*plan, work, arrays, reinterpret_cast<std::byte*>(workspace->typed_data()), parallel);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

ffi::Error forward(ffi::ThreadPool pool, Arg x, Arg w, Arg bias, Ret y, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                   Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  const ConvCall call = conv_call(x, w, *y, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  return run(pool, ConvKind::kForward, x, w, &bias, *y, workspace, call);
}

ffi::Error backward_input(ffi::ThreadPool pool, Arg dy, Arg w, Ret dx, Bytes workspace, Axes lhs_spec, Axes rhs_spec,
                          Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  const ConvCall call = conv_call(*dx, w, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  return run(pool, ConvKind::kBackwardInput, dy, w, nullptr, *dx, workspace, call);
}

ffi::Error backward_filter(ffi::ThreadPool pool, Arg x, Arg dy, Ret dw, Ret db, Bytes workspace, Axes lhs_spec,
                           Axes rhs_spec, Axes out_spec, Axes strides, Axes padding, Axes dilation, int64_t groups) {
  const ConvCall call = conv_call(x, *dw, dy, lhs_spec, rhs_spec, out_spec, strides, padding, dilation, groups);
  return run(pool, ConvKind::kBackwardFilter, x, dy, &*db, *dw, workspace, call);
}

}  // namespace

ConvWork conv_work(ConvKind kind, ConvType type, bool has_bias, ConvCall call, std::string& problem) {
  ConvWork work{};
  if (!take_examples(call, work.examples)) {
    problem = "x, w and y must be of as many examples, at least one";
    return work;
  }
  static_cast<ConvShape&>(work.key) = conv_shape(kind, call, problem);
  work.key.type = type;
  work.key.has_bias = has_bias;
  if (problem.empty()) share_out(work);
  return work;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_conv_forward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()        // x     as lhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // w     as rhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // bias  [output features] or none
                                  .Ret<ffi::AnyBuffer>()        // y     as out_spec says
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_conv_backward_input, backward_input,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()        // dy    as out_spec says
                                  .Arg<ffi::AnyBuffer>()        // w     as rhs_spec says
                                  .Ret<ffi::AnyBuffer>()        // dx    as lhs_spec says
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgrad_conv_backward_filter, backward_filter,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()        // x     as lhs_spec says
                                  .Arg<ffi::AnyBuffer>()        // dy    as out_spec says
                                  .Ret<ffi::AnyBuffer>()        // dw    as rhs_spec says
                                  .Ret<ffi::AnyBuffer>()        // db    [output features] or none
                                  .Ret<ffi::Buffer<ffi::U8>>()  // workspace
                              JAXGRAD_CONV_LAYOUT);

}  // namespace jaxgrad

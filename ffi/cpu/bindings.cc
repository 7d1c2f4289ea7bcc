// The Python module jaxgrad._cpu: the FFI handlers, and the functions that Python calls while it lowers a call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "common/checked_int.h"
#include "common/conv_bindings.h"
#include "common/module_bindings.h"
#include "common/pool_problem.h"
#include "cpu/conv/handler.h"
#include "cpu/conv/op.h"
#include "cpu/depthwise/handler.h"
#include "cpu/depthwise/problem.h"
#include "cpu/gru/handler.h"
#include "cpu/gru/op.h"
#include "cpu/norm/handler.h"
#include "cpu/norm/op.h"
#include "cpu/pool/handler.h"
#include "cpu/pool/op.h"
#include "cpu/runtime/isa.h"
#include "cpu/runtime/onednn.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

nb::dict registrations() {
  nb::dict targets;
  targets["jaxgrad_cpu_gru_forward"] = handler_capsule(jaxgrad_cpu_gru_forward);
  targets["jaxgrad_cpu_gru_backward"] = handler_capsule(jaxgrad_cpu_gru_backward);
  targets["jaxgrad_cpu_depthwise_forward"] = handler_capsule(jaxgrad_cpu_depthwise_forward);
  targets["jaxgrad_cpu_depthwise_input_gradient"] = handler_capsule(jaxgrad_cpu_depthwise_input_gradient);
  targets["jaxgrad_cpu_depthwise_weight_gradient"] = handler_capsule(jaxgrad_cpu_depthwise_weight_gradient);
  targets["jaxgrad_cpu_max_pool_forward"] = handler_capsule(jaxgrad_cpu_max_pool_forward);
  targets["jaxgrad_cpu_max_pool_input_gradient"] = handler_capsule(jaxgrad_cpu_max_pool_input_gradient);
  targets["jaxgrad_cpu_max_pool_tangent"] = handler_capsule(jaxgrad_cpu_max_pool_tangent);
  targets["jaxgrad_cpu_sum_pool_forward"] = handler_capsule(jaxgrad_cpu_sum_pool_forward);
  targets["jaxgrad_cpu_sum_pool_input_gradient"] = handler_capsule(jaxgrad_cpu_sum_pool_input_gradient);
  targets["jaxgrad_cpu_norm_statistics"] = handler_capsule(jaxgrad_cpu_norm_statistics);
  targets["jaxgrad_cpu_norm_normalize"] = handler_capsule(jaxgrad_cpu_norm_normalize);
  targets["jaxgrad_cpu_norm_forward"] = handler_capsule(jaxgrad_cpu_norm_forward);
  targets["jaxgrad_cpu_norm_backward"] = handler_capsule(jaxgrad_cpu_norm_backward);
  targets["jaxgrad_onednn_conv_forward"] = handler_capsule(jaxgrad_onednn_conv_forward);
  targets["jaxgrad_onednn_conv_input_gradient"] = handler_capsule(jaxgrad_onednn_conv_input_gradient);
  targets["jaxgrad_onednn_conv_weight_gradient"] = handler_capsule(jaxgrad_onednn_conv_weight_gradient);
  return targets;
}

nb::dict build_info() {
  nb::dict info;
  info["ffi_api"] = ffi_api_version().c_str();
  info["compiler"] = __VERSION__;
  info["instruction_set"] = isa_name();
  info["onednn"] = onednn::version().c_str();
  return info;
}

// The version, thread runtime and path of a library, by its path or name.
nb::tuple describe_onednn(const std::string& path_or_name) {
  const onednn::Library found = onednn::open(path_or_name);
  const char* threads = found.threads == onednn::ThreadRuntime::kOpenMP ? "OpenMP"
                        : found.threads == onednn::ThreadRuntime::kTbb  ? "TBB"
                                                                        : "sequential";
  return nb::make_tuple(nb::make_tuple(found.version[0], found.version[1], found.version[2]), threads,
                        found.path.c_str());
}

template <int64_t (*kWorkspace)(const GruShape&, int64_t)>
int64_t gru_workspace(int64_t groups, int64_t T, int64_t B, int64_t I, int64_t H, int64_t D, bool linear_before_reset,
                      int64_t storage_bytes) {
  const GruShape shape{T, B, I, H, D, linear_before_reset, groups};
  if (!gru_sizes_fit(shape))
    throw nb::value_error("groups, I and H must be positive, and the arrays must have fewer than 2^63 bytes");
  return kWorkspace(shape, storage_bytes);
}

int64_t norm_workspace_bytes(int64_t S, int64_t O, int64_t C, int64_t I, int64_t G, int64_t K, int64_t storage_bytes) {
  constexpr int64_t kPadding = 1 << 10;  // no axis of the workspace is padded by more
  const CheckedInt sample = (CheckedInt(O) + kPadding) * (CheckedInt(C) + kPadding) * (CheckedInt(I) + kPadding);
  if ((CheckedInt(S) * sample * 64).overflowed()) throw nb::value_error("the arrays must have fewer than 2^57 bytes");
  if (S < 1 || O < 1 || C < 1 || I < 1 || G < 1 || K < 1 || C % G != 0 || S % K != 0)
    throw nb::value_error("the sizes must be positive, C a multiple of G, and S one of K");
  return norm_workspace(NormShape{S, O, C, I, G, K}, storage_bytes);
}

// Builds the plan that the call will run. Returns (bytes of workspace, name of the kernel), or None if oneDNN
// has no kernel. With an axis of independent problems, the workspace is that of the whole call.
nb::object plan_of(int64_t conv_pass, bool bfloat16, bool has_bias, const ConvShapes& shapes, const nb::dict& layout) {
  const ConvArguments arguments = conv_arguments(shapes, layout);
  const ConvType type = bfloat16 ? ConvType::kBFloat16 : ConvType::kFloat32;
  std::string error;
  const ConvSchedule schedule = make_conv_schedule(static_cast<ConvPass>(conv_pass), type, has_bias, arguments, error);
  if (!error.empty()) throw nb::value_error(error.c_str());
  try {
    std::shared_ptr<const ConvPlan> plan;
    {
      const nb::gil_scoped_release release;
      plan = conv_plan(schedule.key);
    }
    return nb::make_tuple(conv_workspace(*plan, schedule), plan->implementation());
  } catch (const onednn::Error& exception) {
    if (exception.status == dnnl_unimplemented) return nb::none();
    throw;
  }
}

int64_t depthwise_workspace_bytes(int64_t conv_pass, const ConvShapes& shapes, const nb::dict& layout) {
  const int64_t threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
  std::string error;
  const auto pass = static_cast<ConvPass>(conv_pass);
  const DepthwiseProblem problem = make_depthwise_problem(pass, conv_arguments(shapes, layout), threads, error);
  if (!error.empty()) throw nb::value_error(error.c_str());
  return depthwise_workspace(pass, problem.shape, problem.copies(), threads);
}

int64_t pool_workspace_bytes(int64_t pool_pass, const std::vector<int64_t>& x, const std::vector<int64_t>& y,
                             const std::vector<int64_t>& window, const std::vector<int64_t>& strides,
                             const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
                             int64_t storage_bytes) {
  if (pool_pass < 0 || pool_pass >= kPoolPasses) throw nb::value_error("pool_pass is unknown");
  const auto span = [](const std::vector<int64_t>& sizes) { return Sizes(sizes.data(), sizes.size()); };
  Checks checks("pool_workspace");
  const PoolShape shape =
      pool_shape(checks, span(x), span(y), span(window), span(strides), span(padding), span(dilation));
  if (checks.failed()) throw nb::value_error(checks.error().message().c_str());
  const int64_t threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return pool_workspace(static_cast<PoolPass>(pool_pass), shape, storage_bytes, threads);
}

nb::dict plan_cache_info() { return as_dict(conv_plan_cache_info()); }

}  // namespace

NB_MODULE(_cpu, module) {
  module.doc() = "CPU kernels of jaxgrad for the XLA FFI.";
  module.def("registrations", &registrations, "The FFI handlers, by target name.");
  module.def("build_info", &build_info,
             "FFI API version, compiler, the instruction set in use and the oneDNN version.");
  module.def("isa_error", &isa_error, "The error in JAXGRAD_CPU_ISA; empty if the variable is valid or not set.");
  module.def("describe_onednn", &describe_onednn, nb::arg("path_or_name"),
             "Opens a oneDNN without using it: (version, thread runtime, path); raises RuntimeError as load_onednn.");
  module.def("load_onednn", &onednn::load, nb::arg("path"), "Opens oneDNN; raises RuntimeError if it cannot be used.");
  module.def("conv_plan", &plan_of, nb::arg("conv_pass"), nb::arg("bfloat16"), nb::arg("has_bias"), nb::arg("shapes"),
             nb::arg("layout"), "Builds a convolution plan; returns (bytes of workspace, name of the kernel) or None.");
  module.def("conv_plan_cache_info", &plan_cache_info, "Hits, misses, size and capacity of the plan cache.");
  module.def("clear_caches", &clear_conv_plan_cache, "Frees the cached plans and the primitives that oneDNN keeps.");
  module.def("depthwise_workspace", &depthwise_workspace_bytes, nb::arg("conv_pass"), nb::arg("shapes"),
             nb::arg("layout"), "Bytes of workspace of a depthwise convolution pass with the threads of this machine.");
  module.def("gru_forward_workspace", &gru_workspace<gru_forward_workspace>, "Bytes of workspace of a forward call.");
  module.def("gru_backward_workspace", &gru_workspace<gru_backward_workspace>,
             "Bytes of workspace of a backward call.");
  module.def("pool_workspace", &pool_workspace_bytes, nb::arg("pool_pass"), nb::arg("x"), nb::arg("y"),
             nb::arg("window"), nb::arg("strides"), nb::arg("padding"), nb::arg("dilation"), nb::arg("storage_bytes"),
             "Bytes of workspace of a pooling pass with the threads of this machine.");
  module.def("norm_workspace", &norm_workspace_bytes, nb::arg("S"), nb::arg("O"), nb::arg("C"), nb::arg("I"),
             nb::arg("G"), nb::arg("K"), nb::arg("storage_bytes"),
             "Bytes of workspace of any call of the norm family.");
}

}  // namespace jaxgrad

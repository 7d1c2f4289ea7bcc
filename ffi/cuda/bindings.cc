// The Python module jaxgrad._cuda: the FFI handlers, and the functions that Python calls while it lowers a call.
#include "cuda/depthwise/bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/conv_bindings.h"
#include "common/module_bindings.h"
#include "cuda/conv_reference/kernel_source.h"
#include "cuda/conv_reference/op.h"
#include "cuda/cudnn_batch_norm/handler.h"
#include "cuda/cudnn_batch_norm/op.h"
#include "cuda/cudnn_conv/engine_check.h"
#include "cuda/cudnn_conv/handler.h"
#include "cuda/cudnn_conv/op.h"
#include "cuda/cudnn_conv/plan_store.h"
#include "cuda/depthwise/handler.h"
#include "cuda/gru/bindings.h"
#include "cuda/gru/handler.h"
#include "cuda/norm/bindings.h"
#include "cuda/norm/handler.h"
#include "cuda/pool/bindings.h"
#include "cuda/pool/handler.h"
#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/device_caches.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/nvrtc.h"
#include "cuda/runtime/retained.h"
#include "cuda/transpose/kernel_source.h"
#include "cuda/transpose/op.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

nb::dict registrations() {
  nb::dict targets;
  targets["jaxgrad_cudnn_batch_norm_forward"] = handler_capsule(jaxgrad_cudnn_batch_norm_forward);
  targets["jaxgrad_cudnn_batch_norm_backward"] = handler_capsule(jaxgrad_cudnn_batch_norm_backward);
  targets["jaxgrad_cudnn_conv_forward"] = handler_capsule(jaxgrad_cudnn_conv_forward);
  targets["jaxgrad_cudnn_conv_input_gradient"] = handler_capsule(jaxgrad_cudnn_conv_input_gradient);
  targets["jaxgrad_cudnn_conv_weight_gradient"] = handler_capsule(jaxgrad_cudnn_conv_weight_gradient);
  targets["jaxgrad_cuda_depthwise_forward"] = handler_capsule(jaxgrad_cuda_depthwise_forward);
  targets["jaxgrad_cuda_depthwise_input_gradient"] = handler_capsule(jaxgrad_cuda_depthwise_input_gradient);
  targets["jaxgrad_cuda_depthwise_weight_gradient"] = handler_capsule(jaxgrad_cuda_depthwise_weight_gradient);
  targets["jaxgrad_cuda_gru_forward"] = handler_capsule(jaxgrad_cuda_gru_forward);
  targets["jaxgrad_cuda_gru_backward"] = handler_capsule(jaxgrad_cuda_gru_backward);
  targets["jaxgrad_cuda_norm_forward"] = handler_capsule(jaxgrad_cuda_norm_forward);
  targets["jaxgrad_cuda_norm_statistics"] = handler_capsule(jaxgrad_cuda_norm_statistics);
  targets["jaxgrad_cuda_norm_normalize"] = handler_capsule(jaxgrad_cuda_norm_normalize);
  targets["jaxgrad_cuda_norm_backward"] = handler_capsule(jaxgrad_cuda_norm_backward);
  targets["jaxgrad_cuda_max_pool_forward"] = handler_capsule(jaxgrad_cuda_max_pool_forward);
  targets["jaxgrad_cuda_max_pool_input_gradient"] = handler_capsule(jaxgrad_cuda_max_pool_input_gradient);
  targets["jaxgrad_cuda_max_pool_tangent"] = handler_capsule(jaxgrad_cuda_max_pool_tangent);
  targets["jaxgrad_cuda_sum_pool_forward"] = handler_capsule(jaxgrad_cuda_sum_pool_forward);
  targets["jaxgrad_cuda_sum_pool_input_gradient"] = handler_capsule(jaxgrad_cuda_sum_pool_input_gradient);
  return targets;
}

nb::dict build_info() {
  nb::dict info;
  info["ffi_api"] = ffi_api_version().c_str();
  info["compiler"] = __VERSION__;
  const std::string headers =
      std::to_string(CUDNN_MAJOR) + "." + std::to_string(CUDNN_MINOR) + "." + std::to_string(CUDNN_PATCHLEVEL);
  info["cudnn_headers"] = headers.c_str();
  info["cudnn"] = cudnn::version().c_str();
  info["nvrtc"] = nvrtc::version().c_str();
  return info;
}

ConvKey key_of(int64_t device, int64_t conv_pass, int64_t type, const ConvShapes& shapes, const nb::dict& layout,
               bool has_bias, bool relu, bool allow_tf32, bool deterministic, int64_t search, int64_t workspace_limit) {
  ConvKey key;
  static_cast<ConvProblem&>(key) = make_conv_problem(static_cast<ConvPass>(conv_pass), shapes, layout);
  key.type = static_cast<FloatType>(type);
  key.has_bias = has_bias;
  key.relu = relu;
  key.allow_tf32 = allow_tf32;
  key.deterministic = deterministic;
  key.search = static_cast<ConvSearch>(search);
  key.workspace_limit = workspace_limit;
  key.device = static_cast<int>(device);
  return key;
}

// Builds, and with the exhaustive search times, the plan that the call will run. Returns (bytes of workspace, engine),
// or None if cuDNN has no plan.
nb::object plan_of(int64_t device, int64_t conv_pass, int64_t type, const ConvShapes& shapes, const nb::dict& layout,
                   bool has_bias, bool relu, bool allow_tf32, bool deterministic, int64_t search,
                   int64_t workspace_limit) {
  const ConvKey key = key_of(device, conv_pass, type, shapes, layout, has_bias, relu, allow_tf32, deterministic, search,
                             workspace_limit);
  try {
    std::shared_ptr<const ConvPlan> plan;
    {
      const nb::gil_scoped_release release;
      const driver::CurrentDevice current(key.device);
      plan = conv_plan(key, /*capturing=*/false);
    }
    return nb::make_tuple(plan->reserved_bytes, plan->name);
  } catch (const NoPlan&) {
    return nb::none();
  }
}

// Runs every engine for a problem that `wanted` returns true for. Returns (number and knobs, error, why it failed) for
// each; an error above 1 is too large.
nb::list every_engine(int64_t device, int64_t conv_pass, int64_t type, const ConvShapes& shapes, const nb::dict& layout,
                      bool has_bias, bool relu, bool allow_tf32, int64_t workspace_limit, const nb::callable& wanted) {
  const ConvKey key = key_of(device, conv_pass, type, shapes, layout, has_bias, relu, allow_tf32,
                             /*deterministic=*/false, static_cast<int64_t>(ConvSearch::kHeuristic), workspace_limit);
  const auto filter = [&](const std::string& tag, bool is_known_wrong) {
    const nb::gil_scoped_acquire acquire;
    return nb::cast<bool>(wanted(tag, is_known_wrong));
  };
  std::vector<EngineResult> results;
  {
    const nb::gil_scoped_release release;
    const driver::CurrentDevice current(key.device);
    try {
      results = run_every_engine(key, filter);
    } catch (const NoPlan&) {  // cuDNN does not support the problem
    }
  }
  nb::list found;
  for (const EngineResult& result : results) found.append(nb::make_tuple(result.tag, result.error, result.failure));
  return found;
}

// The source of the reference kernels for a type, without kDeviceSource, and the argument and samples for a problem. No
// GPU needs to exist.
nb::dict reference_program(int64_t conv_pass, int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  const ConvProblem problem = make_conv_problem(static_cast<ConvPass>(conv_pass), shapes, layout);
  const ReferenceProblem argument = reference_problem(problem);
  nb::dict program;
  program["definitions"] = reference_definitions(static_cast<FloatType>(type));
  program["source"] = kReferenceSource;
  program["argument"] = nb::bytes(&argument, sizeof argument);
  program["samples"] = sampled_elements(problem);
  return program;
}

// Returns why the kernels cannot be compiled; empty if they are loaded. Throws std::runtime_error for an error that may
// pass.
std::string load_transpose_kernels_on(int64_t device) {
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(static_cast<int>(device));
  try {
    load_transpose_kernels(current.device());
  } catch (const nvrtc::Error& error) {
    return error.what();
  }
  return "";
}

// The source that would be compiled to transpose an array, and the kernel, blocks and argument of the launch. No GPU
// needs to exist.
nb::dict transpose_program(int64_t element_bytes, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& from_strides, const std::vector<int64_t>& to_strides) {
  ConvOperand from, to;
  if (sizes.size() > from.sizes.size() || from_strides.size() != sizes.size() || to_strides.size() != sizes.size())
    throw nb::value_error("there must be at most five axes, and two strides for each axis");
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    from.sizes[axis] = to.sizes[axis] = sizes[axis];
    from.strides[axis] = from_strides[axis];
    to.strides[axis] = to_strides[axis];
  }
  const auto launch = transpose_launch(static_cast<int>(sizes.size()), element_bytes, from, nullptr, to, nullptr);
  nb::dict program;
  program["source"] = kTransposeSource;
  program["kernel"] = kTransposeKernels[launch.kernel];
  program["blocks"] = launch.blocks;
  program["argument"] = nb::bytes(&launch.arguments, sizeof(TransposeArguments));
  return program;
}

void use_plan_directory(const std::string& directory) {
  plan_store().use_directory(directory);
  check_store().use_directory(directory);
  nvrtc::stored_programs().use_directory(directory);
}

std::string plan_directory() { return nvrtc::stored_programs().directory(); }

std::string plan_directory_error() {
  for (const FileStore::Info& info : {plan_store().info(), check_store().info(), nvrtc::stored_programs().info()})
    if (!info.error.empty()) return info.error;
  return "";
}

// Returns the bytes, or nothing if cuDNN does not support the problem. Throws std::runtime_error for an error that may
// pass.
std::optional<int64_t> batch_norm_workspace(int64_t device, bool is_backward, int64_t type, int64_t outer, int64_t C,
                                            int64_t inner, bool relu, bool residual) {
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(static_cast<int>(device));
  const cudnn::Handle handle(current.device());
  const BatchNormProblem problem{{outer, C, inner}, static_cast<FloatType>(type), relu, residual};
  try {
    return (is_backward ? batch_norm_backward_workspace : batch_norm_forward_workspace)(problem, handle);
  } catch (const cudnn::Error& error) {
    if (cudnn::is_unsupported(error)) return std::nullopt;
    handle.check_device(error);
    throw;
  }
}

nb::dict plan_cache_info() {
  nb::dict info = as_dict(conv_plan_cache_info());
  info["recorded"] = num_retained_for_cuda_graphs();
  const FileStore::Info stored = plan_store().info();
  info["disk_hits"] = stored.hits;
  info["disk_misses"] = stored.misses;
  const EngineCheckInfo checks = engine_check_info();
  info["checked"] = checks.checked;
  info["rejected"] = checks.rejected;
  info["unchecked"] = checks.unchecked;
  return info;
}

}  // namespace

NB_MODULE(_cuda, module) {
  module.doc() = "CUDA kernels of jaxgrad and calls of cuDNN for the XLA FFI.";
  module.def("registrations", &registrations, "The FFI handlers, by target name.");
  module.def("build_info", &build_info, "FFI API version, compiler, and the versions of cuDNN and NVRTC.");
  module.def("load_cudnn", &cudnn::load, nb::arg("paths"), "Opens cuDNN; raises RuntimeError if it cannot be used.");
  module.def("conv_plan", &plan_of, nb::arg("device"), nb::arg("conv_pass"), nb::arg("type"), nb::arg("shapes"),
             nb::arg("layout"), nb::arg("has_bias"), nb::arg("relu"), nb::arg("allow_tf32"), nb::arg("deterministic"),
             nb::arg("search"), nb::arg("workspace_limit"),
             "Builds a convolution plan; returns (bytes of workspace, engine) or None.");
  module.def("run_every_engine", &every_engine, nb::arg("device"), nb::arg("conv_pass"), nb::arg("type"),
             nb::arg("shapes"), nb::arg("layout"), nb::arg("has_bias"), nb::arg("relu"), nb::arg("allow_tf32"),
             nb::arg("workspace_limit"), nb::arg("wanted"),
             "Compares every engine for which wanted(engine, is_known_wrong) is true with the reference; returns "
             "(engine, error, failure) for each, where an error above 1 is too large.");
  module.def("reference_program", &reference_program, nb::arg("conv_pass"), nb::arg("type"), nb::arg("shapes"),
             nb::arg("layout"), "The source, argument and samples of the reference kernels.");
  bind_depthwise(module);
  bind_gru(module);
  bind_norm(module);
  bind_pool(module);
  module.def("transpose_supported", &transpose_supported, nb::arg("sizes"), nb::arg("from_spec"), nb::arg("to_spec"),
             nb::arg("reversed_axes"), "Whether a call should transpose an array by jaxgrad's kernels and not by XLA.");
  module.def("load_transpose_kernels", &load_transpose_kernels_on, nb::arg("device"),
             "Compiles and loads the transpose kernels. Returns why they cannot be compiled; empty if they are loaded. "
             "Raises RuntimeError for an error that may pass.");
  module.def("transpose_program", &transpose_program, nb::arg("element_bytes"), nb::arg("sizes"),
             nb::arg("from_strides"), nb::arg("to_strides"), "The source and launch parameters of a transpose.");
  module.def("total_memory", &driver::total_memory, nb::arg("device"), "Bytes of memory of a device.");
  module.def("use_plan_directory", &use_plan_directory, nb::arg("directory"),
             "Sets the directory of stored search results and kernels; an empty path disables it.");
  module.def("plan_directory", &plan_directory, "The directory of stored search results and kernels; empty for none.");
  module.def("plan_directory_error", &plan_directory_error,
             "The error of the last write to the directory that failed; empty if none failed.");
  module.def("batch_norm_workspace", &batch_norm_workspace, nb::arg("device"), nb::arg("is_backward"), nb::arg("type"),
             nb::arg("outer"), nb::arg("C"), nb::arg("inner"), nb::arg("relu"), nb::arg("residual"),
             "Bytes of workspace of a forward or backward call; None if cuDNN does not support it.");
  module.def(
      "conv_plan_cache_info", &plan_cache_info,
      "Hits, misses, size and capacity of the plan cache, and counts of retained and stored plans and of checks.");
  module.def("clear_caches", &clear_device_caches, nb::call_guard<nb::gil_scoped_release>(),
             "Frees the cached plans and kernels, except those in use and those that a CUDA graph recorded.");
}

}  // namespace jaxgrad

// The Python module jaxgrad._cuda: the handlers to register, and what Python must know while it lowers a call.
#include "cuda/depthwise/bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/conv_bindings.h"
#include "cuda/batch_norm/handler.h"
#include "cuda/batch_norm/op.h"
#include "cuda/conv/handler.h"
#include "cuda/conv/op.h"
#include "cuda/conv/plan_store.h"
#include "cuda/depthwise/handler.h"
#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/nvrtc.h"
#include "cuda/transpose/kernel_source.h"
#include "cuda/transpose/op.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

nb::capsule handler(XLA_FFI_Error* (*symbol)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(symbol));
}

nb::dict registrations() {
  nb::dict targets;
  targets["jaxgrad_batch_norm_cudnn_forward"] = handler(jaxgrad_cuda_batch_norm_forward);
  targets["jaxgrad_batch_norm_cudnn_backward"] = handler(jaxgrad_cuda_batch_norm_backward);
  targets["jaxgrad_conv_forward"] = handler(jaxgrad_cuda_conv_forward);
  targets["jaxgrad_conv_backward_input"] = handler(jaxgrad_cuda_conv_backward_input);
  targets["jaxgrad_conv_backward_filter"] = handler(jaxgrad_cuda_conv_backward_filter);
  targets["jaxgrad_conv_depthwise_filter"] = handler(jaxgrad_cuda_conv_depthwise_filter);
  return targets;
}

nb::dict build_info() {
  nb::dict info;
  const std::string ffi_api = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  info["ffi_api"] = ffi_api.c_str();
  info["compiler"] = __VERSION__;
  const std::string headers =
      std::to_string(CUDNN_MAJOR) + "." + std::to_string(CUDNN_MINOR) + "." + std::to_string(CUDNN_PATCHLEVEL);
  info["cudnn_headers"] = headers.c_str();
  info["cudnn"] = cudnn::version().c_str();
  info["nvrtc"] = nvrtc::version().c_str();
  return info;
}

// (workspace bytes, cuDNN's engine), or None where it has none. Builds, and times, the plan that the call will run.
nb::object plan_of(int64_t device, int64_t kind, int64_t type, const ConvShapes& shapes, const nb::dict& layout,
                   bool has_bias, bool relu, bool allow_tf32, bool deterministic, int64_t search,
                   int64_t workspace_limit) {
  ConvKey key;
  static_cast<ConvShape&>(key) = conv_shape(static_cast<ConvKind>(kind), shapes, layout);
  key.type = static_cast<FloatType>(type);
  key.has_bias = has_bias;
  key.relu = relu;
  key.allow_tf32 = allow_tf32;
  key.deterministic = deterministic;
  key.search = static_cast<ConvSearch>(search);
  key.workspace_limit = workspace_limit;
  key.device = static_cast<int>(device);
  try {
    std::shared_ptr<const ConvPlan> plan;
    {
      const nb::gil_scoped_release release;
      const driver::CurrentDevice current(key.device);
      cudnn::Handle handle(key.device);
      plan = conv_plan(key, handle, /*may_time=*/true);
    }
    return nb::make_tuple(plan->reserved_bytes, plan->name);
  } catch (const NoPlan&) {
    return nb::none();
  }
}

void load_transposition_on(int64_t device) {
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(static_cast<int>(device));
  load_transposition(current.device());
}

// What would be compiled to transpose an array, by which of its kernels in how many blocks, and that kernel's argument.
nb::dict transposition_program(int64_t element_bytes, const std::vector<int64_t>& sizes,
                               const std::vector<int64_t>& from_strides, const std::vector<int64_t>& to_strides) {
  ConvOperand from, to;
  if (sizes.size() > from.sizes.size() || from_strides.size() != sizes.size() || to_strides.size() != sizes.size())
    throw nb::value_error("there must be at most five axes, and two strides to each");
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    from.sizes[axis] = to.sizes[axis] = sizes[axis];
    from.strides[axis] = from_strides[axis];
    to.strides[axis] = to_strides[axis];
  }
  const auto launch = transposition_launch(static_cast<int>(sizes.size()), element_bytes, from, nullptr, to, nullptr);
  nb::dict program;
  program["source"] = std::string(kTransposeSource);
  program["kernel"] = kTranspositionKernels[launch.kernel];
  program["blocks"] = launch.blocks;
  program["argument"] = nb::bytes(&launch.description, sizeof(Transposition));
  return program;
}

void use_plan_directory(const std::string& directory) { plan_store().use(directory); }

std::string plan_directory_problem() { return plan_store().info().problem; }

// The bytes of workspace of one pass.
int64_t batch_norm_workspace(int64_t device, bool is_backward, int64_t type, int64_t outer, int64_t C, int64_t inner,
                             bool relu, bool residual) {
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(static_cast<int>(device));
  const cudnn::Handle handle(current.device());
  const BatchNormCall call{{outer, C, inner}, static_cast<FloatType>(type), relu, residual};
  return (is_backward ? batch_norm_backward_workspace : batch_norm_forward_workspace)(call, handle);
}

nb::dict plan_cache_info() {
  const PlanCacheInfo found = conv_plan_cache_info();
  nb::dict info;
  info["hits"] = found.hits;
  info["misses"] = found.misses;
  info["size"] = found.size;
  info["capacity"] = found.capacity;
  info["recorded"] = conv_plans_kept();
  const PlanStore::Info kept = plan_store().info();
  info["disk_hits"] = kept.hits;
  info["disk_misses"] = kept.misses;
  return info;
}

}  // namespace

NB_MODULE(_cuda, module) {
  module.doc() = "jaxgrad's CUDA kernels: cuDNN's and its own, for XLA's FFI.";
  module.def("registrations", &registrations, "The FFI handlers, by target name.");
  module.def("build_info", &build_info, "How the module was built, and the cuDNN in use here.");
  module.def("load_cudnn", &cudnn::load, nb::arg("paths"), "Opens cuDNN; raises RuntimeError where it cannot serve.");
  module.def("conv_plan", &plan_of, nb::arg("device"), nb::arg("kind"), nb::arg("type"), nb::arg("shapes"),
             nb::arg("layout"), nb::arg("has_bias"), nb::arg("relu"), nb::arg("allow_tf32"), nb::arg("deterministic"),
             nb::arg("search"), nb::arg("workspace_limit"),
             "(bytes of workspace, cuDNN's engine) of a convolution's plan, or None.");
  bind_depthwise(module);
  module.def("load_transposition", &load_transposition_on, nb::arg("device"),
             "Makes a device ready to transpose weight gradients; raises RuntimeError where it cannot.");
  module.def("transposition_program", &transposition_program, nb::arg("element_bytes"), nb::arg("sizes"),
             nb::arg("from_strides"), nb::arg("to_strides"),
             "What would be compiled and launched to transpose an array on a GPU that need not be here.");
  module.def("total_memory", &driver::total_memory, nb::arg("device"), "Bytes of a device's memory.");
  module.def("use_plan_directory", &use_plan_directory, nb::arg("directory"),
             "Keeps choices of plans in a directory from now on; an empty path for nowhere.");
  module.def("plan_directory_problem", &plan_directory_problem,
             "Why a choice could not be written there; empty where all could.");
  module.def("batch_norm_workspace", &batch_norm_workspace, nb::arg("device"), nb::arg("is_backward"), nb::arg("type"),
             nb::arg("outer"), nb::arg("C"), nb::arg("inner"), nb::arg("relu"), nb::arg("residual"),
             "Bytes of workspace of batch normalisation's forward or backward pass.");
  module.def("conv_plan_cache_info", &plan_cache_info, "Hits, misses, size and capacity of the cache of plans.");
}

}  // namespace jaxgrad

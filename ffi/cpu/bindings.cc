// The Python module jaxgrad._cpu: the handlers to register, and what Python must know while it lowers a call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "common/conv_bindings.h"
#include "cpu/batch_norm/handler.h"
#include "cpu/batch_norm/op.h"
#include "cpu/conv/handler.h"
#include "cpu/conv/op.h"
#include "cpu/gru/handler.h"
#include "cpu/gru/op.h"
#include "cpu/runtime/isa.h"
#include "cpu/runtime/onednn.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

nb::capsule handler(XLA_FFI_Error* (*symbol)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(symbol));
}

nb::dict registrations() {
  nb::dict targets;
  targets["jaxgrad_gru_forward"] = handler(jaxgrad_gru_forward);
  targets["jaxgrad_gru_backward"] = handler(jaxgrad_gru_backward);
  targets["jaxgrad_batch_norm_statistics"] = handler(jaxgrad_batch_norm_statistics);
  targets["jaxgrad_batch_norm_normalise"] = handler(jaxgrad_batch_norm_normalise);
  targets["jaxgrad_batch_norm_backward"] = handler(jaxgrad_batch_norm_backward);
  targets["jaxgrad_conv_forward"] = handler(jaxgrad_conv_forward);
  targets["jaxgrad_conv_backward_input"] = handler(jaxgrad_conv_backward_input);
  targets["jaxgrad_conv_backward_filter"] = handler(jaxgrad_conv_backward_filter);
  return targets;
}

nb::dict build_info() {
  nb::dict info;
  const std::string ffi_api = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  info["ffi_api"] = ffi_api.c_str();
  info["compiler"] = __VERSION__;
  info["instruction_set"] = isa_name();
  info["onednn"] = onednn::version().c_str();
  return info;
}

template <int64_t (*kWorkspace)(const GruShape&, int64_t)>
int64_t workspace(int64_t T, int64_t B, int64_t I, int64_t H, int64_t D, bool linear_before_reset,
                  int64_t storage_bytes) {
  return kWorkspace(GruShape{T, B, I, H, D, linear_before_reset}, storage_bytes);
}

int64_t batch_norm_scratch(int64_t outer, int64_t C, int64_t inner, int64_t storage_bytes) {
  return batch_norm_workspace(BatchNormShape{outer, C, inner}, storage_bytes);
}

// (workspace bytes, oneDNN's name of the kernel), or None where it has none. Builds the plan that the call will run.
// Where the shapes have an axis of examples, the workspace is that of all who share them.
nb::object plan_of(int64_t kind, bool bfloat16, bool has_bias, const ConvShapes& shapes, const nb::dict& layout) {
  const ConvCall call = conv_call(shapes, layout);
  const ConvType type = bfloat16 ? ConvType::kBFloat16 : ConvType::kFloat32;
  std::string problem;
  const ConvWork work = conv_work(static_cast<ConvKind>(kind), type, has_bias, call, problem);
  if (!problem.empty()) throw nb::value_error(problem.c_str());
  try {
    std::shared_ptr<const ConvPlan> plan;
    {
      const nb::gil_scoped_release release;
      plan = conv_plan(work.key);
    }
    return nb::make_tuple(work.workers * plan->workspace_bytes(), plan->implementation());
  } catch (const onednn::Error& error) {
    if (error.status == dnnl_unimplemented) return nb::none();
    throw;
  }
}

nb::dict plan_cache_info() {
  const PlanCacheInfo found = conv_plan_cache_info();
  nb::dict info;
  info["hits"] = found.hits;
  info["misses"] = found.misses;
  info["size"] = found.size;
  info["capacity"] = found.capacity;
  return info;
}

}  // namespace

NB_MODULE(_cpu, module) {
  module.def("registrations", &registrations, "The XLA FFI handlers, by target name.");
  module.def("build_info", &build_info, "FFI API version, compiler, and the instruction set in use here.");
  module.def("load_onednn", &onednn::load, nb::arg("path"), "Opens oneDNN; raises RuntimeError where it cannot serve.");
  module.def("conv_plan", &plan_of, nb::arg("kind"), nb::arg("bfloat16"), nb::arg("has_bias"), nb::arg("shapes"),
             nb::arg("layout"), "(bytes of scratch, name of the kernel) of a convolution's plan, or None.");
  module.def("conv_plan_cache_info", &plan_cache_info, "Hits, misses, size and capacity of the cache of plans.");
  module.def("gru_forward_workspace", &workspace<gru_forward_workspace>, "Bytes of scratch of one forward call.");
  module.def("gru_backward_workspace", &workspace<gru_backward_workspace>, "Bytes of scratch of one backward call.");
  module.def("batch_norm_workspace", &batch_norm_scratch, "Bytes of scratch of one call, of either direction.");
}

}  // namespace jaxgrad

// The Python module jaxgrad._cpu: the handlers to register, and what Python must know while it lowers a call.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "batch_norm.h"
#include "batch_norm_ffi.h"
#include "gru.h"
#include "gru_ffi.h"
#include "isa.h"

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
  return targets;
}

nb::dict build_info() {
  nb::dict info;
  const std::string ffi_api = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  info["ffi_api"] = ffi_api.c_str();
  info["compiler"] = __VERSION__;
  info["instruction_set"] = isa_name();
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

}  // namespace

NB_MODULE(_cpu, module) {
  module.def("registrations", &registrations, "The XLA FFI handlers, by target name.");
  module.def("build_info", &build_info, "FFI API version, compiler, and the instruction set in use here.");
  module.def("gru_forward_workspace", &workspace<gru_forward_workspace>, "Bytes of scratch of one forward call.");
  module.def("gru_backward_workspace", &workspace<gru_backward_workspace>, "Bytes of scratch of one backward call.");
  module.def("batch_norm_workspace", &batch_norm_scratch, "Bytes of scratch of one call, of either direction.");
}

}  // namespace jaxgrad

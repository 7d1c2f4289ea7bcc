#include "cuda/gru/bindings.h"

#include <nanobind/stl/string.h>

#include "cuda/gru/op.h"
#include "cuda/runtime/nvrtc.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

GruKey key_of(int64_t device, bool is_backward, int64_t type, bool allow_tf32, bool linear_before_reset,
              int64_t problems, int64_t rows, int64_t hidden) {
  GruKey key;
  key.device = static_cast<int>(device);
  key.is_backward = is_backward;
  key.type = static_cast<FloatType>(type);
  key.allow_tf32 = allow_tf32;
  key.linear_before_reset = linear_before_reset;
  key.problems = problems;
  key.rows = rows;
  key.hidden = hidden;
  return key;
}

// Returns why the kernels cannot run a call; empty if they are loaded. Throws std::runtime_error for an error that may
// pass.
std::string load(int64_t device, bool is_backward, int64_t type, bool allow_tf32, bool linear_before_reset,
                 int64_t problems, int64_t rows, int64_t hidden) {
  const GruKey key = key_of(device, is_backward, type, allow_tf32, linear_before_reset, problems, rows, hidden);
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(key.device);
  try {
    gru_plan(key);
  } catch (const NoPlan& reason) {
    return reason.what();
  } catch (const nvrtc::Error& error) {
    return error.what();
  }
  return "";
}

int64_t workspace_bytes(int64_t device, bool is_backward, int64_t type, bool allow_tf32, bool linear_before_reset,
                        int64_t problems, int64_t rows, int64_t hidden) {
  return gru_workspace_bytes(
      key_of(device, is_backward, type, allow_tf32, linear_before_reset, problems, rows, hidden));
}

}  // namespace

void bind_gru(nb::module_& module) {
  module.def("gru_padded_hidden", &gru_padded_hidden, nb::arg("hidden"),
             "The hidden units of the kernels for a call; 0 if there are too many.");
  module.def("load_gru_kernel", &load, nb::arg("device"), nb::arg("is_backward"), nb::arg("type"),
             nb::arg("allow_tf32"), nb::arg("linear_before_reset"), nb::arg("problems"), nb::arg("rows"),
             nb::arg("hidden"),
             "Compiles and loads the kernel of a pass. Returns why that is impossible; empty if it is loaded. Raises "
             "RuntimeError for an error that may pass.");
  module.def("gru_workspace_bytes", &workspace_bytes, nb::arg("device"), nb::arg("is_backward"), nb::arg("type"),
             nb::arg("allow_tf32"), nb::arg("linear_before_reset"), nb::arg("problems"), nb::arg("rows"),
             nb::arg("hidden"),
             "The bytes of the workspace of a pass whose kernel is loaded. Raises RuntimeError if no kernel supports "
             "it.");
}

}  // namespace jaxgrad

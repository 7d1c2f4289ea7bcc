#include "cuda/norm/bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/norm/op.h"
#include "cuda/runtime/no_plan.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

// The GPU of a device; an H200 if the device is negative.
NormGpu gpu_of(int64_t device) { return device < 0 ? NormGpu{132, 232448} : norm_gpu(static_cast<int>(device)); }

NormKey key_of(int64_t norm_pass, int64_t type, const std::vector<int64_t>& shape, int64_t activation, bool centered,
               bool frozen, bool residual, int64_t third, bool needs_dx, bool needs_sums) {
  if (shape.size() != 6) throw nb::value_error("shape must have 6 sizes");
  NormKey key{};
  key.pass = static_cast<NormPass>(norm_pass);
  key.shape = {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  key.type = static_cast<FloatType>(type);
  key.activation = static_cast<Activation>(activation);
  key.centered = centered;
  key.frozen = frozen;
  key.residual = residual;
  key.third = static_cast<NormThird>(third);
  key.needs_dx = needs_dx;
  key.needs_sums = needs_sums;
  return key;
}

template <class... Key>
std::string rejection(int64_t device, Key... key) {
  try {
    norm_program(key_of(key...), gpu_of(device));
  } catch (const NoPlan& error) {
    return error.what();
  }
  return "";
}

template <class... Key>
int64_t workspace(int64_t device, Key... key) {
  return norm_program(key_of(key...), gpu_of(device)).workspace_bytes;
}

template <class... Key>
void load(int64_t device, Key... key) {
  const NormKey found = key_of(key...);
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(static_cast<int>(device));
  norm_plan(found, current.device());
}

template <class... Key>
nb::dict described(int64_t multiprocessors, int64_t shared_bytes, Key... key) {
  const NormProgram found = norm_program(key_of(key...), {multiprocessors, shared_bytes});
  nb::dict result;
  result["definitions"] = found.definitions;
  result["source"] = found.source;
  result["kernel"] = found.kernel;
  result["blocks"] = found.blocks;
  result["threads"] = found.threads;
  result["shared_bytes"] = found.shared_bytes;
  result["cooperative"] = found.cooperative;
  result["workspace_bytes"] = found.workspace_bytes;
  result["offsets"] = nb::make_tuple(found.partials, found.sums, found.flags);
  const void* const arguments = found.has_columns ? static_cast<const void*>(&found.columns) : &found.rows;
  result["arguments"] = nb::bytes(arguments, found.has_columns ? sizeof found.columns : sizeof found.rows);
  return result;
}

}  // namespace

void bind_norm(nb::module_& module) {
  using Shape = const std::vector<int64_t>&;
#define JAXGRAD_NORM_KEY                                                                               \
  nb::arg("norm_pass"), nb::arg("type"), nb::arg("shape"), nb::arg("activation"), nb::arg("centered"), \
      nb::arg("frozen"), nb::arg("residual"), nb::arg("third"), nb::arg("needs_dx"), nb::arg("needs_sums")
  module.def("norm_rejection", &rejection<int64_t, int64_t, Shape, int64_t, bool, bool, bool, int64_t, bool, bool>,
             nb::arg("device"), JAXGRAD_NORM_KEY,
             "Why the kernels do not take a normalization pass; empty if they do. A negative device is an H200.");
  module.def("load_norm_kernel", &load<int64_t, int64_t, Shape, int64_t, bool, bool, bool, int64_t, bool, bool>,
             nb::arg("device"), JAXGRAD_NORM_KEY, "Compiles and loads the kernel of a normalization pass.");
  module.def("norm_workspace", &workspace<int64_t, int64_t, Shape, int64_t, bool, bool, bool, int64_t, bool, bool>,
             nb::arg("device"), JAXGRAD_NORM_KEY, "The bytes of workspace of a normalization pass.");
  module.def(
      "norm_program", &described<int64_t, int64_t, Shape, int64_t, bool, bool, bool, int64_t, bool, bool>,
      nb::arg("multiprocessors"), nb::arg("shared_bytes"), JAXGRAD_NORM_KEY,
      "The source and the launch of a normalization pass, on a GPU with so many multiprocessors and so much shared "
      "memory for a block. No GPU needs to exist.");
#undef JAXGRAD_NORM_KEY
}

}  // namespace jaxgrad

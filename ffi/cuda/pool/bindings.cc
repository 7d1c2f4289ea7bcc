#include "cuda/pool/bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/pool_problem.h"
#include "cuda/pool/op.h"
#include "cuda/runtime/no_plan.h"
#include "cuda/runtime/nvrtc.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

using List = std::vector<int64_t>;

PoolProgram program(int64_t pool_pass, int64_t type, const List& x, const List& y, const List& window,
                    const List& strides, const List& padding, const List& dilation, int64_t divisor) {
  if (pool_pass < 0 || pool_pass >= kPoolPasses) throw nb::value_error("pool_pass is unknown");
  const auto span = [](const List& sizes) { return Sizes(sizes.data(), sizes.size()); };
  Checks checks("pool");
  const PoolShape shape =
      pool_shape(checks, span(x), span(y), span(window), span(strides), span(padding), span(dilation));
  checks.require(divisor > 0, "divisor must be positive");
  if (checks.failed()) throw NoPlan(checks.error().message());
  return pool_program({static_cast<PoolPass>(pool_pass), shape, static_cast<FloatType>(type), divisor});
}

std::string rejection(int64_t pool_pass, int64_t type, const List& x, const List& y, const List& window,
                      const List& strides, const List& padding, const List& dilation, int64_t divisor) {
  try {
    program(pool_pass, type, x, y, window, strides, padding, dilation, divisor);
  } catch (const NoPlan& error) {
    return error.what();
  }
  return "";
}

int64_t load(int64_t device, int64_t pool_pass, int64_t type, const List& x, const List& y, const List& window,
             const List& strides, const List& padding, const List& dilation, int64_t divisor) {
  const PoolProgram found = program(pool_pass, type, x, y, window, strides, padding, dilation, divisor);
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(static_cast<int>(device));
  load_pool_kernels(found, current.device());
  return found.workspace_bytes;
}

nb::dict described(int64_t pool_pass, int64_t type, const List& x, const List& y, const List& window,
                   const List& strides, const List& padding, const List& dilation, int64_t divisor) {
  const PoolProgram found = program(pool_pass, type, x, y, window, strides, padding, dilation, divisor);
  nb::dict result;
  result["definitions"] = found.definitions;
  result["source"] = found.source;
  result["workspace_bytes"] = found.workspace_bytes;
  nb::list launches;
  for (const PoolProgram::Launch& launch : found.launches) {
    const nb::bytes arguments(reinterpret_cast<const char*>(&launch.arguments), sizeof launch.arguments);
    launches.append(nb::make_tuple(launch.kernel, arguments, launch.blocks));
  }
  result["launches"] = launches;
  return result;
}

}  // namespace

void bind_pool(nb::module_& module) {
  module.def("pool_rejection", &rejection, nb::arg("pool_pass"), nb::arg("type"), nb::arg("x"), nb::arg("y"),
             nb::arg("window"), nb::arg("strides"), nb::arg("padding"), nb::arg("dilation"), nb::arg("divisor"),
             "Why the kernels do not support a pooling pass; empty if they do.");
  module.def("load_pool_kernels", &load, nb::arg("device"), nb::arg("pool_pass"), nb::arg("type"), nb::arg("x"),
             nb::arg("y"), nb::arg("window"), nb::arg("strides"), nb::arg("padding"), nb::arg("dilation"),
             nb::arg("divisor"), "Compiles and loads the kernels of a pooling pass; returns the bytes of workspace.");
  module.def("pool_program", &described, nb::arg("pool_pass"), nb::arg("type"), nb::arg("x"), nb::arg("y"),
             nb::arg("window"), nb::arg("strides"), nb::arg("padding"), nb::arg("dilation"), nb::arg("divisor"),
             "The source and launches of a pooling pass. No GPU needs to exist.");
}

}  // namespace jaxgrad

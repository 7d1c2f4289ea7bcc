#include "cuda/depthwise/bindings.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/conv_bindings.h"
#include "cuda/depthwise/kernel_source.h"
#include "cuda/depthwise/op.h"
#include "cuda/runtime/nvrtc.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

DepthwiseFilterKey filter_key(int64_t device, int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  DepthwiseFilterKey key;
  static_cast<ConvShape&>(key) = conv_shape(ConvKind::kBackwardFilter, shapes, layout);
  key.type = static_cast<FloatType>(type);
  key.device = static_cast<int>(device);
  return key;
}

// Why the kernel cannot take a call, or nothing.
std::string problem_of(int64_t device, int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  try {
    check_depthwise_filter(filter_key(device, type, shapes, layout));
  } catch (const NoPlan& error) {
    return error.what();
  }
  return "";
}

// The workspace's bytes. Compiles and loads what the call will run.
int64_t plan_of(int64_t device, int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  const DepthwiseFilterKey key = filter_key(device, type, shapes, layout);
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(key.device);
  return depthwise_filter_plan(key)->workspace_bytes();
}

// What would be compiled for a GPU that need not be here, but for kDeviceSource, and the grid, block and bytes that it
// is run with.
nb::dict program_of(int64_t architecture, int64_t multiprocessors, int64_t shared_bytes, int64_t shared_bytes_in_all,
                    int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  std::string reason;
  const auto shape =
      depthwise_shape(conv_shape(ConvKind::kBackwardFilter, shapes, layout), static_cast<FloatType>(type), reason);
  if (!shape) throw nb::value_error(reason.c_str());
  const Gpu gpu{static_cast<int>(architecture), static_cast<int>(multiprocessors), shared_bytes, shared_bytes_in_all};
  const auto tiling = depthwise_tiling(*shape, gpu);
  if (!tiling) throw nb::value_error("no tiling fits");
  nb::dict program;
  program["definitions"] = depthwise_definitions(*shape, *tiling);
  program["source"] = kDepthwiseWeightGradientSource;
  program["chunks"] = tiling->chunks;
  program["shares"] = tiling->shares;
  program["threads"] = tiling->threads;
  program["shared_bytes"] = tiling->shared_bytes;
  program["workspace_bytes"] = tiling->partial_bytes(*shape);
  return program;
}

void load_nvrtc(const std::vector<std::string>& paths) { nvrtc::load(paths); }

void check_nvrtc(int64_t device) {
  const nb::gil_scoped_release release;
  check_compiler(static_cast<int>(device));
}

}  // namespace

void bind_depthwise(nb::module_& module) {
  module.def("load_nvrtc", &load_nvrtc, nb::arg("paths"), "Opens NVRTC; raises RuntimeError where it cannot serve.");
  module.def("check_nvrtc", &check_nvrtc, nb::arg("device"),
             "Raises RuntimeError where NVRTC can compile nothing for a device.");
  module.def("depthwise_filter_problem", &problem_of, nb::arg("device"), nb::arg("type"), nb::arg("shapes"),
             nb::arg("layout"), "Why the kernel cannot take a depthwise weight gradient; empty where it can.");
  module.def("depthwise_filter_plan", &plan_of, nb::arg("device"), nb::arg("type"), nb::arg("shapes"),
             nb::arg("layout"), "Makes the plan of a depthwise weight gradient; the bytes of its workspace.");
  module.def("depthwise_filter_program", &program_of, nb::arg("architecture"), nb::arg("multiprocessors"),
             nb::arg("shared_bytes"), nb::arg("shared_bytes_in_all"), nb::arg("type"), nb::arg("shapes"),
             nb::arg("layout"),
             "What would be compiled for a depthwise weight gradient on a GPU that need not be here.");
}

}  // namespace jaxgrad

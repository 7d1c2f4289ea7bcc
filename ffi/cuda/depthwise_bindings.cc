#include "depthwise_bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "depthwise_filter.h"
#include "kernel_sources.h"
#include "nvrtc.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

using Ints = std::vector<int64_t>;

// The weight gradient of a convolution as Python describes it.
ConvShape filter_shape(const Ints& x, const Ints& w, const Ints& y, const Ints& lhs_spec, const Ints& rhs_spec,
                       const Ints& out_spec, const Ints& window_strides, const Ints& padding, const Ints& rhs_dilation,
                       int64_t feature_group_count) {
  std::string problem;
  const ConvShape shape = conv_shape(
      ConvKind::kBackwardFilter,
      {x, w, y, lhs_spec, rhs_spec, out_spec, window_strides, padding, rhs_dilation, feature_group_count}, problem);
  if (!problem.empty()) throw nb::value_error(problem.c_str());
  return shape;
}

DepthwiseFilterKey filter_key(int64_t device, int64_t type, const ConvShape& shape) {
  DepthwiseFilterKey key;
  static_cast<ConvShape&>(key) = shape;
  key.type = static_cast<ConvType>(type);
  key.device = static_cast<int>(device);
  return key;
}

// Why the kernel cannot take a call, or nothing.
std::string problem_of(int64_t device, int64_t type, const Ints& x, const Ints& w, const Ints& y, const Ints& lhs_spec,
                       const Ints& rhs_spec, const Ints& out_spec, const Ints& window_strides, const Ints& padding,
                       const Ints& rhs_dilation, int64_t feature_group_count) {
  try {
    check_depthwise_filter(filter_key(device, type,
                                      filter_shape(x, w, y, lhs_spec, rhs_spec, out_spec, window_strides, padding,
                                                   rhs_dilation, feature_group_count)));
  } catch (const NoPlan& error) {
    return error.what();
  }
  return "";
}

// The workspace's bytes. Compiles and loads what the call will run.
int64_t plan_of(int64_t device, int64_t type, const Ints& x, const Ints& w, const Ints& y, const Ints& lhs_spec,
                const Ints& rhs_spec, const Ints& out_spec, const Ints& window_strides, const Ints& padding,
                const Ints& rhs_dilation, int64_t feature_group_count) {
  const DepthwiseFilterKey key = filter_key(
      device, type,
      filter_shape(x, w, y, lhs_spec, rhs_spec, out_spec, window_strides, padding, rhs_dilation, feature_group_count));
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(key.device);
  return depthwise_filter_plan(key)->workspace_bytes();
}

// What would be compiled for a GPU that need not be here, but for kDeviceSource, and the grid, block and bytes that it
// is run with.
nb::dict program_of(int64_t architecture, int64_t multiprocessors, int64_t shared_bytes, int64_t shared_bytes_in_all,
                    int64_t type, const Ints& x, const Ints& w, const Ints& y, const Ints& lhs_spec,
                    const Ints& rhs_spec, const Ints& out_spec, const Ints& window_strides, const Ints& padding,
                    const Ints& rhs_dilation, int64_t feature_group_count) {
  std::string reason;
  const auto shape = depthwise_shape(
      filter_shape(x, w, y, lhs_spec, rhs_spec, out_spec, window_strides, padding, rhs_dilation, feature_group_count),
      static_cast<ConvType>(type), reason);
  if (!shape) throw nb::value_error(reason.c_str());
  const Gpu gpu{static_cast<int>(architecture), static_cast<int>(multiprocessors), shared_bytes, shared_bytes_in_all};
  const auto tiling = depthwise_tiling(*shape, gpu);
  if (!tiling) throw nb::value_error("no tiling fits");
  nb::dict program;
  program["definitions"] = depthwise_definitions(*shape, *tiling);
  program["source"] = kDepthwiseFilterSource;
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
  module.def("depthwise_filter_problem", &problem_of, nb::arg("device"), nb::arg("type"), nb::arg("x"), nb::arg("w"),
             nb::arg("y"), nb::arg("lhs_spec"), nb::arg("rhs_spec"), nb::arg("out_spec"), nb::arg("window_strides"),
             nb::arg("padding"), nb::arg("rhs_dilation"), nb::arg("feature_group_count"),
             "Why the kernel cannot take a depthwise weight gradient; empty where it can.");
  module.def("depthwise_filter_plan", &plan_of, nb::arg("device"), nb::arg("type"), nb::arg("x"), nb::arg("w"),
             nb::arg("y"), nb::arg("lhs_spec"), nb::arg("rhs_spec"), nb::arg("out_spec"), nb::arg("window_strides"),
             nb::arg("padding"), nb::arg("rhs_dilation"), nb::arg("feature_group_count"),
             "Makes the plan of a depthwise weight gradient; the bytes of its workspace.");
  module.def("depthwise_filter_program", &program_of, nb::arg("architecture"), nb::arg("multiprocessors"),
             nb::arg("shared_bytes"), nb::arg("shared_bytes_in_all"), nb::arg("type"), nb::arg("x"), nb::arg("w"),
             nb::arg("y"), nb::arg("lhs_spec"), nb::arg("rhs_spec"), nb::arg("out_spec"), nb::arg("window_strides"),
             nb::arg("padding"), nb::arg("rhs_dilation"), nb::arg("feature_group_count"),
             "What would be compiled for a depthwise weight gradient on a GPU that need not be here.");
}

}  // namespace jaxgrad

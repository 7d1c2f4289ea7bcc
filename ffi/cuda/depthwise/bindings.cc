#include "cuda/depthwise/bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/conv_bindings.h"
#include "common/module_bindings.h"
#include "cuda/depthwise/convolution_plan.h"
#include "cuda/depthwise/convolution_program.h"
#include "cuda/depthwise/weight_gradient_plan.h"
#include "cuda/depthwise/weight_gradient_source.h"
#include "cuda/runtime/nvrtc.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

DepthwiseKey make_key(int64_t device, int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  DepthwiseKey key;
  static_cast<ConvProblem&>(key) = make_conv_problem(ConvPass::kWeightGradient, shapes, layout);
  key.type = static_cast<FloatType>(type);
  key.device = static_cast<int>(device);
  return key;
}

std::string rejection_of(int64_t device, int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  try {
    check_depthwise(make_key(device, type, shapes, layout));
  } catch (const NoPlan& error) {
    return error.what();
  }
  return "";
}

int64_t plan_of(int64_t device, int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  const DepthwiseKey key = make_key(device, type, shapes, layout);
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(key.device);
  return depthwise_plan(key)->workspace_bytes();
}

// The source that would be compiled for a GPU, without kDeviceSource, and the launch parameters. The GPU need not
// exist.
nb::dict program_of(int64_t architecture, int64_t multiprocessors, int64_t shared_bytes, int64_t shared_bytes_in_all,
                    int64_t type, const ConvShapes& shapes, const nb::dict& layout) {
  std::string reason;
  const auto shape = depthwise_shape(make_conv_problem(ConvPass::kWeightGradient, shapes, layout),
                                     static_cast<FloatType>(type), reason);
  if (!shape) throw nb::value_error(reason.c_str());
  const Gpu gpu{static_cast<int>(architecture), static_cast<int>(multiprocessors), shared_bytes, shared_bytes_in_all};
  const auto tiling = depthwise_tiling(*shape, gpu);
  if (!tiling) throw nb::value_error("no tiling fits the GPU");
  nb::dict program;
  program["definitions"] = depthwise_definitions(*shape, *tiling);
  program["source"] = kDepthwiseWeightGradientSource;
  const DepthwiseGradientArguments arguments = depthwise_arguments(*shape, *tiling);
  program["arguments"] = nb::bytes(reinterpret_cast<const char*>(&arguments), sizeof(arguments));
  program["chunks"] = tiling->chunks * shape->KZ;
  program["shares"] = tiling->shares;
  program["threads"] = tiling->threads;
  program["shared_bytes"] = tiling->shared_bytes;
  program["workspace_bytes"] = tiling->partial_bytes(*shape);
  return program;
}

// Returns why NVRTC cannot be used; empty if it can. Throws std::runtime_error for an error that may pass.
std::string nvrtc_problem(const std::vector<std::string>& paths, std::optional<int64_t> device) {
  try {
    const nb::gil_scoped_release release;
    nvrtc::load(paths);
    if (device) check_compiler(static_cast<int>(*device));
  } catch (const nvrtc::Error& error) {
    return error.what();
  }
  return "";
}

DepthwiseConvolutionKey convolution_key(int64_t device, int64_t conv_pass, int64_t type, bool relu,
                                        const ConvShapes& shapes, const nb::dict& layout) {
  DepthwiseConvolutionKey key;
  static_cast<ConvProblem&>(key) = make_conv_problem(static_cast<ConvPass>(conv_pass), shapes, layout);
  key.type = static_cast<FloatType>(type);
  key.relu = relu;
  key.device = static_cast<int>(device);
  return key;
}

std::string convolution_rejection(int64_t device, int64_t conv_pass, int64_t type, const ConvShapes& shapes,
                                  const nb::dict& layout) {
  try {
    check_depthwise_convolution(convolution_key(device, conv_pass, type, false, shapes, layout));
  } catch (const NoPlan& error) {
    return error.what();
  }
  return "";
}

void prepare_convolution(int64_t device, int64_t conv_pass, int64_t type, bool relu, const ConvShapes& shapes,
                         const nb::dict& layout) {
  const DepthwiseConvolutionKey key = convolution_key(device, conv_pass, type, relu, shapes, layout);
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(key.device);
  depthwise_convolution_plan(key);
}

// The source that would be compiled for a GPU, without kDeviceSource, and the launch parameters, if a multiprocessor
// holds as many blocks as the tile asks for. The GPU need not exist.
nb::dict convolution_program(int64_t architecture, int64_t multiprocessors, int64_t shared_bytes,
                             int64_t shared_bytes_in_all, int64_t conv_pass, int64_t type, bool relu,
                             const ConvShapes& shapes, const nb::dict& layout) {
  std::string reason;
  const auto convolution = depthwise_convolution(make_conv_problem(static_cast<ConvPass>(conv_pass), shapes, layout),
                                                 static_cast<FloatType>(type), reason);
  if (!convolution) throw nb::value_error(reason.c_str());
  const Gpu gpu{static_cast<int>(architecture), static_cast<int>(multiprocessors), shared_bytes, shared_bytes_in_all};
  const auto found = DepthwiseProgram::of(*convolution, relu, gpu);
  if (!found) throw nb::value_error("no tile fits the GPU");
  const DepthwiseGrid grid = found->grid(gpu.multiprocessors, found->blocks());
  nb::dict program;
  program["definitions"] = found->definitions();
  program["source"] = found->source();
  program["arguments"] = nb::bytes(reinterpret_cast<const char*>(&grid.arguments), sizeof(grid.arguments));
  program["chunks"] = grid.chunks;
  program["shares"] = grid.shares;
  program["threads"] = found->threads();
  program["shared_bytes"] = found->shared_bytes();
  return program;
}

nb::dict cache_info() { return as_dict(depthwise_plan_cache_info()); }
nb::dict convolution_cache_info() { return as_dict(depthwise_convolution_plan_cache_info()); }

}  // namespace

void bind_depthwise(nb::module_& module) {
  module.def("nvrtc_problem", &nvrtc_problem, nb::arg("paths"), nb::arg("device").none(),
             "Opens NVRTC and compiles an empty program for a device. Returns why that is impossible; empty if it is "
             "not. Raises RuntimeError for an error that may pass.");
  module.def("depthwise_plan_cache_info", &cache_info, "Hits, misses, size and capacity of the cache of plans.");
  module.def("depthwise_convolution_plan_cache_info", &convolution_cache_info,
             "Hits, misses, size and capacity of the cache of plans of forward passes and input gradients.");
  module.def("depthwise_convolution_rejection", &convolution_rejection, nb::arg("device"), nb::arg("conv_pass"),
             nb::arg("type"), nb::arg("shapes"), nb::arg("layout"),
             "Why the kernel does not support a forward pass or an input gradient; empty if it does.");
  module.def("prepare_depthwise_convolution", &prepare_convolution, nb::arg("device"), nb::arg("conv_pass"),
             nb::arg("type"), nb::arg("relu"), nb::arg("shapes"), nb::arg("layout"),
             "Compiles and loads the kernel of a forward pass or an input gradient.");
  module.def("depthwise_convolution_program", &convolution_program, nb::arg("architecture"), nb::arg("multiprocessors"),
             nb::arg("shared_bytes"), nb::arg("shared_bytes_in_all"), nb::arg("conv_pass"), nb::arg("type"),
             nb::arg("relu"), nb::arg("shapes"), nb::arg("layout"),
             "The source and launch parameters for a GPU, which need not exist.");
  module.def("depthwise_weight_gradient_rejection", &rejection_of, nb::arg("device"), nb::arg("type"),
             nb::arg("shapes"), nb::arg("layout"), "Why the kernel does not support a problem; empty if it does.");
  module.def("depthwise_weight_gradient_plan", &plan_of, nb::arg("device"), nb::arg("type"), nb::arg("shapes"),
             nb::arg("layout"), "Compiles and loads the kernels of a problem; returns the bytes of workspace.");
  module.def("depthwise_weight_gradient_program", &program_of, nb::arg("architecture"), nb::arg("multiprocessors"),
             nb::arg("shared_bytes"), nb::arg("shared_bytes_in_all"), nb::arg("type"), nb::arg("shapes"),
             nb::arg("layout"), "The source and launch parameters for a GPU, which need not exist.");
}

}  // namespace jaxgrad

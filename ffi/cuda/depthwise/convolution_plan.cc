#include "cuda/depthwise/convolution_plan.h"

#include <array>
#include <functional>
#include <string>
#include <utility>

#include "cuda/depthwise/convolution_program.h"
#include "cuda/depthwise/gpu.h"
#include "cuda/runtime/device_caches.h"
#include "cuda/runtime/module.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {

// A kernel, loaded on one device. Sizes of the arrays share it.
class DepthwiseConvolutionKernel {
 public:
  DepthwiseConvolutionKernel(const DepthwiseProgram& program, int architecture)
      : module_(nvrtc::compile(program.text(), architecture)),
        function_(module_.function("depthwise_convolution", program.shared_bytes())),
        resident_(driver::resident_blocks(function_, program.threads(), program.shared_bytes())) {}

  CUfunction function() const { return function_; }
  int resident() const { return resident_; }  // blocks per multiprocessor

 private:
  driver::Module module_;
  CUfunction function_;
  int resident_;
};

namespace {

// Of a device.
constexpr size_t kCapacity = 1024;       // plans, which keep kernels loaded
constexpr size_t kKernelCapacity = 128;  // kernels

struct KeyHash {
  size_t operator()(const DepthwiseConvolutionKey& key) const {
    Hash hash;
    hash.mix(static_cast<const ConvProblem&>(key));
    hash.mix(static_cast<int64_t>(key.type));
    hash.mix(key.relu);
    hash.mix(key.device);
    return hash.value();
  }
};

auto& caches() {
  static auto& plans = *new DeviceCaches<DepthwiseConvolutionKey, DepthwiseConvolutionPlan, KeyHash>(kCapacity);
  return plans;
}

std::shared_ptr<const DepthwiseConvolutionKernel> kernel_of(const DepthwiseProgram& program, const Gpu& gpu,
                                                            int device) {
  static auto& loaded =
      *new DeviceCaches<std::string, DepthwiseConvolutionKernel, std::hash<std::string>>(kKernelCapacity);
  return loaded.of(device).get(program.definitions(), [&] {
    return std::make_shared<const DepthwiseConvolutionKernel>(program, gpu.architecture);
  });
}

DepthwiseConvolution convolution_of(const DepthwiseConvolutionKey& key) {
  std::string reason;
  const auto convolution = depthwise_convolution(key, key.type, reason);
  if (!convolution) throw NoPlan("the depthwise kernel does not support this convolution: " + reason);
  return *convolution;
}

DepthwiseProgram program_of(const DepthwiseConvolutionKey& key, const Gpu& gpu) {
  const DepthwiseConvolution convolution = convolution_of(key);
  check_depthwise_gpu(gpu);
  const auto program = DepthwiseProgram::of(convolution, key.relu, gpu);
  if (!program) throw NoPlan("the tiles of the depthwise kernel would be too large for the GPU");
  return *program;
}

std::shared_ptr<const DepthwiseConvolutionPlan> build(const DepthwiseConvolutionKey& key) {
  const Gpu gpu = gpu_of(key.device);
  const DepthwiseProgram program = program_of(key, gpu);
  const driver::RelaxedCapture relaxed;
  const auto kernel = kernel_of(program, gpu, key.device);
  if (kernel->resident() == 0) throw NoPlan("the tiles of the depthwise kernel would be too large for the GPU");
  return std::make_shared<const DepthwiseConvolutionPlan>(program, gpu.multiprocessors, kernel);
}

unsigned narrow(int64_t value) { return static_cast<unsigned>(value); }

}  // namespace

DepthwiseConvolutionPlan::DepthwiseConvolutionPlan(const DepthwiseProgram& program, int64_t multiprocessors,
                                                   std::shared_ptr<const DepthwiseConvolutionKernel> kernel)
    : threads_(program.threads()),
      shared_bytes_(program.shared_bytes()),
      grid_(program.grid(multiprocessors, kernel->resident())),
      kernel_(std::move(kernel)) {}

void DepthwiseConvolutionPlan::run(CUstream stream, const void* in, const void* w, const void* bias, void* out) const {
  DepthwiseArguments arguments = grid_.arguments;
  if (arguments.items == 0) return;
  std::array<void*, 5> parameters = {&in, &w, &bias, &out, &arguments};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(kernel_->function(), narrow(grid_.chunks), narrow(grid_.shares), 1,
                                              narrow(threads_), 1, 1, narrow(shared_bytes_), stream, parameters.data(),
                                              nullptr));
}

void check_depthwise_convolution(const DepthwiseConvolutionKey& key) { program_of(key, gpu_of(key.device)); }

std::shared_ptr<const DepthwiseConvolutionPlan> depthwise_convolution_plan(const DepthwiseConvolutionKey& key) {
  return caches().of(key.device).get(key, [&] { return build(key); });
}

CacheInfo depthwise_convolution_plan_cache_info() { return caches().info(); }

}  // namespace jaxgrad

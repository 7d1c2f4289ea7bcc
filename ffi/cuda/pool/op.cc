#include "cuda/pool/op.h"

#include <functional>
#include <limits>

#include "cuda/pool/max_source.h"
#include "cuda/pool/sum_source.h"
#include "cuda/runtime/device_caches.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/module.h"
#include "cuda/runtime/no_plan.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {
namespace {

constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max();  // the kernels use 32-bit indices
constexpr int64_t kMaxTaps = 65535;                                    // the largest number stands for padding
constexpr int64_t kVectorBytes = 16;
constexpr int64_t kMaxUnrolled = 8;  // elements of a row of a window
constexpr size_t kKernelCapacity = 128;

int64_t elements(const PoolShape& s, const int64_t (&sizes)[kPoolAxes]) {
  int64_t found = 1;
  for (const int64_t size : {s.outer, sizes[0], sizes[1], sizes[2], s.channels}) {
    if (size > 0 && found > kMaxElements / size)
      throw NoPlan("the pooling kernels take arrays of fewer than 2^31 elements");
    found *= size;
  }
  return found;
}

int narrow(int64_t value) {
  if (value > kMaxElements / 4) throw NoPlan("the pooling kernels take smaller windows, strides and padding");
  return static_cast<int>(value);
}

bool is_maximum(PoolPass pass) { return pass != PoolPass::kSum && pass != PoolPass::kSumInputGradient; }

// As many channels as a thread can load at a time.
int64_t vector_of(const PoolKey& key) {
  int64_t vector = kVectorBytes / bytes_of(key.type);
  while (key.shape.channels % vector != 0) vector /= 2;
  return vector;
}

std::string definitions_of(const PoolKey& key) {
  const PoolShape& s = key.shape;
  const bool is_wide = key.type == FloatType::kFloat64;
  const char* const element = is_wide ? "double" : key.type == FloatType::kFloat32 ? "float" : "Half";
  std::string text;
  const auto define = [&](const std::string& name, const std::string& value) {
    text += "#define " + name + " " + value + "\n";
  };
  define("ELEMENT_IS_BFLOAT16", key.type == FloatType::kBFloat16 ? "1" : "0");
  define("ELEMENT", element);
  define("WIDE", is_wide ? "double" : "float");
  define("VECTOR", std::to_string(vector_of(key)));
  if (is_maximum(key.pass)) define("TAP", s.taps() < 255 ? "unsigned char" : "unsigned short");
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    const std::string number = std::to_string(axis);
    define("SIZE_" + number, std::to_string(narrow(s.window[axis])));
    define("STRIDE_" + number, std::to_string(narrow(s.strides[axis])));
    define("DILATION_" + number, std::to_string(narrow(s.dilation[axis])));
    narrow(s.window[axis] * narrow(s.dilation[axis]));
    narrow(s.y[axis] * narrow(s.strides[axis]));
  }
  define("UNROLLED", std::to_string(s.window[2] <= kMaxUnrolled ? s.window[2] : 1));
  return text;
}

std::vector<const char*> kernels_of(PoolPass pass) {
  switch (pass) {
    case PoolPass::kMax:
      return {"max_pool_forward"};
    case PoolPass::kMaxInputGradient:
      return {"max_pool_select", "max_pool_gather"};
    case PoolPass::kMaxTangent:
      return {"max_pool_tangent"};
    case PoolPass::kSum:
      return {"sum_pool_forward"};
    case PoolPass::kSumInputGradient:
      return {"sum_pool_input_gradient"};
  }
  throw NoPlan("the pooling pass is unknown");
}

}  // namespace

class PoolKernels {
 public:
  PoolKernels(const PoolProgram& program, int device)
      : module_(nvrtc::compile(program.definitions + kDeviceSource + program.source, driver::architecture(device))) {
    for (const PoolProgram::Launch& launch : program.launches) functions_.push_back(module_.function(launch.kernel));
  }

  CUfunction function(size_t launch) const { return functions_[launch]; }

 private:
  driver::Module module_;
  std::vector<CUfunction> functions_;
};

PoolProgram pool_program(const PoolKey& key) {
  const PoolShape& s = key.shape;
  if (s.window[0] > kMaxTaps || s.window[1] > kMaxTaps || s.window[2] > kMaxTaps ||
      s.window[0] * s.window[1] > kMaxTaps || s.taps() >= kMaxTaps)
    throw NoPlan("the pooling kernels take windows of fewer than 65535 elements");
  const int64_t x = elements(s, s.x), y = elements(s, s.y), vector = vector_of(key);
  PoolArguments arguments{};
  arguments.channels = static_cast<unsigned>(s.channels / vector);
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    arguments.x[axis] = static_cast<unsigned>(s.x[axis]);
    arguments.y[axis] = static_cast<unsigned>(s.y[axis]);
    arguments.padding[axis] = narrow(s.padding[axis]);
  }
  PoolProgram program{definitions_of(key), is_maximum(key.pass) ? kMaxPoolSource : kSumPoolSource, {}, 0};
  for (const char* kernel : kernels_of(key.pass)) {
    const bool writes_dx = returns_dx(key.pass) && kernel != std::string("max_pool_select");
    arguments.vectors = static_cast<unsigned>((writes_dx ? x : y) / vector);
    program.launches.push_back({kernel, arguments, (arguments.vectors + kPoolThreads - 1) / kPoolThreads});
  }
  if (key.pass == PoolPass::kMaxInputGradient) program.workspace_bytes = y * (s.taps() < 255 ? 1 : 2);
  return program;
}

std::shared_ptr<const PoolKernels> load_pool_kernels(const PoolProgram& program, int device) {
  static auto& loaded = *new DeviceCaches<std::string, PoolKernels, std::hash<std::string>>(kKernelCapacity);
  const std::string key = program.definitions + program.launches.front().kernel;
  return loaded.of(device).get(key, [&] {
    const driver::RelaxedCapture relaxed;
    return std::make_shared<const PoolKernels>(program, device);
  });
}

void pool(CUstream stream, const PoolProgram& program, const PoolKernels& kernels, PoolPass pass, const void* x,
          const void* second, void* result, void* workspace) {
  for (size_t i = 0; i < program.launches.size(); ++i) {
    const PoolProgram::Launch& launch = program.launches[i];
    if (launch.blocks == 0) continue;
    const bool gathers = pass == PoolPass::kMaxInputGradient && i == 1;
    const bool selects = pass == PoolPass::kMaxInputGradient && i == 0;
    std::vector<const void*> arrays;
    if (gathers) {
      arrays = {workspace, second, result};
    } else {
      if (reads_x(pass)) arrays.push_back(x);
      if (second != nullptr && !selects) arrays.push_back(second);
      arrays.push_back(selects ? workspace : result);
    }
    PoolArguments arguments = launch.arguments;
    std::vector<void*> parameters;
    for (const void*& array : arrays) parameters.push_back(&array);
    parameters.push_back(&arguments);
    JAXGRAD_DRIVER(driver::api().cuLaunchKernel(kernels.function(i), launch.blocks, 1, 1, kPoolThreads, 1, 1, 0, stream,
                                                parameters.data(), nullptr));
  }
}

}  // namespace jaxgrad

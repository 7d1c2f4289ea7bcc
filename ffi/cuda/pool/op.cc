#include "cuda/pool/op.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#include "cuda/pool/max_forward_source.h"
#include "cuda/pool/max_gather_source.h"
#include "cuda/pool/max_scatter_source.h"
#include "cuda/pool/max_tangent_source.h"
#include "cuda/pool/sum_forward_source.h"
#include "cuda/pool/sum_gather_source.h"
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
constexpr int64_t kMaxSums = 64;      // of a thread, in registers
constexpr int64_t kMaxUnrolled = 64;  // bodies of loops
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

// What a thread computes; see windows.cuh.
struct Tiling {
  int64_t vector;  // as many channels as a thread can load at a time
  int64_t rows = 1, own[kPoolAxes] = {1, 1, 1};
  bool unrolled;
  bool overlaps = false;  // some windows share elements of x

  explicit Tiling(const PoolKey& key) : vector(kVectorBytes / bytes_of(key.type)) {
    const PoolShape& s = key.shape;
    while (s.channels % vector != 0) vector /= 2;
    int64_t room = kMaxSums / vector, windows = 1;
    bool owns_strides = true;
    for (int axis = kPoolAxes - 1; axis >= 0; --axis) {
      if (s.strides[axis] <= room) own[axis] = s.strides[axis];
      owns_strides = owns_strides && own[axis] == s.strides[axis];
      room /= own[axis];
      const int64_t each = ((s.window[axis] - 1) * s.dilation[axis] + s.strides[axis]) / s.strides[axis];
      overlaps = overlaps || each > 1;
      windows = windows > kMaxUnrolled ? windows : windows * each;
    }
    overlaps = overlaps || !owns_strides;  // the elements of a window have several threads
    if (s.dilation[1] == 1 && s.window[1] > s.strides[1] && s.y[1] > 1 &&
        (key.pass != PoolPass::kMaxInputGradient || overlaps))
      rows = 2;
    const int64_t elements = ((rows - 1) * s.strides[1] + s.window[1]) * s.window[0] * s.window[2];
    unrolled = elements <= kMaxUnrolled && windows * own[0] * own[1] * own[2] <= kMaxUnrolled;
  }
};

std::string definitions_of(const PoolKey& key, const Tiling& tiling) {
  const PoolShape& s = key.shape;
  const bool is_wide = key.type == FloatType::kFloat64;
  std::string text;
  const auto define = [&](const std::string& name, const auto& value) {
    if constexpr (std::is_convertible_v<decltype(value), std::string>) {
      text += "#define " + name + " " + value + "\n";
    } else {
      text += "#define " + name + " " + std::to_string(value) + "\n";
    }
  };
  define("ELEMENT_IS_BFLOAT16", key.type == FloatType::kBFloat16 ? 1 : 0);
  define("ELEMENT", is_wide ? "double" : key.type == FloatType::kFloat32 ? "float" : "Half");
  define("WIDE", is_wide ? "double" : "float");
  define("VECTOR", tiling.vector);
  define("ROWS", tiling.rows);
  define("UNROLLED", tiling.unrolled ? 1 : 0);
  if (is_maximum(key.pass)) {
    define("TAP", s.taps() < 255 ? "unsigned char" : "unsigned short");
  } else {
    define("DIVISOR", key.divisor);
  }
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    const std::string number = std::to_string(axis);
    define("SIZE_" + number, narrow(s.window[axis]));
    define("STRIDE_" + number, narrow(s.strides[axis]));
    define("DILATION_" + number, narrow(s.dilation[axis]));
    define("OWN_" + number, tiling.own[axis]);
    narrow(s.window[axis] * narrow(s.dilation[axis]));
    narrow((s.y[axis] + 1) * narrow(s.strides[axis]));
  }
  return text;
}

// The launch of a kernel whose threads compute blocks of windows, or of elements of x.
PoolProgram::Launch launch_of(const PoolKey& key, const Tiling& tiling, const char* kernel, bool of_elements) {
  const PoolShape& s = key.shape;
  PoolArguments arguments{};
  const int64_t channels = s.channels / tiling.vector;
  arguments.channels = divisor(static_cast<unsigned>(std::max<int64_t>(1, channels)));
  int64_t threads = s.outer * channels;
  for (int axis = 0; axis < kPoolAxes; ++axis) {
    arguments.x[axis] = static_cast<unsigned>(s.x[axis]);
    arguments.y[axis] = static_cast<unsigned>(s.y[axis]);
    arguments.padding[axis] = narrow(s.padding[axis]);
    const int64_t own = tiling.own[axis], rows = axis == 1 ? tiling.rows : 1;
    int64_t blocks = (s.y[axis] + rows - 1) / rows;
    if (of_elements) blocks = own == s.strides[axis] ? (s.x[axis] + s.padding[axis] + own - 1) / own : s.x[axis];
    arguments.blocks[axis] = divisor(static_cast<unsigned>(std::max<int64_t>(1, blocks)));
    if (blocks > 0 && threads > kMaxElements / blocks) throw NoPlan("the pooling kernels take less padding");
    threads *= blocks;
  }
  arguments.threads = static_cast<unsigned>(threads);
  return {kernel, arguments, (arguments.threads + kPoolThreads - 1) / kPoolThreads};
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
  elements(s, s.x);
  const int64_t y = elements(s, s.y);
  const Tiling tiling(key);
  const auto program = [&](const char* source, std::vector<PoolProgram::Launch> launches, int64_t workspace_bytes = 0) {
    return PoolProgram{definitions_of(key, tiling), source, std::move(launches), workspace_bytes};
  };
  const auto launch = [&](const char* kernel, bool of_elements) { return launch_of(key, tiling, kernel, of_elements); };
  switch (key.pass) {
    case PoolPass::kMax:
      return program(kMaxForwardSource, {launch("max_pool_forward", false)});
    case PoolPass::kMaxInputGradient:
      if (!tiling.overlaps) return program(kMaxScatterSource, {launch("max_pool_scatter", true)});
      return program(kMaxGatherSource, {launch("max_pool_select", false), launch("max_pool_gather", true)},
                     y * (s.taps() < 255 ? 1 : 2));
    case PoolPass::kMaxTangent:
      return program(kMaxTangentSource, {launch("max_pool_tangent", false)});
    case PoolPass::kSum:
      return program(kSumForwardSource, {launch("sum_pool_forward", false)});
    case PoolPass::kSumInputGradient:
      return program(kSumGatherSource, {launch("sum_pool_gather", true)});
  }
  throw NoPlan("the pooling pass is unknown");
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
    const bool selects = program.launches.size() > 1 && i == 0, gathers = i == 1;
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

#include "cuda/conv_reference/op.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>

#include "common/lru_cache.h"
#include "cuda/conv_reference/kernel_source.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {
namespace {

constexpr int64_t kMinSamples = 64, kMaxSamples = 512;
constexpr int64_t kMaxProducts = 1 << 25;  // of all samples, but for sums of more than a few 100,000: a millisecond
constexpr unsigned kFillBlocks = 1024;

const char* name_of(FloatType type) {
  switch (type) {
    case FloatType::kFloat32:
      return "f32";
    case FloatType::kFloat64:
      return "f64";
    case FloatType::kBFloat16:
      return "bf16";
    case FloatType::kFloat16:
      return "f16";
  }
  throw std::invalid_argument("unknown floating-point type");
}

template <class... Arguments>
void launch(CUfunction function, unsigned blocks, CUstream stream, Arguments... arguments) {
  std::array<void*, sizeof...(arguments)> pointers = {&arguments...};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(function, blocks, 1, 1, kReferenceThreads, 1, 1, 0, stream,
                                              pointers.data(), nullptr));
}

int64_t product(const ConvAxes& sizes, int first, int axes) {
  int64_t count = 1;
  for (int axis = first; axis < axes; ++axis) count *= sizes[axis];
  return count;
}

ReferenceOperand reference_operand(const ConvOperand& operand, int axes) {
  ReferenceOperand made;
  for (int axis = 0; axis < 5; ++axis) {
    made.sizes[axis] = axis < axes ? operand.sizes[axis] : 1;
    made.strides[axis] = axis < axes ? operand.strides[axis] : 0;
  }
  return made;
}

}  // namespace

const ConvOperand& result_of(const ConvProblem& problem) {
  return problem.pass == ConvPass::kForward         ? problem.y
         : problem.pass == ConvPass::kInputGradient ? problem.x
                                                    : problem.w;
}

int64_t terms_of(const ConvProblem& problem) {
  const int axes = problem.spatial + 2;
  switch (problem.pass) {
    case ConvPass::kForward:
      return product(problem.w.sizes, 1, axes);
    case ConvPass::kInputGradient:
      return problem.w.sizes[0] / problem.groups * product(problem.w.sizes, 2, axes);
    default:
      return problem.y.sizes[0] * product(problem.y.sizes, 2, axes);
  }
}

ReferenceProblem reference_problem(const ConvProblem& problem) {
  const int axes = problem.spatial + 2;
  ReferenceProblem made{};
  made.pass = static_cast<int>(problem.pass);
  made.groups = problem.groups;
  made.x = reference_operand(problem.x, axes);
  made.w = reference_operand(problem.w, axes);
  made.y = reference_operand(problem.y, axes);
  for (int axis = 0; axis < kMaxSpatial; ++axis) {
    const bool present = axis < problem.spatial;
    made.window_strides[axis] = present ? problem.window_strides[axis] : 1;
    made.rhs_dilation[axis] = present ? problem.rhs_dilation[axis] : 1;
    made.padding_low[axis] = present ? problem.padding_low[axis] : 0;
  }
  return made;
}

std::string reference_kernel(const char* name, FloatType type) { return std::string(name) + "_" + name_of(type); }

std::string reference_definitions(FloatType type) {
  const char* const c_type = type == FloatType::kFloat64   ? "double"
                             : type == FloatType::kFloat32 ? "float"
                                                           : "unsigned short";
  return "#define ELEMENT_IS_BFLOAT16 " + std::to_string(type == FloatType::kBFloat16) + "\n#define T " + c_type +
         "\n#define KERNEL(name) name##_" + name_of(type) + "\n";
}

std::vector<int64_t> sampled_elements(const ConvProblem& problem) {
  const int axes = problem.spatial + 2;
  const ConvAxes& sizes = result_of(problem).sizes;
  const int64_t elements = product(sizes, 0, axes);
  const int64_t count = std::clamp(kMaxProducts / terms_of(problem), kMinSamples, kMaxSamples);
  std::vector<int64_t> samples;
  if (elements <= count) {
    for (int64_t element = 0; element < elements; ++element) samples.push_back(element);
    return samples;
  }
  std::mt19937_64 random;  // seeded alike in every process
  const auto below = [&](int64_t size) { return static_cast<int64_t>(random() % static_cast<uint64_t>(size)); };
  const auto add = [&](const ConvAxes& index) {
    int64_t element = 0;
    for (int axis = 0; axis < axes; ++axis) element = element * sizes[axis] + index[axis];
    samples.push_back(element);
  };
  ConvAxes index{};
  for (int corner = 0; corner < 1 << axes; ++corner) {
    for (int axis = 0; axis < axes; ++axis) index[axis] = (corner >> axis & 1) != 0 ? sizes[axis] - 1 : 0;
    add(index);
  }
  // The axis of features that the groups divide: the output features of y and w, the input features of x.
  const int grouped = problem.pass == ConvPass::kWeightGradient ? 0 : 1;
  const int64_t group = sizes[grouped] / problem.groups;
  while (static_cast<int64_t>(samples.size()) < count) {
    for (int axis = 0; axis < axes; ++axis) index[axis] = below(sizes[axis]);
    // Every output feature, or input feature of x, as far as the samples go.
    index[grouped] = static_cast<int64_t>(samples.size() / (problem.groups > 1 ? 2 : 1)) % sizes[grouped];
    if (samples.size() % 4 != 0) {  // three of four are near an edge, or, every other time, at the border of a group
      const int axis = static_cast<int>(below(axes));
      if (problem.groups > 1 && samples.size() % 2 != 0) {
        const int64_t first = below(problem.groups) * group;
        index[grouped] = first + (random() % 2 == 0 ? 0 : group - 1);
      }
      if (axis != grouped) {
        const int64_t distance = std::min(below(3), sizes[axis] - 1);
        index[axis] = random() % 2 == 0 ? distance : sizes[axis] - 1 - distance;
      }
    }
    add(index);
  }
  return samples;
}

ReferenceKernels::ReferenceKernels(FloatType type, int architecture)
    : module_(nvrtc::compile(reference_definitions(type) + kDeviceSource + kReferenceSource, architecture)),
      fill_(module_.function(reference_kernel("reference_fill", type).c_str())),
      sums_(module_.function(reference_kernel("reference_sums", type).c_str())),
      gather_(module_.function(reference_kernel("reference_gather", type).c_str())) {}

void ReferenceKernels::fill(CUstream stream, void* array, int64_t count, int digits, uint64_t seed) const {
  const auto blocks = std::clamp<int64_t>(count / kReferenceThreads, 1, kFillBlocks);
  launch(fill_, static_cast<unsigned>(blocks), stream, array, static_cast<long long>(count), digits,
         static_cast<unsigned long long>(seed));
}

void ReferenceKernels::sums(CUstream stream, const ReferenceProblem& problem, const void* x, const void* w,
                            const void* y, const void* bias, const int64_t* samples, int count, double* sums) const {
  launch(sums_, static_cast<unsigned>(count) * kReferenceParts, stream, x, w, y, bias, samples, sums, problem);
}

void ReferenceKernels::gather(CUstream stream, const ReferenceProblem& problem, const void* result,
                              const int64_t* samples, int count, double* values) const {
  const auto blocks = static_cast<unsigned>((count + kReferenceThreads - 1) / kReferenceThreads);
  launch(gather_, blocks, stream, result, samples, static_cast<unsigned>(count), values, problem);
}

std::shared_ptr<const ReferenceKernels> reference_kernels(FloatType type, int device) {
  using Key = int64_t;
  static auto& loaded = *new LruCache<Key, ReferenceKernels, std::hash<Key>>(std::numeric_limits<size_t>::max());
  static auto& missing = *new std::set<int>;  // devices that NVRTC cannot compile the kernels for
  static std::mutex mutex;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (missing.count(device) > 0) return nullptr;
  }
  try {
    return loaded.get(4 * static_cast<Key>(device) + static_cast<Key>(type),
                      [&] { return std::make_shared<const ReferenceKernels>(type, driver::architecture(device)); });
  } catch (const nvrtc::Error&) {
    if (!nvrtc::version().empty()) {  // the library is there; otherwise it may still be loaded from another place
      const std::lock_guard<std::mutex> lock(mutex);
      missing.insert(device);
    }
    return nullptr;
  } catch (const driver::Error&) {
    throw;
  } catch (const std::runtime_error&) {  // of NVRTC, and may pass
    return nullptr;
  }
}

}  // namespace jaxgrad

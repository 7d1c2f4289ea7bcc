// Runs jaxgrad's own CUDA kernels without JAX, so that compute-sanitizer can watch them. .ci/gpu runs it.
//
//   gpu_kernels [PATH_OF_NVRTC [depthwise | gru | gru-blocks | transpose]...]   exits with 1 if a result is wrong
//
// All arrays have exactly the sizes of the call.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/conv_problem.h"
#include "cuda/depthwise/convolution_plan.h"
#include "cuda/depthwise/weight_gradient_plan.h"
#include "cuda/reference/op.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/nvrtc.h"
#include "cuda/transpose/op.h"
#include "gpu_kernels_gru.h"

namespace jaxgrad {
namespace {

constexpr int kDevice = 0;
constexpr int kDigits = 4;  // of random operands: few, so that products in 16 bits are exact
constexpr std::array<FloatType, 3> kTypes = {FloatType::kFloat32, FloatType::kBFloat16, FloatType::kFloat16};

int failures = 0;

void report(const std::string& what, double error, double allowed) {
  const bool right = error <= allowed;
  std::printf("%-60s %s (%.2g, allowed %.2g)\n", what.c_str(), right ? "right" : "WRONG", error, allowed);
  failures += right ? 0 : 1;
}

int64_t elements_of(const ConvOperand& operand) {
  return std::accumulate(operand.sizes.begin(), operand.sizes.end(), int64_t{1},
                         [](int64_t product, int64_t size) { return product * std::max<int64_t>(size, 1); });
}

// A depthwise convolution in channels last, with a window of `window` on each axis.
ConvProblem depthwise_problem(const std::vector<int64_t>& spatial, int64_t batch, int64_t features, int64_t window,
                              int64_t stride, int64_t dilation, int64_t low, int64_t high, ConvPass pass) {
  const auto axes = static_cast<int64_t>(spatial.size());
  ConvArguments a;
  a.x = {batch};
  a.y = {batch};
  for (const int64_t size : spatial) {
    a.x.push_back(size);
    a.y.push_back((size + low + high - (window - 1) * dilation - 1) / stride + 1);
    a.w.push_back(window);
    a.window_strides.push_back(stride);
    a.rhs_dilation.push_back(dilation);
    a.padding.insert(a.padding.end(), {low, high});
  }
  a.x.push_back(features);
  a.y.push_back(features);
  a.w.insert(a.w.end(), {1, features});
  a.lhs_spec = {0, axes + 1};
  a.rhs_spec = {axes + 1, axes};
  for (int64_t axis = 0; axis < axes; ++axis) {
    a.lhs_spec.push_back(axis + 1);
    a.rhs_spec.push_back(axis);
  }
  a.out_spec = a.lhs_spec;
  a.feature_group_count = features;
  std::string error;
  ConvProblem problem = make_conv_problem(pass, a, error);
  if (!error.empty()) throw std::runtime_error(error);
  return problem;
}

// Sets the members that the keys of both kinds of plans share.
template <class Key>
Key key_of(const ConvProblem& problem, FloatType type) {
  Key key;
  static_cast<ConvProblem&>(key) = problem;
  key.type = type;
  key.device = kDevice;
  return key;
}

// Computes one of x, w and y by the kernels of depthwise/ and returns its data.
const void* run_depthwise(const ConvProblem& problem, FloatType type, const driver::Memory& x, const driver::Memory& w,
                          const driver::Memory& y, CUstream stream) {
  if (problem.pass == ConvPass::kWeightGradient) {
    const auto plan = depthwise_plan(key_of<DepthwiseKey>(problem, type));
    const driver::Memory workspace(plan->workspace_bytes());
    plan->run(stream, x.data(), y.data(), w.data(), workspace.data());
    JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));  // before the workspace is freed
    return w.data();
  }
  const bool is_forward = problem.pass == ConvPass::kForward;
  const void* const in = is_forward ? x.data() : y.data();
  void* const out = is_forward ? y.data() : x.data();
  depthwise_convolution_plan(key_of<DepthwiseConvolutionKey>(problem, type))->run(stream, in, w.data(), nullptr, out);
  return out;
}

// The kernels of depthwise/ against those of reference/, on the samples of the latter. With `infinite`, the first
// element of x, or of y for an input gradient, is infinite.
void check_depthwise(const std::string& name, const ConvProblem& problem, FloatType type, CUstream stream,
                     bool infinite = false) {
  const auto reference = reference_kernels(type, kDevice);
  if (reference == nullptr) throw std::runtime_error("NVRTC does not compile the reference");
  const int64_t bytes = bytes_of(type);
  driver::Memory x(elements_of(problem.x) * bytes), y(elements_of(problem.y) * bytes);
  const driver::Memory w(elements_of(problem.w) * bytes);
  const auto fill = [&](const driver::Memory& array, const ConvOperand& operand, uint64_t seed) {
    reference->fill(stream, array.data(), elements_of(operand), kDigits, seed);
  };
  if (problem.pass != ConvPass::kInputGradient) fill(x, problem.x, 1);
  if (problem.pass != ConvPass::kForward) fill(y, problem.y, 2);
  if (problem.pass != ConvPass::kWeightGradient) fill(w, problem.w, 3);
  const uint32_t infinity = type == FloatType::kFloat32 ? 0x7f800000 : type == FloatType::kBFloat16 ? 0x7f80 : 0x7c00;
  if (infinite) (problem.pass == ConvPass::kInputGradient ? y : x).write(&infinity, static_cast<size_t>(bytes), stream);
  const void* const result = run_depthwise(problem, type, x, w, y, stream);

  const std::vector<int64_t> samples = sampled_elements(problem);
  const auto count = static_cast<int>(samples.size());
  std::vector<double> parts(samples.size() * kReferenceParts * 2), found(samples.size());
  driver::Memory places(static_cast<int64_t>(samples.size() * sizeof(int64_t)));
  const driver::Memory sums(static_cast<int64_t>(parts.size() * sizeof(double)));
  const driver::Memory values(static_cast<int64_t>(found.size() * sizeof(double)));
  places.write(samples.data(), samples.size() * sizeof(int64_t), stream);
  const ReferenceProblem described = reference_problem(problem);
  const auto* const at = static_cast<const int64_t*>(places.data());
  reference->sums(stream, described, x.data(), w.data(), y.data(), nullptr, at, count,
                  static_cast<double*>(sums.data()));
  reference->gather(stream, described, result, at, count, static_cast<double*>(values.data()));
  sums.read(parts.data(), parts.size() * sizeof(double), stream);
  values.read(found.data(), found.size() * sizeof(double), stream);
  JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));
  double largest = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    double expected = 0, absolute = 1e-30;
    for (size_t part = 0; part < kReferenceParts; ++part) {
      expected += parts[2 * (i * kReferenceParts + part)];
      absolute += parts[2 * (i * kReferenceParts + part) + 1];
    }
    const double error = std::isfinite(expected)   ? std::abs(found[i] - expected) / absolute
                         : std::isfinite(found[i]) ? INFINITY
                                                   : 0;
    largest = error <= largest ? largest : std::isnan(error) ? INFINITY : error;
  }
  const double allowed = type == FloatType::kFloat32 ? 1e-6 : type == FloatType::kFloat16 ? 1e-3 : 8e-3;
  const char* const pass = problem.pass == ConvPass::kForward         ? "forward"
                           : problem.pass == ConvPass::kInputGradient ? "input gradient"
                                                                      : "weight gradient";
  report(std::string("depthwise ") + pass + ", " + name + ", " + std::to_string(8 * bytes) + " bits", largest, allowed);
}

// An array [sizes], in row-major order, to one with the axes in the order of `to_spec`, some of them reversed.
void check_transpose(const std::vector<int64_t>& sizes, const std::vector<int64_t>& to_spec,
                     const std::vector<int64_t>& reversed, int64_t element_bytes, CUstream stream) {
  std::vector<int64_t> from_spec(sizes.size());
  std::iota(from_spec.begin(), from_spec.end(), 0);
  if (!transpose_supported(sizes, from_spec, to_spec, reversed)) throw std::runtime_error("unsupported transpose");
  ConvOperand from, to;
  const auto strides = [&](const std::vector<int64_t>& spec, ConvOperand& operand) {
    int64_t stride = 1;
    std::copy(sizes.begin(), sizes.end(), operand.sizes.begin());
    for (size_t position = spec.size(); position-- > 0;)
      for (size_t axis = 0; axis < spec.size(); ++axis)
        if (spec[axis] == static_cast<int64_t>(position)) {
          operand.strides[axis] = stride;
          stride *= sizes[axis];
        }
    return stride;
  };
  const int64_t count = strides(from_spec, from);
  strides(to_spec, to);
  const ConvOperand dense = to;
  for (const int64_t axis : reversed) to.strides[static_cast<size_t>(axis)] *= -1;

  const auto bytes = static_cast<size_t>(count * element_bytes);
  std::vector<unsigned char> in(bytes), out(bytes), expected(bytes);
  std::mt19937 random(static_cast<unsigned>(count));
  for (unsigned char& byte : in) byte = static_cast<unsigned char>(random());
  for (int64_t i = 0; i < count; ++i) {
    int64_t place = 0;
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      int64_t at = i / from.strides[axis] % sizes[axis];
      if (std::find(reversed.begin(), reversed.end(), static_cast<int64_t>(axis)) != reversed.end())
        at = sizes[axis] - 1 - at;
      place += at * dense.strides[axis];
    }
    std::copy_n(in.begin() + i * element_bytes, element_bytes, expected.begin() + place * element_bytes);
  }
  driver::Memory given(count * element_bytes);
  const driver::Memory result(count * element_bytes);
  given.write(in.data(), bytes, stream);
  transpose(stream, kDevice, static_cast<int>(sizes.size()), element_bytes, from, given.data(), to, result.data());
  result.read(out.data(), bytes, stream);
  JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));
  int64_t wrong = 0;
  for (size_t i = 0; i < bytes; ++i) wrong += out[i] != expected[i];
  std::string name = "transpose of " + std::to_string(element_bytes) + "-byte elements";
  for (const int64_t size : sizes) name += " " + std::to_string(size);
  report(name, static_cast<double>(wrong), 0);
}

// Blocks that multiply in float32; or those on tensor cores, clusters, teams, and pairs of their blocks, on a GPU of
// compute capability 9.0 with 100 to 150 multiprocessors.
void check_gru(bool of_blocks, FloatType type, bool allow_tf32, bool linear, CUstream stream) {
  const bool is_tf32 = allow_tf32 && type == FloatType::kFloat32;
  const double allowed = type == FloatType::kBFloat16  ? 2e-2
                         : type == FloatType::kFloat16 ? 3e-3
                         : is_tf32                     ? 3e-3
                                                       : 5e-6;
  const auto check = [&](const char* name, int T, int B, int H, int D, int groups, GruHolder holder,
                         int rows_of_block = 0, int rows_of_backward_block = 0) {
    const GruCase call = {type, allow_tf32, linear, T, B, H, D, groups, holder, rows_of_block, rows_of_backward_block};
    double error = INFINITY;
    try {
      error = gru_error(call, kDevice, stream);
    } catch (const NoPlan& reason) {
      std::printf("%s\n", reason.what());
    }
    const std::string settings = std::string(is_tf32 ? ", TF32" : "") + (linear ? ", linear before reset" : "");
    report(std::string("GRU, ") + name + ", " + std::to_string(8 * bytes_of(type)) + " bits" + settings, error,
           allowed);
  };
  if (of_blocks) {
    check("block", 7, 5, 43, 2, 2, GruHolder::kBlock, 1);
    check("block of two rows", 4, 90, 90, 2, 1, GruHolder::kBlock, 2);
    check("block of four rows", 3, 701, 20, 1, 1, GruHolder::kBlock, 4);
    check("block that takes registers", 5, 9, 103, 2, 2, GruHolder::kBlock, 1);
    return;
  }
  if (type != FloatType::kFloat32 || allow_tf32) {
    check("tensor block", 4, 400, 120, 2, 1, GruHolder::kTensorBlock, 8);
    check("tensor block, 64 units", 3, 600, 50, 2, 1, GruHolder::kTensorBlock, 8);
    check("cluster of four blocks", 4, 165, 120, 2, 1, GruHolder::kCluster);
    check("tensor blocks in turn", 4, 707, 101, 2, 2, GruHolder::kTensorBlock, 16, is_tf32 && linear ? 8 : 16);
  }
  check("cluster", 4, 17, 200, 1, 1, GruHolder::kCluster);
  check("teams", 11, 20, 300, 2, 1, GruHolder::kTeam);
}

void check_depthwise_passes(FloatType type, CUstream stream) {
  for (const ConvPass pass : {ConvPass::kForward, ConvPass::kInputGradient, ConvPass::kWeightGradient}) {
    const auto check = [&](const char* name, const std::vector<int64_t>& spatial, int64_t batch, int64_t features,
                           int64_t window, int64_t stride, int64_t dilation, int64_t low, int64_t high,
                           bool infinite = false) {
      const ConvProblem problem =
          depthwise_problem(spatial, batch, features, window, stride, dilation, low, high, pass);
      check_depthwise(name, problem, type, stream, infinite);
    };
    check("1D", {301}, 3, 40, 31, 1, 1, 15, 15);
    check("1D causal", {77}, 2, 12, 4, 1, 2, 6, 0);
    check("2D 3x3", {19, 23}, 5, 72, 3, 1, 1, 1, 1);
    check("2D 3x3 strides", {33, 30}, 3, 96, 3, 2, 1, 0, 1);
    check("2D 7x7", {14, 17}, 4, 34, 7, 1, 1, 3, 3);
    check("2D 5x5 dilation", {21, 16}, 2, 8, 5, 1, 2, 4, 4);
    check("2D 11x11", {18, 15}, 2, 24, 11, 1, 1, 5, 5);
    check("2D 13x13", {33, 40}, 2, 48, 13, 1, 1, 6, 6);
    check("2D 31x31", {21, 30}, 2, 24, 31, 1, 1, 15, 15);
    check("2D 21x21", {29, 28}, 2, 40, 21, 1, 1, 10, 10);
    check("2D 9x9", {14, 14}, 32, 384, 9, 1, 1, 4, 4);
    check("2D 13x13, several items of a block", {40, 40}, 9, 1040, 13, 1, 1, 6, 6);
    if (pass != ConvPass::kWeightGradient)
      check("2D 13x13, infinite", {33, 40}, 2, 48, 13, 1, 1, 6, 6, /*infinite=*/true);
    check("3D", {6, 11, 9}, 2, 20, 3, 1, 1, 1, 1);
    check("3D strides", {7, 12, 9}, 2, 12, 3, 2, 1, 0, 1);
  }
}

int run(int arguments, char** argument) {
  const driver::CurrentDevice current(kDevice);
  nvrtc::load(arguments > 1 ? std::vector<std::string>{argument[1]} : std::vector<std::string>());
  driver::Stopwatch watch;
  const CUstream stream = watch.stream();
  const auto runs = [&](const char* part) {
    return arguments < 3 ||
           std::any_of(argument + 2, argument + arguments, [&](const char* name) { return std::string(name) == part; });
  };
  for (const FloatType type : kTypes)
    if (runs("depthwise")) check_depthwise_passes(type, stream);
  for (const bool of_blocks : {false, true})
    for (const bool linear : {false, true}) {
      if (!runs(of_blocks ? "gru-blocks" : "gru")) break;
      for (const FloatType type : kTypes) check_gru(of_blocks, type, /*allow_tf32=*/false, linear, stream);
      check_gru(of_blocks, FloatType::kFloat32, /*allow_tf32=*/true, linear, stream);
    }
  for (const int64_t bytes : {2, 4, 8}) {
    if (!runs("transpose")) break;
    check_transpose({65, 130}, {1, 0}, {}, bytes, stream);
    check_transpose({7, 3, 3, 258}, {3, 1, 2, 0}, {1, 2}, bytes, stream);
    check_transpose({300, 5, 9}, {2, 0, 1}, {}, bytes, stream);
    check_transpose({64, 3, 3, 128}, {3, 0, 1, 2}, {}, bytes, stream);
    check_transpose({12, 5, 7, 36}, {0, 2, 1, 3}, {1}, bytes, stream);
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jaxgrad

int main(int arguments, char** argument) {
  try {
    return jaxgrad::run(arguments, argument);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

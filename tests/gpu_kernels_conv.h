// The kernels of depthwise convolutions against the reference kernels, and those against plain loops, for
// gpu_kernels.cc.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/conv_problem.h"
#include "cuda/conv_reference/op.h"
#include "cuda/depthwise/convolution_plan.h"
#include "cuda/depthwise/weight_gradient_plan.h"
#include "cuda/runtime/driver.h"

namespace jaxgrad {

inline int64_t elements_of(const ConvOperand& operand) {
  return std::accumulate(operand.sizes.begin(), operand.sizes.end(), int64_t{1},
                         [](int64_t product, int64_t size) { return product * std::max<int64_t>(size, 1); });
}

// A depthwise convolution in channels last, with a window of `window` on each axis.
inline ConvProblem depthwise_problem(const std::vector<int64_t>& spatial, int64_t batch, int64_t features,
                                     int64_t window, int64_t stride, int64_t dilation, int64_t low, int64_t high,
                                     ConvPass pass) {
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
Key key_of(const ConvProblem& problem, FloatType type, int device) {
  Key key;
  static_cast<ConvProblem&>(key) = problem;
  key.type = type;
  key.device = device;
  return key;
}

constexpr int kDigits = 4;  // of random operands: few, so that products in 16 bits are exact

// What a check of a convolution adds to the plain call: the first element of x, or of y for an input gradient, is
// infinite; the forward pass ends with a bias and relu.
enum class Extra { kNone, kInfinity, kBiasAndRelu };

enum { kX, kW, kY, kOperands };

inline size_t result_index(ConvPass pass) {
  return pass == ConvPass::kForward ? kY : pass == ConvPass::kInputGradient ? kX : kW;
}

struct ConvArrays {
  std::array<int64_t, kOperands> counts;  // elements
  std::array<driver::Memory, kOperands> operands;
  driver::Memory bias;

  ConvArrays(const ConvProblem& problem, FloatType type)
      : counts{elements_of(problem.x), elements_of(problem.w), elements_of(problem.y)},
        operands{driver::Memory(counts[kX] * bytes_of(type)), driver::Memory(counts[kW] * bytes_of(type)),
                 driver::Memory(counts[kY] * bytes_of(type))},
        bias(problem.w.sizes[0] * bytes_of(type)) {}

  void* x() const { return operands[kX].data(); }
  void* w() const { return operands[kW].data(); }
  void* y() const { return operands[kY].data(); }

  // Fills the operands of a pass with random values.
  void fill(const ReferenceKernels& reference, const ConvProblem& problem, CUstream stream) const {
    for (size_t i = 0; i < kOperands; ++i)
      if (i != result_index(problem.pass)) reference.fill(stream, operands[i].data(), counts[i], kDigits, i + 1);
    reference.fill(stream, bias.data(), problem.w.sizes[0], kDigits, kOperands + 1);
  }
};

inline const char* name_of(ConvPass pass) {
  return pass == ConvPass::kForward         ? "forward"
         : pass == ConvPass::kInputGradient ? "input gradient"
                                            : "weight gradient";
}

inline std::shared_ptr<const ReferenceKernels> required_reference(FloatType type, int device) {
  auto reference = reference_kernels(type, device);
  if (reference == nullptr) throw std::runtime_error("NVRTC does not compile the reference");
  return reference;
}

// Computes one of x, w and y by the kernels of depthwise/.
inline void run_depthwise(const ConvProblem& problem, FloatType type, const ConvArrays& a, bool has_bias_and_relu,
                          int device, CUstream stream) {
  if (problem.pass == ConvPass::kWeightGradient) {
    const auto plan = depthwise_plan(key_of<DepthwiseKey>(problem, type, device));
    const driver::Memory workspace(plan->workspace_bytes());
    plan->run(stream, a.x(), a.y(), a.w(), workspace.data());
    JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));  // before the workspace is freed
    return;
  }
  auto key = key_of<DepthwiseConvolutionKey>(problem, type, device);
  key.relu = has_bias_and_relu;
  const bool is_forward = problem.pass == ConvPass::kForward;
  depthwise_convolution_plan(key)->run(stream, is_forward ? a.x() : a.y(), a.w(),
                                       has_bias_and_relu ? a.bias.data() : nullptr, is_forward ? a.y() : a.x());
}

// The largest difference between the result and the sums of the kernels of reference/, on the samples of the latter,
// relative to the sum of the absolute products.
inline double largest_difference(const ReferenceKernels& reference, const ConvProblem& problem, const ConvArrays& a,
                                 bool has_bias_and_relu, CUstream stream) {
  const std::vector<int64_t> samples = sampled_elements(problem);
  const auto count = static_cast<int>(samples.size());
  std::vector<double> parts(samples.size() * kReferenceParts * 2), found(samples.size());
  driver::Memory places(static_cast<int64_t>(samples.size() * sizeof(int64_t)));
  const driver::Memory sums(static_cast<int64_t>(parts.size() * sizeof(double)));
  const driver::Memory values(static_cast<int64_t>(found.size() * sizeof(double)));
  places.write(samples.data(), samples.size() * sizeof(int64_t), stream);
  const ReferenceProblem described = reference_problem(problem);
  const auto* const at = static_cast<const int64_t*>(places.data());
  reference.sums(stream, described, a.x(), a.w(), a.y(), has_bias_and_relu ? a.bias.data() : nullptr, at, count,
                 static_cast<double*>(sums.data()));
  reference.gather(stream, described, a.operands[result_index(problem.pass)].data(), at, count,
                   static_cast<double*>(values.data()));
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
    if (has_bias_and_relu) expected = std::max(expected, 0.0);
    const double error = std::isfinite(expected)   ? std::abs(found[i] - expected) / absolute
                         : std::isfinite(found[i]) ? INFINITY
                                                   : 0;
    largest = error <= largest ? largest : std::isnan(error) ? INFINITY : error;
  }
  return largest;
}

// The kernels of depthwise/ against those of reference/.
inline double depthwise_error(const ConvProblem& problem, FloatType type, Extra extra, int device, CUstream stream) {
  const auto reference = required_reference(type, device);
  ConvArrays a(problem, type);
  a.fill(*reference, problem, stream);
  const uint32_t infinity = type == FloatType::kFloat32 ? 0x7f800000 : type == FloatType::kBFloat16 ? 0x7f80 : 0x7c00;
  if (extra == Extra::kInfinity)
    a.operands[problem.pass == ConvPass::kInputGradient ? kY : kX].write(&infinity, static_cast<size_t>(bytes_of(type)),
                                                                         stream);
  const bool has_bias_and_relu = extra == Extra::kBiasAndRelu;
  run_depthwise(problem, type, a, has_bias_and_relu, device, stream);
  return largest_difference(*reference, problem, a, has_bias_and_relu, stream);
}

// The kernels of reference/ in float64, for a causal depthwise convolution, against loops on the host.
inline double reference_error(ConvPass pass, int device, CUstream stream) {
  constexpr int64_t kLength = 19, kBatch = 2, kFeatures = 3, kWindow = 4, kStride = 2, kDilation = 3, kLow = 5;
  const ConvProblem problem =
      depthwise_problem({kLength}, kBatch, kFeatures, kWindow, kStride, kDilation, kLow, /*high=*/0, pass);
  const auto reference = required_reference(FloatType::kFloat64, device);
  ConvArrays a(problem, FloatType::kFloat64);
  a.fill(*reference, problem, stream);
  const size_t result = result_index(pass), one = (result + 1) % kOperands, other = (result + 2) % kOperands;
  std::array<std::vector<double>, kOperands> host;
  for (size_t i = 0; i < kOperands; ++i) {
    host[i].resize(static_cast<size_t>(a.counts[i]));
    if (i != result) a.operands[i].read(host[i].data(), host[i].size() * sizeof(double), stream);
  }
  JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));
  const int64_t outputs = problem.y.sizes[2];
  for (int64_t row = 0; row < kBatch * outputs; ++row)
    for (int64_t tap = 0; tap < kWindow; ++tap) {
      const int64_t position = row % outputs * kStride + tap * kDilation - kLow;
      if (position < 0 || position >= kLength) continue;
      for (int64_t feature = 0; feature < kFeatures; ++feature) {
        std::array<size_t, kOperands> at{};
        at[kX] = static_cast<size_t>((row / outputs * kLength + position) * kFeatures + feature);
        at[kW] = static_cast<size_t>(tap * kFeatures + feature);
        at[kY] = static_cast<size_t>(row * kFeatures + feature);
        host[result][at[result]] += host[one][at[one]] * host[other][at[other]];
      }
    }
  a.operands[result].write(host[result].data(), host[result].size() * sizeof(double), stream);
  return largest_difference(*reference, problem, a, /*has_bias_and_relu=*/false, stream);
}

}  // namespace jaxgrad

#include "cuda/cudnn_conv/trial.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace jaxgrad {
namespace {

constexpr uint32_t kPattern = 0x3c003c00;     // 1 in float16, 0.0078 in bfloat16 and float32
constexpr uint32_t kUnwritten = 0xffffffff;   // NaN in every type
constexpr uint32_t kNanOperand = 0x7fff7fff;  // NaN in every type; rounding to TF32 must not carry into the sign

// The binary digits of an operand after the first one: as many as the math settings let every engine use, so that only
// sums and results are rounded.
int digits_of(const ConvKey& key) {
  switch (key.type) {
    case FloatType::kFloat64:
      return 52;
    case FloatType::kFloat32:
      return key.allow_tf32 ? 10 : 23;
    case FloatType::kFloat16:
      return 10;
    default:
      return 7;
  }
}

// The error that rounding explains in an element that sums `terms` products.
double tolerance(FloatType type, bool has_transforms, double terms, double expected, double absolute) {
  // Twice what rounding to the nearest number leaves.
  const double of_result = type == FloatType::kFloat64    ? 0x1p-52
                           : type == FloatType::kFloat32  ? 0x1p-23
                           : type == FloatType::kBFloat16 ? 0x1p-7
                                                          : 0x1p-10;
  // Sums are kept in float32, or in float64. An error grows like the root of the number of terms: tensor cores truncate
  // the partial sums.
  const double epsilon = type == FloatType::kFloat64 ? 0x1p-52 : 0x1p-23;
  double of_sum = epsilon * (32 + std::sqrt(terms) / 2) * absolute;
  if (has_transforms) {
    // Winograd and FFT sum other, rounded numbers, whose errors are random. An element that sums little or nothing has
    // the error of its neighbors.
    const double least = std::max(absolute, 1.0);
    of_sum = std::max(of_sum, 0x1p-9 * std::min(least, 16 * std::sqrt(least)));
  }
  // A result that is unrelated to the expected one is off by the standard deviation of a sum, or more: random products
  // have a mean absolute value of 9 / 16 and a standard deviation of 7 / 12.
  of_sum = std::min(of_sum, 7.0 / 12 / 4 * std::sqrt(std::max(absolute, 1.0) * 16 / 9));
  const double smallest = type == FloatType::kFloat16 ? 0x1p-24 : 0;
  return of_sum + of_result * std::abs(expected) + smallest;
}

int64_t bias_bytes(const ConvKey& key) { return key.has_bias ? bytes_of(key, bias_of(key)) : 0; }

}  // namespace

int64_t bytes_of(const ConvKey& key, const ConvOperand& operand) {
  return bytes_of(key.type) * elements(operand, key.spatial);
}

ConvTrial::ConvTrial(const ConvKey& key, int64_t workspace_bytes)
    : key_(key),
      kernels_(reference_kernels(key.type, key.device)),
      problem_(reference_problem(key)),
      workspace_bytes_(workspace_bytes),
      elements_(kernels_ == nullptr ? std::vector<int64_t>() : sampled_elements(key)),
      x_(bytes_of(key, key.x)),
      w_(bytes_of(key, key.w)),
      y_(bytes_of(key, key.y)),
      bias_(bias_bytes(key)),
      workspace_(workspace_bytes),
      samples_(static_cast<int64_t>(elements_.size() * sizeof(int64_t))),
      sums_(static_cast<int64_t>(elements_.size() * kReferenceParts * 2 * sizeof(double))),
      values_(static_cast<int64_t>(elements_.size() * sizeof(double))) {
  for (driver::Memory* memory : {&x_, &w_, &y_, &bias_, &workspace_}) memory->fill(kPattern, watch_.stream());
  fill_operands();
}

void ConvTrial::fill_operands() {
  if (kernels_ == nullptr) return;
  uint64_t seed = 1;
  const auto fill = [&](const driver::Memory& memory, int64_t bytes) {
    if (bytes > 0)
      kernels_->fill(watch_.stream(), memory.data(), bytes / bytes_of(key_.type), digits_of(key_), seed++ << 40);
  };
  fill(x_, bytes_of(key_, key_.x));
  fill(w_, bytes_of(key_, key_.w));
  fill(y_, bytes_of(key_, key_.y));
  fill(bias_, bias_bytes(key_));
}

float ConvTrial::run(const cudnn::Descriptor& plan) {
  {
    const ConvPointers pointers = {x_.data(), w_.data(), y_.data(), key_.has_bias ? bias_.data() : nullptr};
    cudnn::Handle handle(key_.device);
    handle.set_stream(watch_.stream());
    watch_.start();
    try {
      execute(plan, handle, pointers, workspace_.data());
    } catch (const cudnn::Error& error) {
      handle.check_device(error);
      throw;
    }
    watch_.stop();
  }
  return watch_.milliseconds();
}

std::vector<ConvTrial::Expected> ConvTrial::reference() {
  const CUstream stream = watch_.stream();
  const auto count = static_cast<int>(elements_.size());
  samples_.write(elements_.data(), elements_.size() * sizeof(int64_t), stream);
  kernels_->sums(stream, problem_, x_.data(), w_.data(), y_.data(), key_.has_bias ? bias_.data() : nullptr,
                 static_cast<const int64_t*>(samples_.data()), count, static_cast<double*>(sums_.data()));
  std::vector<double> parts(elements_.size() * kReferenceParts * 2);
  sums_.read(parts.data(), parts.size() * sizeof(double), stream);
  watch_.wait();
  std::vector<Expected> expected;
  for (size_t i = 0; i < elements_.size(); ++i) {
    double sum = 0, absolute = 0;
    for (int part = 0; part < kReferenceParts; ++part) {
      sum += parts[2 * (i * kReferenceParts + part)];
      absolute += parts[2 * (i * kReferenceParts + part) + 1];
    }
    expected.push_back({key_.relu && sum < 0 ? 0 : sum, absolute});
  }
  return expected;
}

std::vector<double> ConvTrial::sampled_result(const cudnn::Descriptor& plan) {
  const CUstream stream = watch_.stream();
  driver::Memory& result = key_.pass == ConvPass::kForward ? y_ : key_.pass == ConvPass::kInputGradient ? x_ : w_;
  // A plan must write every element, and must not read a workspace that it did not write.
  result.fill(kUnwritten, stream);
  workspace_.fill(kUnwritten, stream);
  run(plan);
  std::vector<double> found(elements_.size());
  kernels_->gather(stream, problem_, result.data(), static_cast<const int64_t*>(samples_.data()),
                   static_cast<int>(elements_.size()), static_cast<double*>(values_.data()));
  values_.read(found.data(), found.size() * sizeof(double), stream);
  watch_.wait();
  return found;
}

double ConvTrial::error_of(const cudnn::Descriptor& plan, bool has_transforms) {
  fill_operands();  // the engine before this one may have written to them
  if (expected_.empty()) expected_ = reference();
  const std::vector<double> found = sampled_result(plan);
  const auto terms = static_cast<double>(terms_of(key_));
  double largest = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const auto& [expected, absolute] = expected_[i];
    const double error = std::abs(found[i] - expected);
    if (std::isnan(error)) return std::numeric_limits<double>::infinity();
    const double allowed = tolerance(key_.type, has_transforms, terms, expected, absolute);
    if (error > 0) largest = std::max(largest, error / allowed);  // infinity if nothing is allowed
  }
  if (key_.relu && !keeps_nan(plan)) return std::numeric_limits<double>::infinity();
  return largest;
}

bool ConvTrial::keeps_nan(const cudnn::Descriptor& plan) {
  x_.fill(kNanOperand, watch_.stream());
  std::vector<double> found;
  try {
    if (reads_x_.empty())
      for (const Expected& expected : reference()) reads_x_.push_back(std::isnan(expected.value));
    found = sampled_result(plan);
  } catch (...) {
    fill_operands();
    throw;
  }
  fill_operands();  // plans are timed with numbers
  for (size_t i = 0; i < found.size(); ++i)
    if (reads_x_[i] && !std::isnan(found[i])) return false;
  return true;
}

}  // namespace jaxgrad

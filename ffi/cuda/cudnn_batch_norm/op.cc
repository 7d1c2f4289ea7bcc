#include "cuda/cudnn_batch_norm/op.h"

#include <limits>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "cuda/runtime/driver.h"

namespace jaxgrad {
namespace {

using cudnn::api;
using cudnn::data_type;

constexpr int64_t kAlignment = 256;  // bytes; of the reserve space within the workspace

struct DestroyTensor {
  void operator()(cudnnTensorDescriptor_t tensor) const { api().cudnnDestroyTensorDescriptor(tensor); }
};
struct DestroyActivation {
  void operator()(cudnnActivationDescriptor_t activation) const { api().cudnnDestroyActivationDescriptor(activation); }
};
using Tensor = std::unique_ptr<std::remove_pointer_t<cudnnTensorDescriptor_t>, DestroyTensor>;
using Activation = std::unique_ptr<std::remove_pointer_t<cudnnActivationDescriptor_t>, DestroyActivation>;

Tensor make_tensor() {
  cudnnTensorDescriptor_t created = nullptr;
  JAXGRAD_CUDNN(api().cudnnCreateTensorDescriptor(&created));
  return Tensor(created);
}

// x as [N, C, H, W], whatever its rank.
Tensor describe_x(const BatchNormProblem& problem) {
  const auto [outer, C, inner] = problem.shape;
  if (problem.shape.elements() > std::numeric_limits<int>::max())
    throw std::invalid_argument("cuDNN requires fewer than 2^31 elements, got " +
                                std::to_string(problem.shape.elements()));
  const auto narrow = [](int64_t size) { return static_cast<int>(size); };
  Tensor x = make_tensor();
  if (problem.is_persistent()) {
    JAXGRAD_CUDNN(api().cudnnSetTensor4dDescriptorEx(x.get(), data_type(problem.type), 1, narrow(C), narrow(outer), 1,
                                                     narrow(outer * C), 1, narrow(C), narrow(C)));
  } else {
    JAXGRAD_CUDNN(api().cudnnSetTensor4dDescriptorEx(x.get(), data_type(problem.type), narrow(outer), narrow(C),
                                                     narrow(inner), 1, narrow(C * inner), narrow(inner), 1, 1));
  }
  return x;
}

// The cuDNN descriptors of a problem.
struct Descriptors {
  explicit Descriptors(const BatchNormProblem& problem) : x(describe_x(problem)), channels(make_tensor()) {
    mode = problem.is_persistent() ? CUDNN_BATCHNORM_SPATIAL_PERSISTENT : CUDNN_BATCHNORM_SPATIAL;
    JAXGRAD_CUDNN(api().cudnnDeriveBNTensorDescriptor(channels.get(), x.get(), mode));
    if (!problem.relu) return;
    operation = problem.residual ? CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION : CUDNN_BATCHNORM_OPS_BN_ACTIVATION;
    cudnnActivationDescriptor_t created = nullptr;
    JAXGRAD_CUDNN(api().cudnnCreateActivationDescriptor(&created));
    activation.reset(created);
    JAXGRAD_CUDNN(api().cudnnSetActivationDescriptor(created, CUDNN_ACTIVATION_RELU, CUDNN_PROPAGATE_NAN, 0));
  }

  // The descriptor of an optional array with the shape of x.
  cudnnTensorDescriptor_t like_x_if(bool present) const { return present ? x.get() : nullptr; }

  cudnnBatchNormMode_t mode;
  cudnnBatchNormOps_t operation = CUDNN_BATCHNORM_OPS_BN;
  Tensor x, channels;
  Activation activation;
};

int64_t forward_scratch(const BatchNormProblem& problem, const Descriptors& d, const cudnn::Handle& handle) {
  size_t bytes = 0;
  JAXGRAD_CUDNN(api().cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
      handle.get(), d.mode, d.operation, d.x.get(), d.like_x_if(problem.residual), d.x.get(), d.channels.get(),
      d.activation.get(), &bytes));
  return static_cast<int64_t>(bytes);
}

// The size of the space that the forward pass fills for the backward pass of cuDNN if there is a residual. It is not
// returned: every backward pass of jaxgrad reads y instead, so that it can follow the forward pass of any backend.
int64_t forward_reserve(const Descriptors& d, const cudnn::Handle& handle) {
  size_t bytes = 0;
  JAXGRAD_CUDNN(api().cudnnGetBatchNormalizationTrainingExReserveSpaceSize(handle.get(), d.mode, d.operation,
                                                                           d.activation.get(), d.x.get(), &bytes));
  return static_cast<int64_t>(bytes);
}

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t backward_scratch(const Descriptors& d, bool relu, const cudnn::Handle& handle) {
  size_t bytes = 0;
  JAXGRAD_CUDNN(api().cudnnGetBatchNormalizationBackwardExWorkspaceSize(
      handle.get(), d.mode, d.operation, d.x.get(), d.like_x_if(relu), d.x.get(), nullptr, d.x.get(), d.channels.get(),
      d.activation.get(), &bytes));
  return static_cast<int64_t>(bytes);
}

// The scaling factors of cuDNN for a result and for the previous content of its buffer, in the type of the arithmetic.
class Factors {
 public:
  explicit Factors(FloatType type) : is_double_(type == FloatType::kFloat64) {}
  const void* one() const { return is_double_ ? static_cast<const void*>(&one_double_) : &one_; }
  const void* zero() const { return is_double_ ? static_cast<const void*>(&zero_double_) : &zero_; }

 private:
  bool is_double_;
  float one_ = 1, zero_ = 0;
  double one_double_ = 1, zero_double_ = 0;
};

}  // namespace

int64_t batch_norm_forward_workspace(const BatchNormProblem& problem, const cudnn::Handle& handle) {
  const Descriptors d(problem);
  return aligned(forward_scratch(problem, d, handle)) + forward_reserve(d, handle);
}

int64_t batch_norm_backward_workspace(const BatchNormProblem& problem, const cudnn::Handle& handle) {
  return backward_scratch(Descriptors(problem), problem.relu, handle);
}

void batch_norm_forward(const BatchNormProblem& problem, const BatchNormForwardArrays& a, void* workspace,
                        const cudnn::Handle& handle, CUstream stream) {
  const Descriptors d(problem);
  const Factors factors(problem.type);
  const int64_t scratch = forward_scratch(problem, d, handle);
  auto* reserve = static_cast<std::byte*>(workspace) + aligned(scratch);
  const int64_t channel_bytes = problem.shape.C * (problem.type == FloatType::kFloat64 ? 8 : 4);
  auto* running_var = static_cast<std::byte*>(a.running) + channel_bytes;
  // cuDNN multiplies the previous content by 0, and 0 * NaN is NaN.
  JAXGRAD_DRIVER(driver::api().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(a.running), 0,
                                                static_cast<size_t>(2 * channel_bytes / 4), stream));
  JAXGRAD_CUDNN(api().cudnnBatchNormalizationForwardTrainingEx(
      handle.get(), d.mode, d.operation, factors.one(), factors.zero(), d.x.get(), a.x, d.like_x_if(problem.residual),
      a.residual, d.x.get(), a.y, d.channels.get(), a.scale, a.bias, /*exponentialAverageFactor=*/1, a.running,
      running_var, a.epsilon, a.mean, a.rstd, d.activation.get(), workspace, static_cast<size_t>(scratch), reserve,
      static_cast<size_t>(forward_reserve(d, handle))));
}

void batch_norm_backward(const BatchNormProblem& problem, const BatchNormBackwardArrays& a, void* workspace,
                         const cudnn::Handle& handle) {
  const Descriptors d(problem);
  const Factors factors(problem.type);
  // With relu, cuDNN recomputes the argument of relu from the bias. It requires a pointer for y, but does not read it.
  const void* y = problem.relu ? a.x : nullptr;
  JAXGRAD_CUDNN(api().cudnnBatchNormalizationBackwardEx(
      handle.get(), d.mode, d.operation, factors.one(), factors.zero(), factors.one(), factors.zero(), d.x.get(), a.x,
      d.like_x_if(problem.relu), y, d.x.get(), a.dy, nullptr, nullptr, d.x.get(), a.dx, d.channels.get(), a.scale,
      a.bias, a.dscale, a.dbias, a.epsilon, a.mean, a.rstd, d.activation.get(), workspace,
      static_cast<size_t>(backward_scratch(d, problem.relu, handle)), nullptr, 0));
}

}  // namespace jaxgrad

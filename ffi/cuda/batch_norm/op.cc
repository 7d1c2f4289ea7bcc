#include "cuda/batch_norm/op.h"

#include <limits>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "cuda/runtime/driver.h"

namespace jaxgrad {
namespace {

using cudnn::api;
using cudnn::data_type;

constexpr int64_t kAlignment = 256;  // bytes; where the reserve space begins in the workspace

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
Tensor describe_x(const BatchNormCall& call) {
  const auto [outer, C, inner] = call.shape;
  if (call.shape.elements() > std::numeric_limits<int>::max())
    throw std::invalid_argument("cuDNN takes fewer than 2^31 elements, got " + std::to_string(call.shape.elements()));
  const auto narrow = [](int64_t size) { return static_cast<int>(size); };
  Tensor x = make_tensor();
  if (call.is_persistent()) {
    JAXGRAD_CUDNN(api().cudnnSetTensor4dDescriptorEx(x.get(), data_type(call.type), 1, narrow(C), narrow(outer), 1,
                                                     narrow(outer * C), 1, narrow(C), narrow(C)));
  } else {
    JAXGRAD_CUDNN(api().cudnnSetTensor4dDescriptorEx(x.get(), data_type(call.type), narrow(outer), narrow(C),
                                                     narrow(inner), 1, narrow(C * inner), narrow(inner), 1, 1));
  }
  return x;
}

// What cuDNN must be told of a call.
struct Described {
  explicit Described(const BatchNormCall& call) : x(describe_x(call)), channels(make_tensor()) {
    mode = call.is_persistent() ? CUDNN_BATCHNORM_SPATIAL_PERSISTENT : CUDNN_BATCHNORM_SPATIAL;
    JAXGRAD_CUDNN(api().cudnnDeriveBNTensorDescriptor(channels.get(), x.get(), mode));
    if (!call.relu) return;
    operation = call.residual ? CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION : CUDNN_BATCHNORM_OPS_BN_ACTIVATION;
    cudnnActivationDescriptor_t created = nullptr;
    JAXGRAD_CUDNN(api().cudnnCreateActivationDescriptor(&created));
    activation.reset(created);
    JAXGRAD_CUDNN(api().cudnnSetActivationDescriptor(created, CUDNN_ACTIVATION_RELU, CUDNN_PROPAGATE_NAN, 0));
  }

  // The descriptor of an array like x, which only some operations have.
  cudnnTensorDescriptor_t like_x_if(bool present) const { return present ? x.get() : nullptr; }

  cudnnBatchNormMode_t mode;
  cudnnBatchNormOps_t operation = CUDNN_BATCHNORM_OPS_BN;
  Tensor x, channels;
  Activation activation;
};

int64_t forward_scratch(const BatchNormCall& call, const Described& d, const cudnn::Handle& handle) {
  size_t bytes = 0;
  JAXGRAD_CUDNN(api().cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
      handle.get(), d.mode, d.operation, d.x.get(), d.like_x_if(call.residual), d.x.get(), d.channels.get(),
      d.activation.get(), &bytes));
  return static_cast<int64_t>(bytes);
}

// What the forward pass leaves for cuDNN's own backward pass where there is a residual. It is dropped: the backward
// pass here reads y instead, so that any implementation's can follow any other's forward pass.
int64_t forward_reserve(const Described& d, const cudnn::Handle& handle) {
  size_t bytes = 0;
  JAXGRAD_CUDNN(api().cudnnGetBatchNormalizationTrainingExReserveSpaceSize(handle.get(), d.mode, d.operation,
                                                                           d.activation.get(), d.x.get(), &bytes));
  return static_cast<int64_t>(bytes);
}

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t backward_scratch(const Described& d, bool relu, const cudnn::Handle& handle) {
  size_t bytes = 0;
  JAXGRAD_CUDNN(api().cudnnGetBatchNormalizationBackwardExWorkspaceSize(
      handle.get(), d.mode, d.operation, d.x.get(), d.like_x_if(relu), d.x.get(), nullptr, d.x.get(), d.channels.get(),
      d.activation.get(), &bytes));
  return static_cast<int64_t>(bytes);
}

// cuDNN's factors for its results and for what lay in their place, in the type of the arithmetic.
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

int64_t batch_norm_forward_workspace(const BatchNormCall& call, const cudnn::Handle& handle) {
  const Described d(call);
  return aligned(forward_scratch(call, d, handle)) + forward_reserve(d, handle);
}

int64_t batch_norm_backward_workspace(const BatchNormCall& call, const cudnn::Handle& handle) {
  return backward_scratch(Described(call), call.relu, handle);
}

void batch_norm_forward(const BatchNormCall& call, const BatchNormForward& a, void* workspace,
                        const cudnn::Handle& handle, CUstream stream) {
  const Described d(call);
  const Factors factors(call.type);
  const int64_t scratch = forward_scratch(call, d, handle);
  auto* reserve = static_cast<std::byte*>(workspace) + aligned(scratch);
  const int64_t channel_bytes = call.shape.C * (call.type == FloatType::kFloat64 ? 8 : 4);
  auto* running_var = static_cast<std::byte*>(a.running) + channel_bytes;
  // cuDNN adds to the running statistics none of what lay there, but 0 times NaN is NaN.
  JAXGRAD_DRIVER(driver::api().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(a.running), 0,
                                                static_cast<size_t>(2 * channel_bytes / 4), stream));
  JAXGRAD_CUDNN(api().cudnnBatchNormalizationForwardTrainingEx(
      handle.get(), d.mode, d.operation, factors.one(), factors.zero(), d.x.get(), a.x, d.like_x_if(call.residual),
      a.residual, d.x.get(), a.y, d.channels.get(), a.scale, a.bias, /*exponentialAverageFactor=*/1, a.running,
      running_var, a.epsilon, a.mean, a.rstd, d.activation.get(), workspace, static_cast<size_t>(scratch), reserve,
      static_cast<size_t>(forward_reserve(d, handle))));
}

void batch_norm_backward(const BatchNormCall& call, const BatchNormBackward& a, void* workspace,
                         const cudnn::Handle& handle) {
  const Described d(call);
  const Factors factors(call.type);
  // Where relu followed, cuDNN computes its argument anew from the bias. It takes an array of y, but does not read it.
  const void* y = call.relu ? a.x : nullptr;
  JAXGRAD_CUDNN(api().cudnnBatchNormalizationBackwardEx(
      handle.get(), d.mode, d.operation, factors.one(), factors.zero(), factors.one(), factors.zero(), d.x.get(), a.x,
      d.like_x_if(call.relu), y, d.x.get(), a.dy, nullptr, nullptr, d.x.get(), a.dx, d.channels.get(), a.scale, a.bias,
      a.dscale, a.dbias, a.epsilon, a.mean, a.rstd, d.activation.get(), workspace,
      static_cast<size_t>(backward_scratch(d, call.relu, handle)), nullptr, 0));
}

}  // namespace jaxgrad

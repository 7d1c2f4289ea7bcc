// cuDNN, opened at run time. Nothing is linked, so the module can be imported without the library.
//
// Convolutions use the backend interface, which NVIDIA's graph API is built on; batch normalization uses the legacy
// interface. Neither requires the CUDA runtime.
#pragma once

#include <cudnn_graph.h>
#include <cudnn_ops.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad::cudnn {

#define JAXGRAD_CUDNN_FUNCTIONS(X)                            \
  X(cudnnBackendCreateDescriptor)                             \
  X(cudnnBackendDestroyDescriptor)                            \
  X(cudnnBackendExecute)                                      \
  X(cudnnBackendFinalize)                                     \
  X(cudnnBackendGetAttribute)                                 \
  X(cudnnBackendSetAttribute)                                 \
  X(cudnnBatchNormalizationBackwardEx)                        \
  X(cudnnBatchNormalizationForwardTrainingEx)                 \
  X(cudnnCreate)                                              \
  X(cudnnCreateActivationDescriptor)                          \
  X(cudnnCreateTensorDescriptor)                              \
  X(cudnnDeriveBNTensorDescriptor)                            \
  X(cudnnDestroyActivationDescriptor)                         \
  X(cudnnDestroyTensorDescriptor)                             \
  X(cudnnGetBatchNormalizationBackwardExWorkspaceSize)        \
  X(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize) \
  X(cudnnGetBatchNormalizationTrainingExReserveSpaceSize)     \
  X(cudnnGetCudartVersion)                                    \
  X(cudnnGetErrorString)                                      \
  X(cudnnGetLastErrorString)                                  \
  X(cudnnGetVersion)                                          \
  X(cudnnSetActivationDescriptor)                             \
  X(cudnnSetStream)                                           \
  X(cudnnSetTensor4dDescriptorEx)

struct Api {
#define JAXGRAD_CUDNN_MEMBER(name) decltype(&::name) name;
  JAXGRAD_CUDNN_FUNCTIONS(JAXGRAD_CUDNN_MEMBER)
#undef JAXGRAD_CUDNN_MEMBER
};

// Opens cuDNN, once per process: the copy that is loaded already, otherwise the first of `paths` that opens, otherwise
// the copy that the system finds. Throws std::runtime_error if it cannot be used.
void load(const std::vector<std::string>& paths);
std::string version();         // "9.19.0"; empty before load()
std::string describe_build();  // version and CUDA release of the build
const Api& api();              // loads cuDNN if load() was not called; throws as load() does

class Error : public std::runtime_error {
 public:
  Error(cudnnStatus_t status, const char* expression, const char* file, int line);
  const cudnnStatus_t status;
};

// Whether cuDNN does not support what it was asked for, at any time. Other errors may pass.
bool is_unsupported(const Error& error);

// Wraps a call of cuDNN. On failure, the exception has the expression, the source location, the status and the message.
#define JAXGRAD_CUDNN(expression)                                                     \
  do {                                                                                \
    const cudnnStatus_t jaxgrad_status = (expression);                                \
    if (jaxgrad_status != CUDNN_STATUS_SUCCESS)                                       \
      throw ::jaxgrad::cudnn::Error(jaxgrad_status, #expression, __FILE__, __LINE__); \
  } while (false)

cudnnDataType_t data_type(FloatType type);

// A descriptor of the backend interface. It is created, its attributes are set, then finalize() makes it immutable.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(cudnnBackendDescriptorType_t type);

  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T* values, int64_t count) {
    JAXGRAD_CUDNN(api().cudnnBackendSetAttribute(get(), name, type, count, values));
    return *this;
  }
  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    return set(name, type, &value, 1);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value.get());
  }
  void finalize() { JAXGRAD_CUDNN(api().cudnnBackendFinalize(get())); }

  int64_t integer(cudnnBackendAttributeName_t name) const;
  // Up to `max_count` values of an attribute.
  template <class T>
  std::vector<T> list(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t max_count) const {
    std::vector<T> values(static_cast<size_t>(max_count));
    int64_t count = 0;
    JAXGRAD_CUDNN(api().cudnnBackendGetAttribute(get(), name, type, max_count, &count, values.data()));
    values.resize(static_cast<size_t>(count < max_count ? count : max_count));
    return values;
  }

  cudnnBackendDescriptor_t get() const { return pointer_.get(); }
  explicit operator bool() const { return pointer_ != nullptr; }

 private:
  struct Deleter {
    void operator()(void* pointer) const { api().cudnnBackendDestroyDescriptor(pointer); }
  };
  std::unique_ptr<void, Deleter> pointer_;
};

// Exclusive use of the cuDNN handle of a device, which must be the current device of the thread. The cuDNN handle is
// created at first use and never destroyed, since the driver may be unloaded first at exit. When no thread uses it, its
// stream is an internal one: the stream of a caller may be destroyed, for example after a graph capture.
class Handle {
 public:
  explicit Handle(int device);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  cudnnHandle_t get() const { return handle_; }
  void set_stream(CUstream stream);  // until reset_stream() or the end of the exclusive use
  void reset_stream();

  // Finds the cause of an error of cuDNN. Throws driver::DeviceFault if it is an earlier operation on the device, and
  // driver::OutOfMemory if it is a lack of memory. Returns if it is what cuDNN was asked for. The thread must not
  // capture a stream.
  void check_device(const Error& error) const;

 private:
  struct Slot;
  static Slot& slot(int device);
  Slot& slot_;
  std::unique_lock<std::mutex> lock_;
  cudnnHandle_t handle_ = nullptr;
  bool has_external_stream_ = false;
};

}  // namespace jaxgrad::cudnn

// cuDNN, opened at run time: nothing is linked, so the module loads where the library is missing, and says so.
// Convolution uses its backend interface, the C functions under NVIDIA's own graph API, batch normalisation the older
// interface; both need nothing of CUDA's runtime.
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

// Opens cuDNN, once for the process: the copy that is loaded already, else the first of `paths` that opens, else the
// system's. Throws std::runtime_error that says what is wrong.
void load(const std::vector<std::string>& paths);
std::string version();         // "9.19.0"; empty before load()
std::string describe_build();  // the same with the CUDA release that it was built for, of which there are several
const Api& api();              // loads it where nobody has; throws as load() does

class Error : public std::runtime_error {
 public:
  Error(cudnnStatus_t status, const char* expression, const char* file, int line);
  const cudnnStatus_t status;
};

// Every call stands in this: a failure keeps the expression, its place, cuDNN's status and cuDNN's own message.
#define JAXGRAD_CUDNN(expression)                                                     \
  do {                                                                                \
    const cudnnStatus_t jaxgrad_status = (expression);                                \
    if (jaxgrad_status != CUDNN_STATUS_SUCCESS)                                       \
      throw ::jaxgrad::cudnn::Error(jaxgrad_status, #expression, __FILE__, __LINE__); \
  } while (false)

cudnnDataType_t data_type(FloatType type);

// A descriptor of the backend interface: created, given its attributes, finalised, and then only read.
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
  void finalise() { JAXGRAD_CUDNN(api().cudnnBackendFinalize(get())); }

  int64_t integer(cudnnBackendAttributeName_t name) const;
  // Several values, of at most `most`.
  template <class T>
  std::vector<T> list(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t most) const {
    std::vector<T> values(static_cast<size_t>(most));
    int64_t count = 0;
    JAXGRAD_CUDNN(api().cudnnBackendGetAttribute(get(), name, type, most, &count, values.data()));
    values.resize(static_cast<size_t>(count < most ? count : most));
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

// A device's handle, made at first use and never destroyed: at exit the driver may be gone before it. Held by one
// thread at a time; it belongs to the thread's current device. Between its holders it works on a stream of its own:
// a caller's may be gone by then, as that of a recording is.
class Handle {
 public:
  explicit Handle(int device);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  cudnnHandle_t get() const { return handle_; }
  void set_stream(CUstream stream);  // until leave_stream(), or the holder lets go
  void leave_stream();

 private:
  struct Slot;
  static Slot& slot(int device);
  Slot& slot_;
  std::unique_lock<std::mutex> lock_;
  cudnnHandle_t handle_ = nullptr;
  bool has_callers_stream_ = false;
};

}  // namespace jaxgrad::cudnn

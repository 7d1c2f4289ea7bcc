// CUDA's driver, opened at run time. It is the one CUDA library whose interface CUDA 12 and 13 share, and it comes with
// the GPU itself.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace jaxgrad::driver {

// The functions in use; where CUDA renames one by a macro, the name is the renamed one throughout.
#define JAXGRAD_DRIVER_FUNCTIONS(X) \
  X(cuCtxGetCurrent)                \
  X(cuCtxGetDevice)                 \
  X(cuCtxPopCurrent)                \
  X(cuCtxPushCurrent)               \
  X(cuDeviceGet)                    \
  X(cuDeviceGetAttribute)           \
  X(cuDeviceGetName)                \
  X(cuDevicePrimaryCtxRetain)       \
  X(cuDeviceTotalMem)               \
  X(cuDriverGetVersion)             \
  X(cuEventCreate)                  \
  X(cuEventDestroy)                 \
  X(cuEventElapsedTime)             \
  X(cuEventRecord)                  \
  X(cuEventSynchronize)             \
  X(cuFuncSetAttribute)             \
  X(cuGetErrorString)               \
  X(cuInit)                         \
  X(cuLaunchKernel)                 \
  X(cuMemAlloc)                     \
  X(cuMemFree)                      \
  X(cuMemGetInfo)                   \
  X(cuMemsetD32Async)               \
  X(cuModuleGetFunction)            \
  X(cuModuleLoadData)               \
  X(cuModuleUnload)                 \
  X(cuStreamCreate)                 \
  X(cuStreamDestroy)                \
  X(cuStreamGetCtx)                 \
  X(cuStreamIsCapturing)            \
  X(cuStreamSynchronize)            \
  X(cuThreadExchangeStreamCaptureMode)

struct Api {
#define JAXGRAD_DRIVER_MEMBER(name) decltype(&::name) name;
  JAXGRAD_DRIVER_FUNCTIONS(JAXGRAD_DRIVER_MEMBER)
#undef JAXGRAD_DRIVER_MEMBER
};

// Opens libcuda.so.1 and initialises it, once for the process. Throws std::runtime_error that says what is wrong.
const Api& api();

class Error : public std::runtime_error {
 public:
  Error(CUresult status, const char* expression, const char* file, int line);
  const CUresult status;
};

#define JAXGRAD_DRIVER(expression)                                                     \
  do {                                                                                 \
    const CUresult jaxgrad_status = (expression);                                      \
    if (jaxgrad_status != CUDA_SUCCESS)                                                \
      throw ::jaxgrad::driver::Error(jaxgrad_status, #expression, __FILE__, __LINE__); \
  } while (false)

// What a device is, to tell one whose kernels take other times: its name, architecture and size, and the driver.
std::string describe_device(int device);

int64_t total_memory(int device);  // bytes

int architecture(int device);  // 10 * major + minor compute capability

// Whether hardly any memory of the current device is free.
bool is_full();

// What an error comes to where the device is full: cuDNN itself speaks of an internal error then.
class OutOfMemory : public std::runtime_error {
 public:
  explicit OutOfMemory(const std::string& error);
};

// Makes a device's context, the one that JAX uses, the thread's own while it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  // The device of a stream: of the context that the caller has made current, else of the stream's.
  explicit CurrentDevice(CUstream stream);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  int device() const { return device_; }

 private:
  int device_ = 0;
  bool pushed_ = false;
};

// While it lives, the thread may load code and allocate memory although a stream of its own is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

bool is_capturing(CUstream stream);

// Device memory outside of JAX's; throws Error with CUDA_ERROR_OUT_OF_MEMORY where there is none.
class Memory {
 public:
  explicit Memory(int64_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return reinterpret_cast<void*>(pointer_); }
  void fill(uint32_t value, CUstream stream);

 private:
  CUdeviceptr pointer_ = 0;
  size_t words_ = 0;
};

// A stream of its own with two events, to time what runs on it.
class Stopwatch {
 public:
  Stopwatch();

  CUstream stream() const { return stream_.get(); }
  void start();
  float stop_milliseconds();

 private:
  struct Deleter {
    void operator()(CUstream stream) const { api().cuStreamDestroy(stream); }
    void operator()(CUevent event) const { api().cuEventDestroy(event); }
  };
  std::unique_ptr<CUstream_st, Deleter> stream_;
  std::unique_ptr<CUevent_st, Deleter> before_, after_;
};

}  // namespace jaxgrad::driver

// The CUDA driver, opened at run time. CUDA 12 and 13 share its interface, and every machine with a GPU has it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/errors.h"

namespace jaxgrad::driver {

// The functions of the driver that are used. If cuda.h renames one by a macro, the renamed function is used throughout.
#define JAXGRAD_DRIVER_FUNCTIONS(X)              \
  X(cuCtxGetCurrent)                             \
  X(cuCtxGetDevice)                              \
  X(cuCtxPopCurrent)                             \
  X(cuCtxPushCurrent)                            \
  X(cuDeviceGet)                                 \
  X(cuDeviceGetAttribute)                        \
  X(cuDeviceGetName)                             \
  X(cuDevicePrimaryCtxRetain)                    \
  X(cuDeviceTotalMem)                            \
  X(cuDriverGetVersion)                          \
  X(cuEventCreate)                               \
  X(cuEventDestroy)                              \
  X(cuEventElapsedTime)                          \
  X(cuEventRecord)                               \
  X(cuEventSynchronize)                          \
  X(cuFuncGetAttribute)                          \
  X(cuFuncSetAttribute)                          \
  X(cuGetErrorString)                            \
  X(cuInit)                                      \
  X(cuLaunchKernel)                              \
  X(cuLaunchKernelEx)                            \
  X(cuMemAlloc)                                  \
  X(cuMemFree)                                   \
  X(cuMemGetInfo)                                \
  X(cuMemcpyDtoHAsync)                           \
  X(cuMemcpyHtoDAsync)                           \
  X(cuMemsetD32Async)                            \
  X(cuModuleGetFunction)                         \
  X(cuModuleLoadData)                            \
  X(cuModuleUnload)                              \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
  X(cuOccupancyMaxActiveClusters)                \
  X(cuStreamCreate)                              \
  X(cuStreamDestroy)                             \
  X(cuStreamGetCtx)                              \
  X(cuStreamIsCapturing)                         \
  X(cuStreamQuery)                               \
  X(cuStreamSynchronize)                         \
  X(cuThreadExchangeStreamCaptureMode)

struct Api {
#define JAXGRAD_DRIVER_MEMBER(name) decltype(&::name) name;
  JAXGRAD_DRIVER_FUNCTIONS(JAXGRAD_DRIVER_MEMBER)
#undef JAXGRAD_DRIVER_MEMBER
};

// Opens libcuda.so.1 and initializes it, once per process. Throws std::runtime_error if it cannot be used.
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

// Name, compute capability and number of multiprocessors of a device, and the driver: timings hold for equal
// descriptions.
std::string describe_device(int device);

int64_t total_memory(int device);  // bytes

int architecture(int device);  // 10 * major + minor compute capability

int attribute(int device, CUdevice_attribute which);

// Whether the current device has almost no free memory.
bool is_full();

// The memory of the device, or of the host, is full. cuDNN mostly reports an internal error in this case.
class OutOfMemory : public jaxgrad::OutOfMemory {
 public:
  explicit OutOfMemory(const std::string& error, bool of_host = false);
};

// An operation that ran on the device before this call failed, for instance with an illegal memory access. The context
// is lost: until the process ends, every use of the device fails.
class DeviceFault : public std::runtime_error {
 public:
  DeviceFault(CUresult fault, const std::string& error);
};

// Returns the error by which the context of a stream is lost, or CUDA_SUCCESS. Does not wait for the device. The stream
// must not be captured.
CUresult find_fault(CUstream stream);

// Makes the primary context of a device, which JAX uses, current for the thread; restores the context when destroyed.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  // Keeps the current context if there is one, otherwise makes that of the stream current.
  explicit CurrentDevice(CUstream stream);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  int device() const { return device_; }

 private:
  int device_ = 0;
  bool pushed_ = false;
};

// During its lifetime the thread may load code and allocate memory while it captures a stream.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Frees what belongs to the context that is current when this object is made: whichever thread frees it, and while the
// thread captures a stream too.
class OwningContext {
 public:
  OwningContext();
  template <class Free>
  void free(Free free) const {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUcontext popped = nullptr;
    api().cuThreadExchangeStreamCaptureMode(&mode);
    const bool pushed = api().cuCtxPushCurrent(context_) == CUDA_SUCCESS;
    free();
    if (pushed) api().cuCtxPopCurrent(&popped);
    api().cuThreadExchangeStreamCaptureMode(&mode);
  }

 private:
  CUcontext context_ = nullptr;
};

bool is_capturing(CUstream stream);

// Finds the cause of an error of the driver. Throws DeviceFault if it is an earlier operation on the device. Returns if
// the stream is known to be captured, or if the error is one of capture: a query would end the capture. After a fault
// the driver may report the fault in place of the capture, which the fault has ended.
void check_device(CUstream stream, const Error& error);

// Returns call(device), with the device of a stream current. Throws DeviceFault in place of an error of the driver that
// an earlier operation on the device caused: the error does not blame this call. An error while the device is made
// current is thrown as it is: without a current context its cause cannot be queried.
template <class Call>
auto on_device(CUstream stream, Call call) {
  const CurrentDevice current(stream);
  try {
    return call(current.device());
  } catch (const Error& error) {
    check_device(stream, error);
    throw;
  }
}

// Device memory that is not allocated through JAX. Throws Error with CUDA_ERROR_OUT_OF_MEMORY.
class Memory {
 public:
  explicit Memory(int64_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return reinterpret_cast<void*>(pointer_); }
  void fill(uint32_t value, CUstream stream);
  // Copies to and from the host, whose memory must stay until the stream was waited for.
  void write(const void* from, size_t bytes, CUstream stream);
  void read(void* to, size_t bytes, CUstream stream) const;

 private:
  CUdeviceptr pointer_ = 0;
  size_t words_ = 0;
};

// Measures time on a stream of its own.
class Stopwatch {
 public:
  Stopwatch();

  CUstream stream() const { return stream_.get(); }
  void start();
  void stop();
  float milliseconds();  // from start() to stop(); waits for the stream until then
  void wait();           // for the stream

 private:
  struct Deleter {
    void operator()(CUstream stream) const { api().cuStreamDestroy(stream); }
    void operator()(CUevent event) const { api().cuEventDestroy(event); }
  };
  std::unique_ptr<CUstream_st, Deleter> stream_;
  std::unique_ptr<CUevent_st, Deleter> before_, after_;
};

}  // namespace jaxgrad::driver

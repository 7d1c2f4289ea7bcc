#include "cuda/runtime/driver.h"

#include <dlfcn.h>

#include <algorithm>

namespace jaxgrad::driver {
namespace {

#define JAXGRAD_TEXT_OF(name) #name
#define JAXGRAD_TEXT(name) JAXGRAD_TEXT_OF(name)  // expands macros of cuda.h before stringizing

Api open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("the CUDA driver cannot be opened: ") + dlerror());
  Api functions;
  auto find = [&](const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("the CUDA driver has no function ") + name);
    return symbol;
  };
#define JAXGRAD_DRIVER_FIND(name) functions.name = reinterpret_cast<decltype(functions.name)>(find(JAXGRAD_TEXT(name)));
  JAXGRAD_DRIVER_FUNCTIONS(JAXGRAD_DRIVER_FIND)
#undef JAXGRAD_DRIVER_FIND
  if (functions.cuInit(0) != CUDA_SUCCESS) throw std::runtime_error("the CUDA driver finds no usable GPU");
  return functions;
}

constexpr size_t kMinFreeMemory = 64 << 20;  // bytes; the setup of cuDNN takes tens of MB

CUdevice find_device(int ordinal) {
  CUdevice found = 0;
  JAXGRAD_DRIVER(api().cuDeviceGet(&found, ordinal));
  return found;
}

std::string describe(CUresult status) {
  const char* text = nullptr;
  api().cuGetErrorString(status, &text);
  return text == nullptr ? "unknown error" : text;
}

// Whether a call failed only because a stream is captured.
bool is_capture_error(CUresult status) {
  return status >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && status <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

}  // namespace

const Api& api() {
  static const Api functions = open();
  return functions;
}

Error::Error(CUresult status, const char* expression, const char* file, int line)
    : std::runtime_error("CUDA: " + describe(status) + " (status " + std::to_string(status) + ") in " + expression +
                         " at " + file + ":" + std::to_string(line)),
      status(status) {}

std::string describe_device(int device) {
  const CUdevice found = find_device(device);
  char name[256] = "";
  JAXGRAD_DRIVER(api().cuDeviceGetName(name, sizeof name, found));
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    JAXGRAD_DRIVER(api().cuDeviceGetAttribute(&value, which, found));
    return std::to_string(value);
  };
  int driver = 0;
  JAXGRAD_DRIVER(api().cuDriverGetVersion(&driver));
  return std::string(name) + ", compute capability " + attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) + "." +
         attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) + ", " +
         attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) + " multiprocessors, driver " + std::to_string(driver);
}

int64_t total_memory(int device) {
  size_t bytes = 0;
  JAXGRAD_DRIVER(api().cuDeviceTotalMem(&bytes, find_device(device)));
  return static_cast<int64_t>(bytes);
}

int attribute(int device, CUdevice_attribute which) {
  int value = 0;
  JAXGRAD_DRIVER(api().cuDeviceGetAttribute(&value, which, find_device(device)));
  return value;
}

int architecture(int device) {
  return 10 * attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
         attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
}

bool is_full() {
  size_t available = 0, total = 0;
  return api().cuMemGetInfo(&available, &total) == CUDA_SUCCESS && available < kMinFreeMemory;
}

OutOfMemory::OutOfMemory(const std::string& error, bool of_host)
    : jaxgrad::OutOfMemory((of_host ? "the memory of the host is full ("
                                    : "the GPU's memory is full: too little is left for cuDNN besides the memory that "
                                      "JAX has reserved, of which XLA_PYTHON_CLIENT_MEM_FRACTION sets the share (") +
                           error + ")") {}

DeviceFault::DeviceFault(CUresult fault, const std::string& error)
    : std::runtime_error("an operation that ran on the GPU before this call failed, and the GPU cannot be used until " +
                         std::string("the process ends: CUDA: ") + describe(fault) + " (status " +
                         std::to_string(fault) + "); then " + error) {}

CUresult find_fault(CUstream stream) {
  const CUresult status = api().cuStreamQuery(stream);
  return status == CUDA_ERROR_NOT_READY || is_capture_error(status) ? CUDA_SUCCESS : status;
}

CurrentDevice::CurrentDevice(int device) : device_(device) {
  CUcontext context = nullptr;
  // Never released: the client of JAX holds this context as long as the process lives.
  JAXGRAD_DRIVER(api().cuDevicePrimaryCtxRetain(&context, find_device(device)));
  JAXGRAD_DRIVER(api().cuCtxPushCurrent(context));
  pushed_ = true;
}

CurrentDevice::CurrentDevice(CUstream stream) {
  CUcontext context = nullptr;
  JAXGRAD_DRIVER(api().cuCtxGetCurrent(&context));
  if (context == nullptr) {
    JAXGRAD_DRIVER(api().cuStreamGetCtx(stream, &context));
    JAXGRAD_DRIVER(api().cuCtxPushCurrent(context));
    pushed_ = true;
  }
  CUdevice found = 0;
  JAXGRAD_DRIVER(api().cuCtxGetDevice(&found));
  device_ = static_cast<int>(found);
}

CurrentDevice::~CurrentDevice() {
  CUcontext popped = nullptr;
  if (pushed_) api().cuCtxPopCurrent(&popped);
}

RelaxedCapture::RelaxedCapture() { JAXGRAD_DRIVER(api().cuThreadExchangeStreamCaptureMode(&mode_)); }

RelaxedCapture::~RelaxedCapture() { api().cuThreadExchangeStreamCaptureMode(&mode_); }

OwningContext::OwningContext() { JAXGRAD_DRIVER(api().cuCtxGetCurrent(&context_)); }

bool is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  JAXGRAD_DRIVER(api().cuStreamIsCapturing(stream, &status));
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void check_device(CUstream stream, const Error& error) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult status = api().cuStreamIsCapturing(stream, &capture);
  if (is_capture_error(error.status) || is_capture_error(status) || capture != CU_STREAM_CAPTURE_STATUS_NONE) return;
  const CUresult fault = find_fault(stream);
  if (fault != CUDA_SUCCESS) throw DeviceFault(fault, error.what());
}

Memory::Memory(int64_t bytes) : words_(static_cast<size_t>(std::max<int64_t>(bytes, 4) + 3) / 4) {
  JAXGRAD_DRIVER(api().cuMemAlloc(&pointer_, words_ * 4));
}

Memory::~Memory() { api().cuMemFree(pointer_); }

void Memory::fill(uint32_t value, CUstream stream) {
  JAXGRAD_DRIVER(api().cuMemsetD32Async(pointer_, value, words_, stream));
}

void Memory::write(const void* from, size_t bytes, CUstream stream) {
  JAXGRAD_DRIVER(api().cuMemcpyHtoDAsync(pointer_, from, bytes, stream));
}

void Memory::read(void* to, size_t bytes, CUstream stream) const {
  JAXGRAD_DRIVER(api().cuMemcpyDtoHAsync(to, pointer_, bytes, stream));
}

Stopwatch::Stopwatch() {
  CUstream stream = nullptr;
  JAXGRAD_DRIVER(api().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  stream_.reset(stream);
  for (auto* event : {&before_, &after_}) {
    CUevent created = nullptr;
    JAXGRAD_DRIVER(api().cuEventCreate(&created, CU_EVENT_DEFAULT));
    event->reset(created);
  }
}

void Stopwatch::start() { JAXGRAD_DRIVER(api().cuEventRecord(before_.get(), stream())); }

void Stopwatch::stop() { JAXGRAD_DRIVER(api().cuEventRecord(after_.get(), stream())); }

float Stopwatch::milliseconds() {
  float milliseconds = 0;
  JAXGRAD_DRIVER(api().cuEventSynchronize(after_.get()));
  JAXGRAD_DRIVER(api().cuEventElapsedTime(&milliseconds, before_.get(), after_.get()));
  return milliseconds;
}

void Stopwatch::wait() { JAXGRAD_DRIVER(api().cuStreamSynchronize(stream())); }

}  // namespace jaxgrad::driver

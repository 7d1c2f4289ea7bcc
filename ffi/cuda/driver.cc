#include "driver.h"

#include <dlfcn.h>

#include <algorithm>

namespace jaxgrad::driver {
namespace {

#define JAXGRAD_TEXT_OF(name) #name
#define JAXGRAD_TEXT(name) JAXGRAD_TEXT_OF(name)  // of the name that a macro of CUDA's makes of it

Api open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("CUDA's driver cannot be opened: ") + dlerror());
  Api functions;
  auto find = [&](const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("CUDA's driver has no function ") + name);
    return symbol;
  };
#define JAXGRAD_DRIVER_FIND(name) functions.name = reinterpret_cast<decltype(functions.name)>(find(JAXGRAD_TEXT(name)));
  JAXGRAD_DRIVER_FUNCTIONS(JAXGRAD_DRIVER_FIND)
#undef JAXGRAD_DRIVER_FIND
  if (functions.cuInit(0) != CUDA_SUCCESS) throw std::runtime_error("CUDA's driver finds no GPU that it can use");
  return functions;
}

std::string describe(CUresult status) {
  const char* text = nullptr;
  api().cuGetErrorString(status, &text);
  return text == nullptr ? "unknown error" : text;
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

CurrentDevice::CurrentDevice(int device) : device_(device) {
  CUdevice found = 0;
  CUcontext context = nullptr;
  JAXGRAD_DRIVER(api().cuDeviceGet(&found, device));
  // Retained for good: JAX's own client holds it as long as the process lives.
  JAXGRAD_DRIVER(api().cuDevicePrimaryCtxRetain(&context, found));
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

bool is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  JAXGRAD_DRIVER(api().cuStreamIsCapturing(stream, &status));
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

Memory::Memory(int64_t bytes) : words_(static_cast<size_t>(std::max<int64_t>(bytes, 4) + 3) / 4) {
  JAXGRAD_DRIVER(api().cuMemAlloc(&pointer_, words_ * 4));
}

Memory::~Memory() { api().cuMemFree(pointer_); }

void Memory::fill(uint32_t value, CUstream stream) {
  JAXGRAD_DRIVER(api().cuMemsetD32Async(pointer_, value, words_, stream));
}

Stopwatch::Stopwatch() {
  JAXGRAD_DRIVER(api().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
  JAXGRAD_DRIVER(api().cuEventCreate(&before_, CU_EVENT_DEFAULT));
  JAXGRAD_DRIVER(api().cuEventCreate(&after_, CU_EVENT_DEFAULT));
}

Stopwatch::~Stopwatch() {
  if (after_ != nullptr) api().cuEventDestroy(after_);
  if (before_ != nullptr) api().cuEventDestroy(before_);
  if (stream_ != nullptr) api().cuStreamDestroy(stream_);
}

void Stopwatch::start() { JAXGRAD_DRIVER(api().cuEventRecord(before_, stream_)); }

float Stopwatch::stop_milliseconds() {
  float milliseconds = 0;
  JAXGRAD_DRIVER(api().cuEventRecord(after_, stream_));
  JAXGRAD_DRIVER(api().cuEventSynchronize(after_));
  JAXGRAD_DRIVER(api().cuEventElapsedTime(&milliseconds, before_, after_));
  return milliseconds;
}

}  // namespace jaxgrad::driver

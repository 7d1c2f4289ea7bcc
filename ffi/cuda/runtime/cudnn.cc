#include "cuda/runtime/cudnn.h"

#include <dlfcn.h>

#include <atomic>
#include <map>
#include <mutex>

namespace jaxgrad::cudnn {
namespace {

constexpr const char* kSoname = "libcudnn.so.9";
constexpr size_t kMajor = 9, kOldest = 90800;  // required by the oldest supported release of jax

Api functions;
std::atomic<bool> ready{false};
std::mutex loading;

std::string print_version(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void* open(const std::vector<std::string>& paths) {
  if (void* library = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return library;
  std::string tried;
  for (const std::string& path : paths) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += std::string("; ") + dlerror();
  }
  if (void* library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL)) return library;
  throw std::runtime_error(std::string("cuDNN cannot be opened: ") + dlerror() + tried);
}

std::string describe(cudnnStatus_t status) {
  char message[2048] = "";
  functions.cudnnGetLastErrorString(message, sizeof message);
  return std::string(functions.cudnnGetErrorString(status)) + (message[0] == 0 ? "" : ", ") + message;
}

}  // namespace

void load(const std::vector<std::string>& paths) {
  const std::lock_guard<std::mutex> lock(loading);
  if (ready) return;
  void* library = open(paths);
  auto find = [&](const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("the cuDNN that was found has no function ") + name);
    return symbol;
  };
  functions.cudnnGetVersion = reinterpret_cast<decltype(functions.cudnnGetVersion)>(find("cudnnGetVersion"));
  const size_t found = functions.cudnnGetVersion();
  if (found / 10000 != kMajor || found < kOldest)
    throw std::runtime_error("cuDNN " + print_version(found) + " was found; jaxgrad needs " + print_version(kOldest) +
                             " or a later release of major version " + std::to_string(kMajor));
#define JAXGRAD_CUDNN_FIND(name) functions.name = reinterpret_cast<decltype(functions.name)>(find(#name));
  JAXGRAD_CUDNN_FUNCTIONS(JAXGRAD_CUDNN_FIND)
#undef JAXGRAD_CUDNN_FIND
  ready = true;
}

std::string version() { return ready ? print_version(functions.cudnnGetVersion()) : ""; }

std::string describe_build() {
  return "cuDNN " + print_version(api().cudnnGetVersion()) + " for CUDA " +
         std::to_string(api().cudnnGetCudartVersion());
}

const Api& api() {
  if (!ready) load({});  // the program was lowered elsewhere; XLA has opened cuDNN before it runs
  return functions;
}

Error::Error(cudnnStatus_t status, const char* expression, const char* file, int line)
    : std::runtime_error("cuDNN: " + describe(status) + " (status " + std::to_string(status) + ") in " + expression +
                         " at " + file + ":" + std::to_string(line)),
      status(status) {}

bool is_unsupported(const Error& error) {
  // A kernel that does not compile is one that this engine does not have.
  if (error.status == CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED) return true;
  const int category = CUDNN_STATUS_CATEGORY(error.status);
  return category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM;
}

cudnnDataType_t data_type(FloatType type) {
  switch (type) {
    case FloatType::kFloat32:
      return CUDNN_DATA_FLOAT;
    case FloatType::kFloat64:
      return CUDNN_DATA_DOUBLE;
    case FloatType::kBFloat16:
      return CUDNN_DATA_BFLOAT16;
    case FloatType::kFloat16:
      return CUDNN_DATA_HALF;
  }
  throw std::invalid_argument("unknown floating-point type");
}

Descriptor::Descriptor(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t created = nullptr;
  JAXGRAD_CUDNN(api().cudnnBackendCreateDescriptor(type, &created));
  pointer_.reset(created);
}

int64_t Descriptor::integer(cudnnBackendAttributeName_t name) const {
  int64_t value = 0, count = 0;
  JAXGRAD_CUDNN(api().cudnnBackendGetAttribute(get(), name, CUDNN_TYPE_INT64, 1, &count, &value));
  return value;
}

struct Handle::Slot {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
  CUstream internal_stream = nullptr;
};

Handle::Slot& Handle::slot(int device) {
  static std::mutex mutex;
  static auto& slots = *new std::map<int, Slot>;
  const std::lock_guard<std::mutex> lock(mutex);
  return slots[device];
}

Handle::Handle(int device) : slot_(slot(device)), lock_(slot_.mutex) {
  if (slot_.handle == nullptr) {
    const driver::RelaxedCapture relaxed;
    if (slot_.internal_stream == nullptr)
      JAXGRAD_DRIVER(driver::api().cuStreamCreate(&slot_.internal_stream, CU_STREAM_NON_BLOCKING));
    try {
      cudnnHandle_t created = nullptr;
      JAXGRAD_CUDNN(api().cudnnCreate(&created));
      JAXGRAD_CUDNN(api().cudnnSetStream(created, slot_.internal_stream));
      slot_.handle = created;
    } catch (const Error& error) {
      if (driver::is_full()) throw driver::OutOfMemory(error.what());
      throw;
    }
  }
  handle_ = slot_.handle;
}

Handle::~Handle() { reset_stream(); }

void Handle::reset_stream() {
  if (has_external_stream_) api().cudnnSetStream(handle_, slot_.internal_stream);
  has_external_stream_ = false;
}

void Handle::check_device(const Error& error) const {
  if (is_unsupported(error)) return;
  const CUresult fault = driver::find_fault(slot_.internal_stream);
  if (fault != CUDA_SUCCESS) throw driver::DeviceFault(fault, error.what());
  const bool of_host = error.status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED;
  if (of_host || error.status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED || driver::is_full())
    throw driver::OutOfMemory(error.what(), of_host);
}

void Handle::set_stream(CUstream stream) {
  JAXGRAD_CUDNN(api().cudnnSetStream(handle_, stream));
  has_external_stream_ = true;
}

}  // namespace jaxgrad::cudnn

#include "cpu/runtime/onednn.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <mutex>

#include "common/errors.h"

namespace jaxgrad::onednn {
namespace {

Library library;
std::atomic<bool> ready{false};
std::mutex loading;

constexpr int kOldestMajor = 3, kOldestMinor = 2;

const char* describe(dnnl_status_t status) {
  switch (status) {
    case dnnl_out_of_memory:
      return "out of memory";
    case dnnl_invalid_arguments:
      return "invalid arguments";
    case dnnl_unimplemented:
      return "unimplemented";
    case dnnl_runtime_error:
      return "runtime error";
    default:
      return "error";
  }
}

ThreadRuntime thread_runtime(const std::string& path, const dnnl_version_t& found) {
  switch (found.cpu_runtime) {
    case DNNL_RUNTIME_SEQ:
      return ThreadRuntime::kSequential;
    case DNNL_RUNTIME_OMP:
      return ThreadRuntime::kOpenMP;
    case DNNL_RUNTIME_TBB:
      return ThreadRuntime::kTbb;
    default: {
      const std::string name = found.cpu_runtime == DNNL_RUNTIME_SYCL         ? "SYCL"
                               : found.cpu_runtime == DNNL_RUNTIME_THREADPOOL ? "THREADPOOL"
                                                                              : std::to_string(found.cpu_runtime);
      throw std::runtime_error(path + " is built for the CPU runtime " + name +
                               "; jaxgrad needs OpenMP, TBB or a sequential build");
    }
  }
}

// The path of an open library; `name` if the dynamic linker has none.
std::string path_of(void* handle, const std::string& name) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0' ? map->l_name : name;
}

}  // namespace

Error::Error(dnnl_status_t status, const char* expression, const char* file, int line)
    : std::runtime_error(std::string("oneDNN: ") + describe(status) + " (status " + std::to_string(status) + ") in " +
                         expression + " at " + file + ":" + std::to_string(line)),
      status(status) {}

std::string Library::version_text() const {
  return std::to_string(version[0]) + "." + std::to_string(version[1]) + "." + std::to_string(version[2]);
}

Library open(const std::string& path_or_name) {
  void* handle = dlopen(path_or_name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  Library found{};
  found.path = path_of(handle, path_or_name);
  auto find = [&](const char* name) {
    void* symbol = dlsym(handle, name);
    if (symbol == nullptr) throw std::runtime_error(found.path + " has no function " + name);
    return symbol;
  };
  found.api.dnnl_version = reinterpret_cast<decltype(found.api.dnnl_version)>(find("dnnl_version"));
  const dnnl_version_t& version = *found.api.dnnl_version();
  if (version.major != kOldestMajor || version.minor < kOldestMinor)
    throw std::runtime_error(found.path + " is oneDNN " + std::to_string(version.major) + "." +
                             std::to_string(version.minor) + "; jaxgrad needs " + std::to_string(kOldestMajor) + "." +
                             std::to_string(kOldestMinor) + " or a later release of major version " +
                             std::to_string(kOldestMajor));
  found.version[0] = version.major, found.version[1] = version.minor, found.version[2] = version.patch;
  found.threads = thread_runtime(found.path, version);
#define JAXGRAD_ONEDNN_FIND(name) found.api.name = reinterpret_cast<decltype(found.api.name)>(find(#name));
  JAXGRAD_ONEDNN_FUNCTIONS(JAXGRAD_ONEDNN_FIND)
  if (found.threads == ThreadRuntime::kOpenMP) {
    JAXGRAD_ONEDNN_FIND(omp_get_max_threads)
    JAXGRAD_ONEDNN_FIND(omp_set_num_threads)
  }
#undef JAXGRAD_ONEDNN_FIND
  return found;
}

void load(const std::string& path_or_name) {
  const std::lock_guard<std::mutex> lock(loading);
  if (ready) return;
  library = open(path_or_name);
  ready = true;
}

std::string version() { return ready ? library.version_text() : ""; }

const Library& loaded() {
  if (!ready)
    throw MissingLibrary(
        "oneDNN (libdnnl.so.3, of the package onednn-cpu-gomp or of the system) is not loaded; `python -m jaxgrad` "
        "reports the reason");
  return library;
}

dnnl_engine_t engine() {
  static const dnnl_engine_t cpu = [] {
    dnnl_engine_t created = nullptr;
    JAXGRAD_ONEDNN(api().dnnl_engine_create(&created, dnnl_cpu, 0));
    return created;
  }();
  return cpu;
}

void clear_primitive_cache() {
  if (!ready) return;
  static std::mutex clearing;
  const std::lock_guard<std::mutex> lock(clearing);
  int capacity = 0;
  JAXGRAD_ONEDNN(api().dnnl_get_primitive_cache_capacity(&capacity));
  JAXGRAD_ONEDNN(api().dnnl_set_primitive_cache_capacity(0));
  JAXGRAD_ONEDNN(api().dnnl_set_primitive_cache_capacity(capacity));
}

}  // namespace jaxgrad::onednn

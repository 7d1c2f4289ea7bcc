#include "cpu/runtime/onednn.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include "common/errors.h"

namespace jaxgrad::onednn {
namespace {

Api functions;
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

}  // namespace

Error::Error(dnnl_status_t status, const char* expression, const char* file, int line)
    : std::runtime_error(std::string("oneDNN: ") + describe(status) + " (status " + std::to_string(status) + ") in " +
                         expression + " at " + file + ":" + std::to_string(line)),
      status(status) {}

void load(const std::string& path) {
  const std::lock_guard<std::mutex> lock(loading);
  if (ready) return;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  auto find = [&](const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) throw std::runtime_error(path + " has no function " + name);
    return symbol;
  };
  functions.dnnl_version = reinterpret_cast<decltype(functions.dnnl_version)>(find("dnnl_version"));
  const dnnl_version_t* found = functions.dnnl_version();
  if (found->major != kOldestMajor || found->minor < kOldestMinor)
    throw std::runtime_error(path + " is oneDNN " + std::to_string(found->major) + "." + std::to_string(found->minor) +
                             "; jaxgrad needs " + std::to_string(kOldestMajor) + "." + std::to_string(kOldestMinor) +
                             " or a later release of major version " + std::to_string(kOldestMajor));
#define JAXGRAD_ONEDNN_FIND(name) functions.name = reinterpret_cast<decltype(functions.name)>(find(#name));
  JAXGRAD_ONEDNN_FUNCTIONS(JAXGRAD_ONEDNN_FIND)
#undef JAXGRAD_ONEDNN_FIND
  functions.omp_get_max_threads =
      reinterpret_cast<decltype(functions.omp_get_max_threads)>(find("omp_get_max_threads"));
  functions.omp_set_num_threads =
      reinterpret_cast<decltype(functions.omp_set_num_threads)>(find("omp_set_num_threads"));
  ready = true;
}

std::string version() {
  if (!ready) return "";
  const dnnl_version_t* v = functions.dnnl_version();
  return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
}

const Api& api() {
  if (!ready)
    throw MissingLibrary(
        "oneDNN (libdnnl.so.3 of the package onednn-cpu-gomp) is not loaded; `python -m jaxgrad` reports the reason");
  return functions;
}

dnnl_engine_t engine() {
  static const dnnl_engine_t cpu = [] {
    dnnl_engine_t created = nullptr;
    JAXGRAD_ONEDNN(api().dnnl_engine_create(&created, dnnl_cpu, 0));
    return created;
  }();
  return cpu;
}

}  // namespace jaxgrad::onednn

#include "cuda/runtime/nvrtc.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "common/lru_cache.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/text.h"

namespace jaxgrad::nvrtc {
namespace {

// The interface of NVRTC, which CUDA 12 and 13 share. Its header is in a package that the build does not need
// otherwise.
struct Program_;
using Program = Program_*;
using Status = int;

#define JAXGRAD_NVRTC_FUNCTIONS(X)                                                                                   \
  X(nvrtcVersion, Status (*)(int*, int*))                                                                            \
  X(nvrtcGetErrorString, const char* (*)(Status))                                                                    \
  X(nvrtcCreateProgram, Status (*)(Program*, const char*, const char*, int, const char* const*, const char* const*)) \
  X(nvrtcDestroyProgram, Status (*)(Program*))                                                                       \
  X(nvrtcCompileProgram, Status (*)(Program, int, const char* const*))                                               \
  X(nvrtcGetProgramLogSize, Status (*)(Program, size_t*))                                                            \
  X(nvrtcGetProgramLog, Status (*)(Program, char*))                                                                  \
  X(nvrtcGetCUBINSize, Status (*)(Program, size_t*))                                                                 \
  X(nvrtcGetCUBIN, Status (*)(Program, char*))

struct Api {
#define JAXGRAD_NVRTC_MEMBER(name, type) std::add_pointer_t<std::remove_pointer_t<type>> name;
  JAXGRAD_NVRTC_FUNCTIONS(JAXGRAD_NVRTC_MEMBER)
#undef JAXGRAD_NVRTC_MEMBER
};

Api functions;
std::atomic<bool> ready{false};
std::mutex loading;

constexpr std::array<int, 2> kMajors = {13, 12};
constexpr size_t kCapacity = 64;  // programs, of some tens of kB each
constexpr Status kOutOfMemory = 1, kProgramCreationFailure = 2, kInternalError = 11;  // may pass

std::string soname(int major) { return "libnvrtc.so." + std::to_string(major); }

// Whether the driver can load what NVRTC of this major version compiles.
bool driver_supports(int major) {
  int driver = 0;
  JAXGRAD_DRIVER(driver::api().cuDriverGetVersion(&driver));
  return major <= driver / 1000;
}

void* open(const std::vector<std::string>& paths) {
  std::string tried;
  const auto try_to_open = [&](const std::string& path, int flags) {
    void* library = dlopen(path.c_str(), flags);
    if (library == nullptr && (flags & RTLD_NOLOAD) == 0) tried += std::string("; ") + dlerror();
    return library;
  };
  for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const int major : kMajors) {
      if (!driver_supports(major)) continue;
      if ((flags & RTLD_NOLOAD) == 0)
        for (const std::string& path : paths)
          if (ends_with(path, soname(major)))
            if (void* library = try_to_open(path, flags)) return library;
      if (void* library = try_to_open(soname(major), flags)) return library;
    }
  }
  throw Error("NVRTC cannot be opened" + tried);
}

[[noreturn]] void fail(Status status, const std::string& where) {
  const std::string text = std::string("NVRTC: ") + functions.nvrtcGetErrorString(status) + where;
  if (status == kOutOfMemory || status == kProgramCreationFailure || status == kInternalError)
    throw std::runtime_error(text);
  throw Error(text);
}

void check(Status status, const char* what) {
  if (status != 0) fail(status, std::string(" in ") + what);
}
#define JAXGRAD_NVRTC(name, ...) check(functions.name(__VA_ARGS__), #name)

class OwnedProgram {
 public:
  explicit OwnedProgram(const std::string& source) {
    JAXGRAD_NVRTC(nvrtcCreateProgram, &program_, source.c_str(), "jaxgrad.cu", 0, nullptr, nullptr);
  }
  ~OwnedProgram() { functions.nvrtcDestroyProgram(&program_); }
  OwnedProgram(const OwnedProgram&) = delete;
  OwnedProgram& operator=(const OwnedProgram&) = delete;

  Program get() const { return program_; }
  std::string log() const {
    size_t size = 0;
    if (functions.nvrtcGetProgramLogSize(program_, &size) != 0) return "";
    std::string text(size, '\0');
    return functions.nvrtcGetProgramLog(program_, text.data()) == 0 ? text.c_str() : "";
  }

 private:
  Program program_ = nullptr;
};

std::string compile_uncached(const std::string& source, const std::string& target) {
  const OwnedProgram program(source);
  const std::string architecture = "--gpu-architecture=" + target;
  const std::array<const char*, 2> options = {architecture.c_str(), "--std=c++17"};
  const Status status = functions.nvrtcCompileProgram(program.get(), static_cast<int>(options.size()), options.data());
  if (status != 0) fail(status, " for " + target + ": " + program.log());
  size_t size = 0;
  JAXGRAD_NVRTC(nvrtcGetCUBINSize, program.get(), &size);
  std::string code(size, '\0');
  JAXGRAD_NVRTC(nvrtcGetCUBIN, program.get(), code.data());
  return code;
}

std::string target_of(int architecture, bool has_specific_instructions = false) {
  return "sm_" + std::to_string(architecture) + (has_specific_instructions ? "a" : "");
}

}  // namespace

void load(const std::vector<std::string>& paths) {
  const std::lock_guard<std::mutex> lock(loading);
  if (ready) return;
  void* library = open(paths);
  const auto find = [&](const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) throw Error(std::string("the NVRTC that was found has no function ") + name);
    return symbol;
  };
#define JAXGRAD_NVRTC_FIND(name, type) functions.name = reinterpret_cast<type>(find(#name));
  JAXGRAD_NVRTC_FUNCTIONS(JAXGRAD_NVRTC_FIND)
#undef JAXGRAD_NVRTC_FIND
  ready = true;
}

std::string version() {
  int major = 0, minor = 0;
  if (!ready || functions.nvrtcVersion(&major, &minor) != 0) return "";
  return std::to_string(major) + "." + std::to_string(minor);
}

std::shared_ptr<const std::string> compile(const std::string& source, int architecture,
                                           bool has_specific_instructions) {
  if (!ready) load({});
  static auto& compiled = *new LruCache<std::string, std::string, std::hash<std::string>>(kCapacity);
  const std::string target = target_of(architecture, has_specific_instructions);
  const std::string key = target + " by NVRTC " + version() + "\n" + source;
  return compiled.get(key, [&] {
    if (auto stored = stored_programs().read(key)) return std::make_shared<const std::string>(*std::move(stored));
    auto code = std::make_shared<const std::string>(compile_uncached(source, target));
    stored_programs().write(key, *code);
    return code;
  });
}

void compile_nothing(int architecture) {
  if (!ready) load({});
  compile_uncached("extern \"C\" __global__ void nothing() {}", target_of(architecture));
}

FileStore& stored_programs() {
  static auto& store = *new FileStore(".cubin");
  return store;
}

}  // namespace jaxgrad::nvrtc

// Machine code that is loaded on a device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cuda/runtime/driver.h"

namespace jaxgrad::driver {

// A CUDA module, loaded on the current device and unloaded when destroyed. Loading is allowed while the thread captures
// a stream.
class Module {
 public:
  explicit Module(std::shared_ptr<const std::string> code);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Loads the kernel at once. A kernel that is not looked up by name might be loaded at its first launch, which a
  // stream capture does not allow. shared_bytes: the dynamic shared memory of its launches.
  CUfunction function(const char* name, int64_t shared_bytes = 0) const;

 private:
  OwningContext context_;
  std::shared_ptr<const std::string> code_;
  CUmodule module_ = nullptr;
};

// The blocks of a kernel that a multiprocessor of the current device runs at once.
int resident_blocks(CUfunction function, int64_t threads, int64_t shared_bytes);

}  // namespace jaxgrad::driver

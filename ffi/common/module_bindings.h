// What the bindings of both Python modules share.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "common/lru_cache.h"
#include "xla/ffi/api/c_api.h"

namespace jaxgrad {

// A handler as jax.ffi.register_ffi_target takes it.
inline nanobind::capsule handler_capsule(XLA_FFI_Error* (*symbol)(XLA_FFI_CallFrame*)) {
  return nanobind::capsule(reinterpret_cast<void*>(symbol));
}

// The version of the FFI API that the handlers are compiled for, such as "0.3".
inline std::string ffi_api_version() {
  return std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
}

inline nanobind::dict as_dict(const CacheInfo& found) {
  nanobind::dict info;
  info["hits"] = found.hits;
  info["misses"] = found.misses;
  info["size"] = found.size;
  info["capacity"] = found.capacity;
  return info;
}

}  // namespace jaxgrad

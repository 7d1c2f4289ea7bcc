// oneDNN, opened at run time. Nothing is linked, so the module can be imported without the library.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "oneapi/dnnl/dnnl.h"

namespace jaxgrad::onednn {

// The functions of the C API that are used. load() fills in a pointer to each.
#define JAXGRAD_ONEDNN_FUNCTIONS(X)                          \
  X(dnnl_convolution_backward_data_primitive_desc_create)    \
  X(dnnl_convolution_backward_weights_primitive_desc_create) \
  X(dnnl_convolution_forward_primitive_desc_create)          \
  X(dnnl_engine_create)                                      \
  X(dnnl_get_primitive_cache_capacity)                       \
  X(dnnl_memory_create)                                      \
  X(dnnl_memory_desc_create_with_strides)                    \
  X(dnnl_memory_desc_create_with_tag)                        \
  X(dnnl_memory_desc_clone)                                  \
  X(dnnl_memory_desc_destroy)                                \
  X(dnnl_memory_desc_equal)                                  \
  X(dnnl_memory_desc_get_size)                               \
  X(dnnl_memory_destroy)                                     \
  X(dnnl_primitive_attr_create)                              \
  X(dnnl_primitive_attr_destroy)                             \
  X(dnnl_primitive_attr_set_scratchpad_mode)                 \
  X(dnnl_primitive_create)                                   \
  X(dnnl_primitive_desc_destroy)                             \
  X(dnnl_primitive_desc_next_impl)                           \
  X(dnnl_primitive_desc_query)                               \
  X(dnnl_primitive_desc_query_md)                            \
  X(dnnl_primitive_destroy)                                  \
  X(dnnl_primitive_execute)                                  \
  X(dnnl_reorder_primitive_desc_create)                      \
  X(dnnl_set_primitive_cache_capacity)                       \
  X(dnnl_stream_create)                                      \
  X(dnnl_stream_destroy)                                     \
  X(dnnl_stream_wait)                                        \
  X(dnnl_version)

struct Api {
#define JAXGRAD_ONEDNN_MEMBER(name) decltype(&::name) name;
  JAXGRAD_ONEDNN_FUNCTIONS(JAXGRAD_ONEDNN_MEMBER)
#undef JAXGRAD_ONEDNN_MEMBER
  // From the OpenMP runtime that oneDNN is linked to; null with another thread runtime.
  int (*omp_get_max_threads)();
  void (*omp_set_num_threads)(int);
};

// What runs the threads of a build of oneDNN.
enum class ThreadRuntime { kSequential, kOpenMP, kTbb };

struct Library {
  std::string path;
  int version[3];
  ThreadRuntime threads;
  Api api;

  std::string version_text() const;  // "3.2.0"
};

// Opens a library by its path, or by a name that the dynamic linker searches for. Throws std::runtime_error if it
// cannot be used. The library stays open.
Library open(const std::string& path_or_name);

// Opens the library of all calls, once per process. Throws what open() throws.
void load(const std::string& path_or_name);
std::string version();    // "3.2.0"; empty before load()
const Library& loaded();  // throws MissingLibrary before load()
inline const Api& api() { return loaded().api; }

class Error : public std::runtime_error {
 public:
  Error(dnnl_status_t status, const char* expression, const char* file, int line);
  const dnnl_status_t status;
};

// Wraps a call of the C API. On failure, the exception has the expression, the source location and the status.
#define JAXGRAD_ONEDNN(expression)                                                     \
  do {                                                                                 \
    const dnnl_status_t jaxgrad_status = (expression);                                 \
    if (jaxgrad_status != dnnl_success)                                                \
      throw ::jaxgrad::onednn::Error(jaxgrad_status, #expression, __FILE__, __LINE__); \
  } while (false)

struct Deleter {
  void operator()(dnnl_memory_desc_t p) const { api().dnnl_memory_desc_destroy(p); }
  void operator()(dnnl_memory_t p) const { api().dnnl_memory_destroy(p); }
  void operator()(dnnl_primitive_attr_t p) const { api().dnnl_primitive_attr_destroy(p); }
  void operator()(dnnl_primitive_desc_t p) const { api().dnnl_primitive_desc_destroy(p); }
  void operator()(dnnl_primitive_t p) const { api().dnnl_primitive_destroy(p); }
  void operator()(dnnl_stream_t p) const { api().dnnl_stream_destroy(p); }
};
template <class Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Deleter>;

using MemoryDesc = Owned<dnnl_memory_desc_t>;
using Memory = Owned<dnnl_memory_t>;
using Attributes = Owned<dnnl_primitive_attr_t>;
using PrimitiveDesc = Owned<dnnl_primitive_desc_t>;
using Primitive = Owned<dnnl_primitive_t>;
using Stream = Owned<dnnl_stream_t>;

dnnl_engine_t engine();  // the CPU engine; never destroyed

void clear_primitive_cache();  // of oneDNN itself, which keeps primitives that nothing uses; nothing before load()

}  // namespace jaxgrad::onednn

// The second line of checks: what Python has checked already, asked again of the buffers that arrived.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

// Collects the first thing that is wrong with a call's buffers.
class Checks {
 public:
  explicit Checks(const char* target) : target_(target) {}

  // `buffer` has the given sizes and dtype.
  void array(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
             std::initializer_list<int64_t> sizes);
  // The same, or no elements at all: the operand is absent, the result not wanted.
  void optional_array(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
                      std::initializer_list<int64_t> sizes);
  void that(bool condition, const std::string& problem);

  bool failed() const { return !problem_.empty(); }
  xla::ffi::Error error() const { return xla::ffi::Error::InvalidArgument(problem_); }

 private:
  const char* target_;
  std::string problem_;
};

// The buffer's data, or null where it has no elements.
template <class T>
T* data_or_null(const xla::ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

}  // namespace jaxgrad

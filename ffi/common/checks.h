// Checks of the buffers and attributes of a handler call. Python checks the same conditions while it lowers the call;
// these checks protect against programs that were lowered elsewhere.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

// Collects the first error of a call. Every message starts with the name of the FFI target.
class Checks {
 public:
  explicit Checks(const char* target) : target_(target) {}

  // `buffer` has the given dtype and sizes.
  void array(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
             std::initializer_list<int64_t> sizes);
  // As array(), but a buffer without elements is accepted: an absent operand or a result that is not requested.
  void optional_array(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
                      std::initializer_list<int64_t> sizes);

  void require(bool condition, const char* message) {
    if (!condition) fail(message);
  }
  // For messages that have to be built: make_message() is called only if the condition fails.
  template <class MakeMessage, class = std::enable_if_t<std::is_invocable_r_v<std::string, MakeMessage>>>
  void require(bool condition, MakeMessage make_message) {
    if (!condition) fail(make_message());
  }
  void fail(const std::string& message);

  const char* target() const { return target_; }
  bool failed() const { return !error_.empty(); }
  xla::ffi::Error error() const { return xla::ffi::Error::InvalidArgument(error_); }

 private:
  const char* target_;
  std::string error_;
};

// The buffer's data, or null if it has no elements.
template <class T>
T* data_or_null(const xla::ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

}  // namespace jaxgrad

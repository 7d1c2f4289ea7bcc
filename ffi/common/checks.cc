#include "common/checks.h"

#include <algorithm>
#include <sstream>

namespace jaxgrad {
namespace {

template <class Sizes>
std::string print(const Sizes& sizes) {
  std::ostringstream out;
  const char* separator = "";
  out << '[';
  for (int64_t size : sizes) {
    out << separator << size;
    separator = ", ";
  }
  out << ']';
  return out.str();
}

}  // namespace

void Checks::fail(const std::string& message) {
  if (!failed()) error_ = std::string(target_) + ": " + message;
}

void Checks::array(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
                   std::initializer_list<int64_t> sizes) {
  const auto found = buffer.dimensions();
  require(buffer.element_type() == dtype, [&] {
    std::ostringstream message;
    message << name << " must have the element type " << dtype << ", got " << buffer.element_type();
    return message.str();
  });
  require(std::equal(found.begin(), found.end(), sizes.begin(), sizes.end()),
          [&] { return std::string(name) + " must have the shape " + print(sizes) + ", got " + print(found); });
}

void Checks::optional_array(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
                            std::initializer_list<int64_t> sizes) {
  if (buffer.element_count() > 0) array(name, buffer, dtype, sizes);
}

}  // namespace jaxgrad

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

void Checks::that(bool condition, const std::string& problem) {
  if (!condition && !failed()) problem_ = std::string(target_) + ": " + problem;
}

void Checks::array(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
                   std::initializer_list<int64_t> sizes) {
  const auto found = buffer.dimensions();
  if (buffer.element_type() != dtype) {
    std::ostringstream problem;
    problem << name << " must have the element type " << dtype << ", got " << buffer.element_type();
    that(false, problem.str());
  }
  if (!std::equal(found.begin(), found.end(), sizes.begin(), sizes.end()))
    that(false, std::string(name) + " must have the shape " + print(sizes) + ", got " + print(found));
}

void Checks::optional_array(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
                            std::initializer_list<int64_t> sizes) {
  if (buffer.element_count() > 0) array(name, buffer, dtype, sizes);
}

}  // namespace jaxgrad

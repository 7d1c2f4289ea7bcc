// The exceptions that JAX reports with a status code of their own; all others are internal errors.
#pragma once

#include <stdexcept>

namespace jaxgrad {

class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class MissingLibrary : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace jaxgrad

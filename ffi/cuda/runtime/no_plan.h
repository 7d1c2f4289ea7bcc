// The exception for problems that a backend cannot compute.
#pragma once

#include <stdexcept>

namespace jaxgrad {

// what() is the reason.
class NoPlan : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace jaxgrad

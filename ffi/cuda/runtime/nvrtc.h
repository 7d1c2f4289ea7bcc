// NVRTC, CUDA's compiler as a library, opened at run time: it compiles jaxgrad's own kernels for the GPU that is here.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace jaxgrad::nvrtc {

// What NVRTC, or its absence, has against a program; with the compiler's own messages.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Opens NVRTC: a copy that is loaded already, else one of `paths`, else one that the system finds. It must be of CUDA
// 12 or 13, and no later than the driver. Throws Error where there is none.
void load(const std::vector<std::string>& paths);

std::string version();  // "13.0", or empty before load()

// The machine code of CUDA C++ for GPUs of an `architecture`, 10 * major + minor compute capability. Each source is
// compiled once in a process. Thread-safe. Throws Error.
std::shared_ptr<const std::string> compile(const std::string& source, int architecture);

}  // namespace jaxgrad::nvrtc

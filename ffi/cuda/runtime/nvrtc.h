// NVRTC, the CUDA compiler as a library, opened at run time. It compiles jaxgrad's own kernels for the GPU at hand.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/runtime/file_store.h"

namespace jaxgrad::nvrtc {

// NVRTC is missing, or a program does not compile, at any time; what() has the messages of the compiler.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Opens NVRTC: a copy that is loaded already, otherwise one of `paths`, otherwise the copy that the system finds. Its
// CUDA release must be 12 or 13 and no later than that of the driver. Throws Error if there is none.
void load(const std::vector<std::string>& paths);

std::string version();  // "13.0"; empty before load()

// Compiles CUDA C++ to machine code for an architecture, 10 * major + minor compute capability. The programs used last
// are kept, and all of them in the directory of stored_programs(). With `has_specific_instructions`, the program may
// have instructions of this architecture alone, those of sm_90a. Thread-safe. Throws Error, and std::runtime_error for
// an error that may pass.
std::shared_ptr<const std::string> compile(const std::string& source, int architecture,
                                           bool has_specific_instructions = false);

// Compiles an empty program. Throws as compile().
void compile_nothing(int architecture);

FileStore& stored_programs();

}  // namespace jaxgrad::nvrtc

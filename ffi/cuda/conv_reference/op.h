// Computes sampled elements of a convolution pass on the GPU, by the kernels of reference.cu, to compare other kernels
// with. No XLA types.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/conv_problem.h"
#include "cuda/conv_reference/kernel_arguments.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/float_type.h"
#include "cuda/runtime/module.h"

namespace jaxgrad {

// What the kernels are told about a problem.
ReferenceProblem reference_problem(const ConvProblem& problem);

// The definitions that precede the source of the kernels for a type.
std::string reference_definitions(FloatType type);

// The name of a kernel for a type: "reference_fill", "reference_sums" or "reference_gather", and the type.
std::string reference_kernel(const char* name, FloatType type);

// The numbers, in row-major order of the logical axes, of the elements of a result to compare: all of them if they are
// few, otherwise corners, elements near edges and borders of groups, and random ones. The same for equal problems.
// Fewer samples for longer sums, so that a comparison takes milliseconds.
std::vector<int64_t> sampled_elements(const ConvProblem& problem);

// The number of products in the longest sum.
int64_t terms_of(const ConvProblem& problem);

// The array that a pass computes.
const ConvOperand& result_of(const ConvProblem& problem);

// The kernels for one type, loaded on one device.
class ReferenceKernels {
 public:
  ReferenceKernels(FloatType type, int architecture);

  // Fills an array with random values of `digits` binary digits after the first one, from 0.5 to 1 and from -1 to -0.5.
  void fill(CUstream stream, void* array, int64_t count, int digits, uint64_t seed) const;
  // Writes for each sample the parts of its value and of the sum of its absolute products: [samples, kReferenceParts,
  // 2]. The array that the pass computes is not read. `bias` may be null.
  void sums(CUstream stream, const ReferenceProblem& problem, const void* x, const void* w, const void* y,
            const void* bias, const int64_t* samples, int count, double* sums) const;
  // Copies the samples out of a result.
  void gather(CUstream stream, const ReferenceProblem& problem, const void* result, const int64_t* samples, int count,
              double* values) const;

 private:
  driver::Module module_;
  CUfunction fill_, sums_, gather_;
};

// The kernels, compiled and loaded once per device and type; null if NVRTC cannot compile them, at any time or now.
// Throws driver::Error. Thread-safe.
std::shared_ptr<const ReferenceKernels> reference_kernels(FloatType type, int device);

}  // namespace jaxgrad

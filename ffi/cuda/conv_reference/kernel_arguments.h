// The argument of the kernels of reference.cu. Both the host compiler and NVRTC compile this file.
#pragma once

namespace jaxgrad {

// Sizes and strides (in elements) of batch, features and three spatial axes, of which the last may have size 1.
struct ReferenceOperand {
  long long sizes[5], strides[5];
};

// A convolution pass, with the fields of ConvProblem.
struct ReferenceProblem {
  int pass;  // ConvPass
  long long groups;
  ReferenceOperand x, w, y;
  long long window_strides[3], rhs_dilation[3], padding_low[3];
};

enum {
  kReferenceThreads = 256,  // per block; the kernels work with any number up to this
  kReferenceParts = 8       // of each sum, one block for each
};

}  // namespace jaxgrad

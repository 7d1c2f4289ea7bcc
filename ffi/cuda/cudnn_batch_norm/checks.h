// Checks that the batch normalization handlers share.
#pragma once

#include <string>

#include "common/checks.h"
#include "cuda/cudnn_batch_norm/shape.h"

namespace jaxgrad {

// The checks of one call. The constructor checks x and derives the shape of the problem from it.
class BatchNormChecks : public Checks {
 public:
  BatchNormChecks(const char* target, const xla::ffi::AnyBuffer& x, int64_t feature_axis);

  // `buffer` has the shape and dtype of x.
  void like_x(const char* name, const xla::ffi::AnyBuffer& buffer);
  void like_x_or_absent(const char* name, const xla::ffi::AnyBuffer& buffer);
  // `buffer` has the shape [C] and the dtype of the statistics.
  void per_channel(const char* name, const xla::ffi::AnyBuffer& buffer);
  void per_channel_or_absent(const char* name, const xla::ffi::AnyBuffer& buffer);

  const xla::ffi::DataType statistics_dtype;  // float64 if x is float64, otherwise float32
  const BatchNormShape shape;

 protected:
  const xla::ffi::AnyBuffer& x_;
};

}  // namespace jaxgrad

// The checks that the batch normalisation handlers of every platform share.
#pragma once

#include <string>

#include "common/batch_norm_shape.h"
#include "common/checks.h"

namespace jaxgrad {

// Checks of one call: which arrays are as large as x, which hold one element for each channel.
class BatchNormChecks : public Checks {
 public:
  BatchNormChecks(const char* target, const xla::ffi::AnyBuffer& x, int64_t feature_axis);

  void like_x(const char* name, const xla::ffi::AnyBuffer& buffer);
  void like_x_or_absent(const char* name, const xla::ffi::AnyBuffer& buffer);
  void per_channel(const char* name, const xla::ffi::AnyBuffer& buffer);
  void per_channel_or_absent(const char* name, const xla::ffi::AnyBuffer& buffer);

  const xla::ffi::DataType statistics_dtype;  // of the arrays of one element for each channel
  const BatchNormShape shape;

 protected:
  const xla::ffi::AnyBuffer& x_;
};

}  // namespace jaxgrad

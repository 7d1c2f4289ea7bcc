// Checks that the handlers of the norm family share.
#pragma once

#include "common/checks.h"
#include "common/norm_shape.h"

namespace jaxgrad {

// The checks of one call. The constructor checks x, the statistics [S, G] and scale [K, C], and derives the shape of
// the problem from them.
class NormChecks : public Checks {
 public:
  using Buffer = xla::ffi::AnyBuffer;

  // scale: null where the call has none; K is 1 then.
  NormChecks(const char* target, const Buffer& x, const Buffer& rstd, const Buffer* scale);

  // `buffer` has the shape and dtype of x.
  void like_x(const char* name, const Buffer& buffer);
  void like_x_or_absent(const char* name, const Buffer& buffer);
  // `buffer` has the shape [S, G] and the dtype of the statistics.
  void statistics(const char* name, const Buffer& buffer);
  void statistics_or_absent(const char* name, const Buffer& buffer);
  // `buffer` has the shape [K, C] and the dtype of the statistics.
  void per_channel(const char* name, const Buffer& buffer);
  void per_channel_or_absent(const char* name, const Buffer& buffer);
  // Returns the activation of an attribute.
  Activation activation(int64_t value);

  const xla::ffi::DataType statistics_dtype;  // float64 if x is float64, otherwise float32
  const NormShape shape;

 protected:
  const Buffer& x_;
};

}  // namespace jaxgrad

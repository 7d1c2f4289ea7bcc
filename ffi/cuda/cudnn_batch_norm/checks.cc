#include "cuda/cudnn_batch_norm/checks.h"

#include <algorithm>

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

BatchNormShape shape_of(Checks& checks, const ffi::AnyBuffer& x, int64_t feature_axis) {
  const auto sizes = x.dimensions();
  const int64_t rank = static_cast<int64_t>(sizes.size());
  checks.require(rank >= 2, [&] { return "x must have rank 2 or more, got rank " + std::to_string(rank); });
  checks.require(feature_axis >= 0 && feature_axis < rank, "feature_axis must lie in [0, rank)");
  checks.require(x.element_count() > 0, "x must have elements");
  if (checks.failed()) return {};
  BatchNormShape shape{1, sizes[feature_axis], 1};
  for (int64_t i = 0; i < feature_axis; ++i) shape.outer *= sizes[i];
  for (int64_t i = feature_axis + 1; i < rank; ++i) shape.inner *= sizes[i];
  return shape;
}

}  // namespace

BatchNormChecks::BatchNormChecks(const char* target, const ffi::AnyBuffer& x, int64_t feature_axis)
    : Checks(target),
      statistics_dtype(x.element_type() == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32),
      shape(shape_of(*this, x, feature_axis)),
      x_(x) {}

void BatchNormChecks::like_x(const char* name, const ffi::AnyBuffer& buffer) {
  const auto sizes = x_.dimensions(), found = buffer.dimensions();
  const bool same_sizes = std::equal(sizes.begin(), sizes.end(), found.begin(), found.end());
  require(buffer.element_type() == x_.element_type() && same_sizes,
          [&] { return std::string(name) + " must have the shape and dtype of x"; });
}

void BatchNormChecks::like_x_or_absent(const char* name, const ffi::AnyBuffer& buffer) {
  if (buffer.element_count() > 0) like_x(name, buffer);
}

void BatchNormChecks::per_channel(const char* name, const ffi::AnyBuffer& buffer) {
  array(name, buffer, statistics_dtype, {shape.C});
}

void BatchNormChecks::per_channel_or_absent(const char* name, const ffi::AnyBuffer& buffer) {
  optional_array(name, buffer, statistics_dtype, {shape.C});
}

}  // namespace jaxgrad

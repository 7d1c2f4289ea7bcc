#include "common/norm_checks.h"

#include <algorithm>

namespace jaxgrad {
namespace ffi = xla::ffi;
namespace {

NormShape shape_of(Checks& checks, const ffi::AnyBuffer& x, const ffi::AnyBuffer& rstd, const ffi::AnyBuffer* scale) {
  const auto sizes = x.dimensions(), groups = rstd.dimensions();
  checks.require(sizes.size() == 4, "x must have the shape [S, O, C, I]");
  checks.require(x.element_count() > 0, "x must have elements");
  checks.require(groups.size() == 2, "rstd must have the shape [S, G]");
  checks.require(scale == nullptr || scale->dimensions().size() == 2, "scale must have the shape [K, C]");
  if (checks.failed()) return {};
  const NormShape shape{sizes[0], sizes[1],  sizes[2],
                        sizes[3], groups[1], scale == nullptr ? 1 : scale->dimensions()[0]};
  checks.require(shape.G > 0 && shape.C % shape.G == 0, "C must be a multiple of G");
  checks.require(shape.K > 0 && shape.S % shape.K == 0, "S must be a multiple of K");
  return checks.failed() ? NormShape() : shape;
}

}  // namespace

NormChecks::NormChecks(const char* target, const Buffer& x, const Buffer& rstd, const Buffer* scale)
    : Checks(target),
      statistics_dtype(x.element_type() == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32),
      shape(shape_of(*this, x, rstd, scale)),
      x_(x) {}

void NormChecks::like_x(const char* name, const Buffer& buffer) {
  array(name, buffer, x_.element_type(), {shape.S, shape.O, shape.C, shape.I});
}

void NormChecks::like_x_or_absent(const char* name, const Buffer& buffer) {
  if (buffer.element_count() > 0) like_x(name, buffer);
}

void NormChecks::statistics(const char* name, const Buffer& buffer) {
  array(name, buffer, statistics_dtype, {shape.S, shape.G});
}

void NormChecks::statistics_or_absent(const char* name, const Buffer& buffer) {
  if (buffer.element_count() > 0) statistics(name, buffer);
}

void NormChecks::per_channel(const char* name, const Buffer& buffer) {
  array(name, buffer, statistics_dtype, {shape.K, shape.C});
}

void NormChecks::per_channel_or_absent(const char* name, const Buffer& buffer) {
  if (buffer.element_count() > 0) per_channel(name, buffer);
}

Activation NormChecks::activation(int64_t value) {
  require(value >= 0 && value <= static_cast<int64_t>(Activation::kGelu), "activation must be 0, 1, 2 or 3");
  return static_cast<Activation>(value);
}

}  // namespace jaxgrad

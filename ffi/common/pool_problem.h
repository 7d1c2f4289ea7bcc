// Checks of pooling calls, which the handlers of all platforms share.
#pragma once

#include <cstdint>

#include "common/checks.h"
#include "common/pool_shape.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

// Whether sizes are in range, and no product of sizes overflows. y may have any sizes: elements after the end of x are
// padding.
bool pool_sizes_fit(const PoolShape& shape, int64_t threads);

using Sizes = xla::ffi::Span<const int64_t>;

// x and y are [outer, spatial..., channels]; the other arguments have an element for each spatial axis, and padding has
// two: before and after it.
PoolShape pool_shape(Checks& checks, Sizes x, Sizes y, Sizes window, Sizes strides, Sizes padding, Sizes dilation);

// Requires that all arrays have the same element type, and `like_x`, unless it is null, the shape of x.
void check_like_x(Checks& checks, const xla::ffi::AnyBuffer& x, const xla::ffi::AnyBuffer& y,
                  const xla::ffi::AnyBuffer* like_x);

// The attributes of pooling handlers.
#define JAXGRAD_POOL_ATTRIBUTES                         \
  .Attr<::xla::ffi::Span<const int64_t>>("window")      \
      .Attr<::xla::ffi::Span<const int64_t>>("strides") \
      .Attr<::xla::ffi::Span<const int64_t>>("padding") \
      .Attr<::xla::ffi::Span<const int64_t>>("dilation")

}  // namespace jaxgrad

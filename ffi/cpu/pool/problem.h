// The shape of a pooling call, from the sizes of its arrays and its attributes.
#pragma once

#include <cstdint>

#include "common/checks.h"
#include "cpu/pool/op.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

using Sizes = xla::ffi::Span<const int64_t>;

// x and y are [outer, spatial..., channels]; the other arguments have an element for each spatial axis, and padding has
// two: before and after it.
PoolShape pool_shape(Checks& checks, Sizes x, Sizes y, Sizes window, Sizes strides, Sizes padding, Sizes dilation);

}  // namespace jaxgrad

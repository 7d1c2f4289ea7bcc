// The attributes that the convolution handlers of both modules share.
#pragma once

#include <vector>

#include "common/conv_problem.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

using Axes = xla::ffi::Span<const int64_t>;

inline std::vector<int64_t> to_vector(Axes axes) { return {axes.begin(), axes.end()}; }

inline std::vector<int64_t> shape_of(const xla::ffi::AnyBuffer& buffer) { return to_vector(buffer.dimensions()); }

inline ConvArguments conv_arguments(const xla::ffi::AnyBuffer& x, const xla::ffi::AnyBuffer& w,
                                    const xla::ffi::AnyBuffer& y, Axes lhs_spec, Axes rhs_spec, Axes out_spec,
                                    Axes window_strides, Axes padding, Axes rhs_dilation, int64_t groups) {
  return {shape_of(x),
          shape_of(w),
          shape_of(y),
          to_vector(lhs_spec),
          to_vector(rhs_spec),
          to_vector(out_spec),
          to_vector(window_strides),
          to_vector(padding),
          to_vector(rhs_dilation),
          groups};
}

// The attributes that conv_arguments() takes, in its order.
#define JAXGRAD_CONV_ATTRIBUTES     \
  .Attr<Axes>("lhs_spec")           \
      .Attr<Axes>("rhs_spec")       \
      .Attr<Axes>("out_spec")       \
      .Attr<Axes>("window_strides") \
      .Attr<Axes>("padding")        \
      .Attr<Axes>("rhs_dilation")   \
      .Attr<int64_t>("feature_group_count")

}  // namespace jaxgrad

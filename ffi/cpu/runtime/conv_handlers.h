// The operands and results of the convolution handlers on the CPU: those of oneDNN and those of jaxgrad's own kernels.
//
// The specs give the layout of each array, as in jax.lax.ConvDimensionNumbers.
#pragma once

#include "common/conv_attributes.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

using Arg = xla::ffi::AnyBuffer;
using Ret = xla::ffi::Result<xla::ffi::AnyBuffer>;
using Bytes = xla::ffi::Result<xla::ffi::Buffer<xla::ffi::U8>>;

inline std::byte* data_of(Bytes& workspace) { return reinterpret_cast<std::byte*>(workspace->typed_data()); }
inline int64_t bytes_of(Bytes& workspace) { return static_cast<int64_t>(workspace->element_count()); }

inline auto bind_conv_forward() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::ThreadPool>()
      .Arg<xla::ffi::AnyBuffer>()             // x     laid out by lhs_spec
      .Arg<xla::ffi::AnyBuffer>()             // w     laid out by rhs_spec
      .Arg<xla::ffi::AnyBuffer>()             // bias  [output features] or empty
      .Ret<xla::ffi::AnyBuffer>()             // y     laid out by out_spec
      .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
      JAXGRAD_CONV_ATTRIBUTES;
}

inline auto bind_conv_input_gradient() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::ThreadPool>()
      .Arg<xla::ffi::AnyBuffer>()             // dy    laid out by out_spec
      .Arg<xla::ffi::AnyBuffer>()             // w     laid out by rhs_spec
      .Ret<xla::ffi::AnyBuffer>()             // dx    laid out by lhs_spec
      .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
      JAXGRAD_CONV_ATTRIBUTES;
}

inline auto bind_conv_weight_gradient() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::ThreadPool>()
      .Arg<xla::ffi::AnyBuffer>()             // x     laid out by lhs_spec
      .Arg<xla::ffi::AnyBuffer>()             // dy    laid out by out_spec
      .Ret<xla::ffi::AnyBuffer>()             // dw    laid out by rhs_spec
      .Ret<xla::ffi::AnyBuffer>()             // db    [output features] or empty
      .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // workspace
      JAXGRAD_CONV_ATTRIBUTES;
}

}  // namespace jaxgrad

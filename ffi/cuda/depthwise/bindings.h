// Python bindings of the depthwise weight gradient.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxgrad {

void bind_depthwise(nanobind::module_& module);

}  // namespace jaxgrad

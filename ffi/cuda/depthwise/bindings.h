// What Python must know of the depthwise weight gradient while it lowers a call.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxgrad {

void bind_depthwise(nanobind::module_& module);

}  // namespace jaxgrad

// The functions of normalization in the Python module jaxgrad._cuda.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxgrad {

void bind_norm(nanobind::module_& module);

}  // namespace jaxgrad

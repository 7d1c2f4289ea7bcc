// The functions of pooling in the Python module jaxgrad._cuda.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxgrad {

void bind_pool(nanobind::module_& module);

}  // namespace jaxgrad

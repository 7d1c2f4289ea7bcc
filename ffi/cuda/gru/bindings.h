// Python functions about the GRU's kernels.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxgrad {
void bind_gru(nanobind::module_& module);
}

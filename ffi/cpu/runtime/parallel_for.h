// A parallel loop over a callable. Each instruction set has its own copy.
#pragma once

#include "cpu/runtime/parallel.h"

namespace jaxgrad::JAXGRAD_ISA {

template <class Body>
void parallel_for(Parallel& parallel, int64_t tasks, Body body) {
  parallel.run(tasks, &body, [](void* context, int64_t task) { (*static_cast<Body*>(context))(task); });
}

}  // namespace jaxgrad::JAXGRAD_ISA
